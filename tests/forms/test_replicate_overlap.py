"""Gradients of a replicated module are summed while backward still runs, by the recorded order of events."""

import pytest
import torch

from dataparallel.composable import replicate
from overlap import Layers, Overlap

LAYERS, WIDTH = 20, 192
"""Each layer takes about a millisecond, so the order does not depend on which thread gets a core first."""
LAYER_MB = (WIDTH * WIDTH + WIDTH) * 8 / 2**20


@pytest.mark.alone
@pytest.mark.slots(2, long=[8])
def test_most_buckets_are_summed_before_the_slowest_slot_has_its_first_layers_gradient(
    slots, root, monkeypatch, capsys
):
    """At least 80 % of them, in the median of ten steps, once the order of gradients is known."""
    overlap = Overlap(monkeypatch)
    model = Layers(LAYERS, WIDTH, overlap.note_first_layer).double().to(root)
    replicate(model, devices=slots, bucket_cap_mb=LAYER_MB, first_bucket_mb=LAYER_MB)
    x = torch.randn(128 * len(slots), WIDTH, dtype=torch.float64, device=root)
    share = overlap.median_share(lambda: model(x).square().sum().backward(), len(slots), first_steps=2)
    with capsys.disabled():
        print(f" [{share:.0%} of the buckets]", end="")
    assert share >= 0.8
