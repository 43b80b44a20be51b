"""How many buckets are summed before backward ends, by the recorded order of events; and a model to see it with."""

import statistics
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dataparallel.autograd.bucket_gradients import ToSlots


class Overlap:
    """Notes when a bucket has been summed, and when a replica has the gradient of its first layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: list[str] = []
        self._lock = threading.Lock()
        summed = ToSlots.sum_over_slots

        def noted(*arguments):
            sums = summed(*arguments)
            self._note("sum")
            return sums

        monkeypatch.setattr(ToSlots, "sum_over_slots", noted)

    def note_first_layer(self, *_: object) -> None:
        """A hook for the node that has the first layer's gradient."""
        self._note("first layer")

    def _note(self, event: str) -> None:
        with self._lock:
            self._events.append(event)

    def median_share(self, step: Callable[[], object], slots: int, first_steps: int = 0) -> float:
        """The share of buckets that are summed before the slowest slot has that gradient.

        The median of ten steps, after ``first_steps`` others.
        """
        shares = []
        for number in range(first_steps + 10):
            self._events.clear()
            step()
            assert self._events.count("first layer") == slots
            assert self._events.count("sum") >= 10
            last_slot = max(i for i, event in enumerate(self._events) if event == "first layer")
            if number >= first_steps:
                shares.append(self._events[:last_slot].count("sum") / self._events.count("sum"))
        return statistics.median(shares)


class Layers(nn.Module):
    """A bucket for each layer. Notes when a replica has the gradients of the first one's weights."""

    def __init__(self, count: int, width: int, note: Callable[..., object] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        # Cuts the first layer off, so that a node comes to have its gradients just before the broadcast does.
        weight, bias = self.layers[0].weight * 1, self.layers[0].bias * 1
        if self.note is not None and weight.requires_grad:
            weight.grad_fn.register_hook(self.note)
        x = torch.tanh(nn.functional.linear(x, weight, bias))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x
