"""What tests of programs around a form share: models of two parts, and counts.

`Between` has layers of its own before and after a module, so a compiled program has something to compile on both sides
of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from each_form import whole


class Between(nn.Module):
    """Two layers, and between them another module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x).relu()).tanh())


def inner() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def between(root: Any) -> Between:
    """With the same values each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Between(inner()).double().to(root)


def batches(root: Any, sizes: Sequence[int]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        yield torch.randn(size, 4, dtype=torch.float64, generator=generator).to(root)


def assert_same_parameters(model: nn.Module, expected: nn.Module, atol: float = 1e-9) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.detach()), theirs.detach(), atol=atol, rtol=0)


def assert_trains_alike(model: nn.Module, reference: nn.Module, root: Any, sizes: Sequence[int] = (7, 6, 6, 5)) -> None:
    """Outputs and parameters of both are the same, step by step."""
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference))
    for x in batches(root, sizes):
        outputs = []
        for each, optimizer in ((model, ours), (reference, theirs)):
            optimizer.zero_grad()
            outputs.append(each(x))
            outputs[-1].square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, atol=1e-9, rtol=0)
    assert_same_parameters(model, reference)


def number_of_graphs() -> int:
    """How many graphs have been compiled since the counters were cleared."""
    return counters["stats"]["unique_graphs"]


def graph_breaks() -> dict[str, int]:
    """Why graphs have ended, and how often, since the counters were cleared."""
    return dict(counters["graph_break"])


def compiled_files() -> set[str]:
    """The files of all functions that the compiler has looked at since `forget_what_was_compiled`."""
    return {metrics.co_filename or "" for metrics in torch._dynamo.utils.get_compilation_metrics()}


def forget_what_was_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    counters.clear()
