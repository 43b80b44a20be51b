"""Gradients of a replicated module are summed while backward still runs, by the recorded order of events."""

import statistics
import threading

import pytest
import torch
from torch import nn

from dataparallel.bucket_nodes import ToSlots
from dataparallel.composable import replicate

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

LAYERS, WIDTH = 20, 192
"""Layers take about a millisecond each: the order is not up to which thread gets a core first."""
LAYER_MB = (WIDTH * WIDTH + WIDTH) * 8 / 2**20


class Layers(nn.Module):
    """Notes when a replica has the gradient of the first layer's weight."""

    def __init__(self, note) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.note = note

    def forward(self, x):
        # Cuts the first layer off, so that a node comes to have its gradients just before the broadcast does.
        weight, bias = self.layers[0].weight * 1, self.layers[0].bias * 1
        weight.grad_fn.register_hook(self.note)
        x = torch.tanh(nn.functional.linear(x, weight, bias))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slots(2, 8)
def test_most_buckets_are_summed_before_the_slowest_slot_has_its_first_layers_gradient(
    slots, root, monkeypatch, capsys
):
    """At least 80 % of them, in the median of ten steps, once the order of gradients is known."""
    events, lock = [], threading.Lock()

    def note(event):
        with lock:
            events.append(event)

    summed = ToSlots.summed

    def noted(*arguments):
        envelope = summed(*arguments)
        note("sum")
        return envelope

    monkeypatch.setattr(ToSlots, "summed", noted)
    model = Layers(lambda grad_inputs, grad_outputs: note("first layer")).double().to(root)
    replicate(model, devices=slots, bucket_cap_mb=LAYER_MB, first_bucket_mb=LAYER_MB)
    x = torch.randn(128 * len(slots), WIDTH, dtype=torch.float64, device=root)
    shares = []
    for step in range(12):
        events.clear()
        model(x).square().sum().backward()
        assert events.count("first layer") == len(slots)
        assert events.count("sum") >= 10
        last_slot = max(i for i, event in enumerate(events) if event == "first layer")
        if step >= 2:
            shares.append(events[:last_slot].count("sum") / events.count("sum"))
    with capsys.disabled():
        print(f" [{statistics.median(shares):.0%} of the buckets]", end="")
    assert statistics.median(shares) >= 0.8
