"""`Pieces`: where one capture is cut into several graphs, so that copies between devices overlap with them.

A forward is cut where parts of the module begin: each graph waits only for the parameters that its piece looks up. The
backward is cut there too, if the one tensor with which the part begins carries all gradients back. So the gradients of
one piece are summed while the next one runs. ``captured`` uses this file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dataparallel import _torch
from dataparallel.replicas.compiled.calls import CALL

MOST_PIECES = 6
"""If a module has more parts, a piece has several of them, so that there are few launches."""

LARGE_PIECE = 25 * 2**20
"""A piece with so many bytes of parameters gets no further part: sending them takes longer than a launch."""

_of_thread = threading.local()


def is_capturing() -> bool:
    """True while the calling thread captures."""
    return current_pieces() is not None


def current_pieces() -> Pieces | None:
    """The pieces of what the calling thread captures."""
    found: Pieces | None = getattr(_of_thread, "pieces", None)
    return found


@contextmanager
def capturing(pieces: Pieces) -> Iterator[None]:
    """Inside the block the calling thread captures."""
    _of_thread.pieces = pieces
    try:
        yield
    finally:
        _of_thread.pieces = None


@dataclass(frozen=True)
class Boundary:
    """A tensor with which a part begins, and the edge of autograd's graph that leads from it to what came before."""

    tensor: Tensor
    edge: GradientEdge


@dataclass(frozen=True)
class BackwardPiece:
    """A piece of a backward: from gradients at ``begins`` to those of leaves, and of the boundary below it.

    Attributes:
        outputs: the tensors whose gradients come in.
        begins: their edges.
        below: the boundary that the next piece begins with, if there is one.
        leaves: whose gradients it computes, those of inputs first.
    """

    outputs: Sequence[Tensor]
    begins: Sequence[GradientEdge]
    below: Boundary | None
    leaves: Sequence[Tensor]


