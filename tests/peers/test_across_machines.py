"""Across machines a collective gives each replica what it has if all replicas are on one machine, gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn

from dataparallel import DataParallel, peers
from machine_ranks import on_machines
from peer_calls import Calls
from peer_machines import FUNCTIONS, Across, as_one_call, grad_of, samples, spanning

ALL = [*FUNCTIONS]


# The form, and for each machine the chunks of its batch: a machine may have fewer chunks than slots.
@pytest.mark.parametrize(
    ("form", "chunks", "slots"),
    [
        ("replicate", [[2, 3], [1, 4]], 2),
        ("fully_shard", [[2, 3], [1, 4]], 2),
        ("replicate", [[2, 3], [1]], 2),
        pytest.param("replicate", [[2], [3]], 1, marks=pytest.mark.smoke),
        ("replicate", [[1, 3], [2, 2], [4, 1]], 2),
        ("fully_shard", [[1, 3], [2, 2], [4, 1]], 2),
    ],
    ids=str,
)
def test_as_one_machine(form, chunks, slots):
    ranks = len(chunks)
    assert on_machines(as_one_call, ALL, form, chunks, ranks=ranks, slots=slots) == [len(ALL)] * ranks


def test_a_mesh_of_two_dimensions():
    chunks, names = [[2], [3], [1], [2]], ["all_gather", "all_reduce mean"]
    assert on_machines(as_one_call, names, "fully_shard", chunks, (2, 2), ranks=4, slots=1) == [2] * 4


def one_process(rank: int, devices: list[torch.device]) -> bool:
    """Inside of a wrapper without machines, ``across_machines`` is the wrapper's replicas."""

    def function(chunk: Tensor) -> Tensor:
        return chunk * 0 + peers.count(across_machines=True)

    class Inner(nn.Module):
        def forward(self, chunk: Tensor) -> Tensor:
            return function(chunk)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, chunk: Tensor) -> Tensor:
            assert peers.count() == 2
            assert peers.count(across_machines=True) == 4
            inner = DataParallel(Inner(), [chunk.device] * 3)(chunk)
            assert peers.count(across_machines=True) == 4
            return inner * self.weight

    found = spanning(Outer(), devices)(torch.ones(6, 1, device=devices[0]))
    return bool((found == 3).all())


def test_a_wrapper_inside_has_replicas_of_its_own():
    assert on_machines(one_process) == [True, True]


def partly_in_a_graph(rank: int, devices: list[torch.device]) -> list[float]:
    """Only rank 0's tensor needs a gradient. It comes from the results of all machines."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, chunk: Tensor) -> Tensor:
            own = chunk * self.weight if rank == 0 else chunk
            return chunk * peers.all_reduce(own.sum(0), across_machines=True) + 0 * self.weight

    model = spanning(Model(), devices, average=False)
    batch = torch.full((4, 3), float(rank + 1), dtype=torch.float64, device=devices[0])
    model(batch).sum().backward()
    return [*map(float, grad_of(model.weight))]


def test_a_machine_whose_tensors_need_no_gradient_sends_those_of_others():
    # weight * 4 of rank 0 is in all results: 4 rows of 1 on rank 0, 4 rows of 2 on rank 1.
    assert on_machines(partly_in_a_graph) == [[48.0] * 3] * 2


def differentiated_twice(rank: int, devices: list[torch.device]) -> bool:
    """Second derivatives with respect to the inputs, as on one machine."""
    batch = samples(8)
    rows = slice(4 * rank, 4 * rank + 4)

    def penalty(model: nn.Module, given: Tensor) -> tuple[Tensor, Tensor]:
        given = given.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        return first.detach().cpu(), second.cpu()

    model = spanning(Across("all_gather").requires_grad_(False), devices)
    one = DataParallel(Calls(FUNCTIONS["all_gather"]).requires_grad_(False), ["cpu"] * 4)
    for ours, theirs in zip(penalty(model, batch[rows].to(devices[0])), penalty(one, batch), strict=True):
        torch.testing.assert_close(ours, theirs[rows], rtol=1e-9, atol=1e-9)
    return True


def test_collectives_can_be_differentiated_twice():
    assert on_machines(differentiated_twice) == [True, True]


def evaluates_alone(rank: int, devices: list[torch.device]) -> bool:
    """A forward without collectives sends nothing, also after forwards that had some."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, chunk: Tensor) -> Tensor:
            out = chunk * self.weight
            return out - peers.all_reduce(out.mean(0), "mean", across_machines=True) if self.training else out

    model = spanning(Model(), devices)
    batch = samples(4).to(devices[0])
    for step in range(3):
        model.train()
        model(batch).square().sum().backward()
        if rank == step % 2:
            model.eval()
            with torch.no_grad():
                torch.testing.assert_close(model(batch), batch)
            distributed.barrier()
        else:
            distributed.barrier()
    return True


def test_one_machine_may_evaluate_alone():
    assert on_machines(evaluates_alone) == [True, True]
