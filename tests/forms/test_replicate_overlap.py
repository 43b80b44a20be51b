"""Gradients of a replicated module are summed while backward still runs, by the recorded order of events."""

import pytest
import torch
from torch import nn

from dataparallel.composable import replicate
from overlap import Overlap

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

LAYERS, WIDTH = 20, 192
"""Each layer takes about a millisecond, so the order does not depend on which thread gets a core first."""
LAYER_MB = (WIDTH * WIDTH + WIDTH) * 8 / 2**20


class Layers(nn.Module):
    """Notes when a replica has the gradient of the first layer's weight."""

    def __init__(self, note) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.note = note

    def forward(self, x):
        # Puts a node between the broadcast and the first layer: it gets the gradients just before the broadcast.
        weight, bias = self.layers[0].weight * 1, self.layers[0].bias * 1
        weight.grad_fn.register_hook(self.note)
        x = torch.tanh(nn.functional.linear(x, weight, bias))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.alone
@pytest.mark.slots(2, long=[8])
def test_most_buckets_are_summed_before_the_slowest_slot_has_its_first_layers_gradient(
    slots, root, monkeypatch, capsys
):
    """At least 80 % of them, in the median of ten steps, once the order of gradients is known."""
    overlap = Overlap(monkeypatch)
    model = Layers(overlap.note_first_layer).double().to(root)
    replicate(model, devices=slots, bucket_cap_mb=LAYER_MB, first_bucket_mb=LAYER_MB)
    x = torch.randn(128 * len(slots), WIDTH, dtype=torch.float64, device=root)
    share = overlap.median_share(lambda: model(x).square().sum().backward(), len(slots), first_steps=2)
    with capsys.disabled():
        print(f" [{share:.0%} of the buckets]", end="")
    assert share >= 0.8