class Pieces:
    """The pieces of one capture.

    Args:
        module: what is captured.
        parameters: those that get gradients. A piece sees leaves in their place, in the same memory: the nodes of the
            parameters belong to other streams, which a captured backward must not touch.
        cut: ends a graph and begins the next one. It is called where parts begin.
        is_here: true if the calling thread works for the capture. Other threads may call the modules meanwhile.

    Attributes:
        parameter_of: by the id of a leaf its parameter, and the leaf, which keeps the id.
        first_graph: for each module of the tree, by its number, the graph that looks its first parameter up.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        cut: Callable[[], None],
        is_here: Callable[[], bool],
    ) -> None:
        self._modules = [*module.modules()]
        self._cut, self.is_here = cut, is_here
        self._boundaries: list[Boundary] = []
        self._starts = self._graphs = 0
        self.first_graph: dict[int, int] = {}
        self.parameter_of: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._first_leaf = {id(parameter): self._leaf(parameter) for parameter in parameters}
        self._later_leaves: dict[tuple[int, int], nn.Parameter] = {}
        parts = sum(CALL in vars(child) for child in self._modules[1:])
        self._parts_of_piece = math.ceil(parts / MOST_PIECES)
        self._most_pieces = max(parts, MOST_PIECES)  # a part may be called several times
        self._begun = self._nbytes = 0  # of the piece

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        leaf = nn.Parameter(parameter.detach())
        self.parameter_of[id(leaf)] = parameter, leaf
        return leaf

    @contextmanager
    def leaves_in_modules(self) -> Iterator[None]:
        """Inside the block the modules have leaves for parameters. Lookups wait for nothing."""
        registries = [(vars(module), vars(module)["_parameters"]) for module in self._modules]
        try:
            for number, (attributes, registry) in enumerate(registries):
                items = {name: self._first_leaf.get(id(value), value) for name, value in dict.items(registry)}
                attributes["_parameters"] = _Lookups(items, registry, number, self)
            yield
        finally:
            for attributes, registry in registries:
                attributes["_parameters"] = registry

    def note_use(self, number: int) -> None:
        """Module ``number`` uses its parameters."""
        self.first_graph.setdefault(number, self._graphs)

    def leaf_for(self, leaf: Any) -> Any:
        """What is used in the place of a leaf: each piece of the backward has leaves of its own."""
        if self._starts == 0 or id(leaf) not in self.parameter_of:
            return leaf
        key = id(leaf), self._starts
        if key not in self._later_leaves:
            self._later_leaves[key] = self._leaf(self.parameter_of[id(leaf)][0])
        return self._later_leaves[key]

    def part_begins(self, part: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called before a part of the module runs in the forward, with its arguments."""
        is_full = self._begun >= self._parts_of_piece or self._nbytes >= LARGE_PIECE
        if self._first_leaf and is_full and self._graphs + 1 < self._most_pieces and self.is_here():
            self._begin_piece(_torch.pytree.tree_leaves((args, kwargs)))
            self._begun = self._nbytes = 0
        self._begun += 1
        registries = [vars(module)["_parameters"] for module in part.modules()]
        self._nbytes += sum(p.nbytes for registry in registries for p in dict.values(registry) if p is not None)

    def _begin_piece(self, arguments: Sequence[Any]) -> None:
        recorded = [leaf for leaf in arguments if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        if len(recorded) == 1:
            self._boundaries.append(Boundary(recorded[0], get_gradient_edge(recorded[0])))
            self._starts += 1
        self._graphs += 1
        self._cut()

    def of_backward(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[BackwardPiece]:
        """The pieces of the backward, from the last one of the forward to the first."""
        nodes = {
            get_gradient_edge(leaf).node: leaf for leaf in (*inputs, *(leaf for _, leaf in self.parameter_of.values()))
        }
        found = []
        begins = [get_gradient_edge(output) for output in outputs]
        # Both a backward that ends at a tensor with hooks and one that begins there would call them.
        for boundary in (each for each in reversed(self._boundaries) if not _torch.hooks_of(each.tensor)):
            above, is_met = _reached(begins, boundary.edge)
            if is_met and above and above.isdisjoint(_reached([boundary.edge])[0]):
                leaves = [leaf for node, leaf in nodes.items() if node in above]
                place = Boundary(boundary.tensor.detach(), boundary.edge)
                found.append(BackwardPiece(outputs, begins, place, leaves))
                outputs, begins = [place.tensor], [place.edge]
        last, _ = _reached(begins)
        return [*found, BackwardPiece(outputs, begins, None, [leaf for node, leaf in nodes.items() if node in last])]


class _Lookups(dict[str, Any]):
    """The leaves of a module while it is captured. Other threads find the parameters, in ``registry``.

    `Module.__getattr__` looks them up one by one, and gets those of the piece.
    """

    def __init__(self, leaves: dict[str, Any], registry: dict[str, Any], number: int, pieces: Pieces) -> None:
        super().__init__(leaves)
        self._registry, self._number, self._pieces = registry, number, pieces

    def __getitem__(self, name: str) -> Any:
        if not self._pieces.is_here():
            return self._registry[name]
        self._pieces.note_use(self._number)
        return self._pieces.leaf_for(super().__getitem__(name))

    def _all(self) -> dict[str, Any]:
        if not self._pieces.is_here():
            return dict(self._registry)
        self._pieces.note_use(self._number)
        return {name: dict.__getitem__(self, name) for name in dict.keys(self)}

    def get(self, name: str, default: Any = None) -> Any:
        return self._all().get(name, default)

    def items(self) -> Any:
        return self._all().items()

    def values(self) -> Any:
        return self._all().values()

    def copy(self) -> dict[str, Any]:
        return self._all()

    def __iter__(self) -> Iterator[str]:
        # ``dict(lookups)`` and ``**lookups`` look every value up because this method exists.
        return iter(self._all())


def _reached(begins: Iterable[GradientEdge], stop: GradientEdge | None = None) -> tuple[set[Any], bool]:
    """The nodes of a backward from ``begins``, and if it comes to ``stop``, where it ends."""
    found: set[Any] = set()
    is_met = False
    left = [(edge.node, edge.output_nr) for edge in begins]
    while left:
        node, number = left.pop()
        if stop is not None and node is stop.node and number == stop.output_nr:
            is_met = True
        elif node not in found:
            found.add(node)
            left += [(following, nr) for following, nr in node.next_functions if following is not None]
    return found, is_met
