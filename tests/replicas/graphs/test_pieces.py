"""Captures that are cut into several graphs: where, what each piece reads, and that gradients are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel.replicas.graphs import pieces as pieces_of
from dataparallel.replicas.graphs.pieces import BackwardPiece, CapturedPieces
from each_form import Form, graphing_forms, sharded_children
from graphed_nets import SETTLE, Block, Net, build, captured, inputs, replays, step

WIDTH = 3


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.double))
        self.child = nn.Identity()  # what has children is a part

    def forward(self, *given: Tensor) -> Tensor:
        return torch.stack(given).sum(0).matmul(self.weight).tanh()


class Parts(nn.Module):
    """``run`` calls the parts. ``cuts`` counts how often a graph has ended."""

    def __init__(self, count: int, run: Callable[[Parts, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH).double()
        self.parts = nn.ModuleList(Part() for _ in range(count))
        self.run, self.cuts = run, 0

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)

    def cut(self) -> None:
        self.cuts += 1


def cut_up(model: Parts, x: Tensor) -> tuple[list[Tensor], list[BackwardPiece], CapturedPieces]:
    """Outputs of a forward in pieces, and the pieces of its backward."""
    pieces = CapturedPieces(model, model.cut)
    with pieces.capturing():
        output = pieces.copy(x)
    outputs = [output] if isinstance(output, Tensor) else [*output]
    return outputs, pieces.of_backward(outputs, [x]), pieces


def gradients(
    found: Sequence[BackwardPiece], outputs: Sequence[Tensor], pieces: CapturedPieces, model: Parts, x: Tensor
) -> list[Tensor | None]:
    """Of the sum of all outputs, piece by piece."""
    sums: dict[int, Tensor] = {}
    grads = [torch.ones_like(output) for output in outputs]
    for piece in found:
        below: list[Any] = [] if piece.below is None else [piece.below[0]]
        all_of_it = torch.autograd.grad(
            piece.begins, [*below, *piece.leaves], grads, retain_graph=True, allow_unused=True
        )
        for leaf, grad in zip(piece.leaves, all_of_it[len(below) :], strict=True):
            source = x if leaf is x else pieces.parameter_of[id(leaf)][0]
            assert grad is not None  # the backward of the piece comes to all of its leaves
            sums[id(source)] = grad + sums.get(id(source), 0)
        grads = [*all_of_it[: len(below)]]
    return [sums.get(id(tensor)) for tensor in (x, *model.parameters())]


def check(model: Parts) -> list[BackwardPiece]:
    """Asserts that gradients by pieces are those without, and returns the pieces."""
    x = torch.randn(2, WIDTH, dtype=torch.double, requires_grad=True)
    outputs, found, pieces = cut_up(model, x)
    plain = model(x)
    plain = [plain] if isinstance(plain, Tensor) else [*plain]
    torch.testing.assert_close(outputs, plain, rtol=0, atol=0)
    total = sum(output.sum() for output in plain)
    expected = torch.autograd.grad(total, [x, *model.parameters()], allow_unused=True)
    torch.testing.assert_close(gradients(found, outputs, pieces, model, x), [*expected], rtol=1e-12, atol=1e-12)
    return found


def row(model: Parts, x: Tensor) -> Tensor:
    x = model.first(x)
    for part in model.parts:
        x = part(x)
    return x


@pytest.mark.devices("cpu")
class TestBackward:
    def test_is_cut_where_each_part_begins(self) -> None:
        model = Parts(4, row)
        found = check(model)
        assert [len(piece.leaves) for piece in found] == [1, 1, 1, 4]  # the first one has the input and `first`
        assert model.cuts == 3

    def test_is_not_cut_where_a_weight_is_kept_for_later(self) -> None:
        def run(model: Parts, x: Tensor) -> Tensor:
            weight = model.parts[0].weight
            return model.parts[1](model.parts[0](x)).matmul(weight)

        assert len(check(Parts(2, run))) == 1

    @pytest.mark.parametrize("is_late", [False, True])
    def test_is_not_cut_at_a_tensor_with_a_hook(self, is_late: bool) -> None:
        """It would be called twice."""

        def run(model: Parts, x: Tensor) -> Tensor:
            y = model.parts[0](x)
            z = model.parts[1](y) if is_late else None
            y.register_hook(lambda grad: 3 * grad)
            return model.parts[1](y) if z is None else z

        assert len(check(Parts(2, run))) == 1

    @given(
        steps=st.lists(
            st.tuples(st.integers(0, 4), st.lists(st.integers(0, 20), min_size=1, max_size=3)), min_size=1, max_size=12
        ),
        results=st.lists(st.integers(0, 20), max_size=2),
        tied=st.booleans(),
    )
    def test_whatever_the_parts_take(self, steps: list[tuple[int, list[int]]], results: list[int], tied: bool) -> None:
        """Each step calls a part with some of the values so far."""

        def run(model: Parts, x: Tensor) -> list[Tensor]:
            values = [model.first(x)]
            for number, taken in steps:
                values.append(model.parts[number](*(values[-1 - i % len(values)] for i in taken)))
            return [values[-1], *(values[i % len(values)] for i in results)]

        model = Parts(5, run)
        if tied:
            model.parts[3].weight = model.parts[1].weight
        check(model)


@pytest.mark.devices("cpu")
class TestForward:
    @pytest.mark.parametrize("way", ["parameters", "values", "get", "merged"])
    def test_waits_for_parameters_that_are_read_without_a_lookup(self, way: str) -> None:
        def run(model: Parts, x: Tensor) -> Tensor:
            registry = model.parts[2]._parameters
            weight = {
                "parameters": lambda: next(model.parts[2].parameters()),
                "values": lambda: next(iter(registry.values())),
                "get": lambda: registry.get("weight"),
                "merged": lambda: {**registry}["weight"],
            }[way]()
            return row(model, x) * weight.sum()

        model = Parts(3, run)
        _, _, pieces = cut_up(model, torch.randn(2, WIDTH, dtype=torch.double, requires_grad=True))
        assert pieces.first_graph[[*model.modules()].index(model.parts[2])] == 0
        check(model)


@pytest.mark.devices("cuda")
@graphing_forms
def test_a_step_launches_two_graphs_for_each_piece(form: Form, slots: list, root: torch.device) -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(2 * pieces_of.MOST_PIECES)])

    network, x = form(build(root, Deep), slots, graphs=True), inputs(root)
    for _ in range(SETTLE):
        step(network, x)
    assert captured(network)
    with replays() as launched:
        step(network, x)
    pieces = 15 if form is sharded_children else pieces_of.MOST_PIECES  # its units
    assert len(launched) == 2 * pieces * len(slots)
