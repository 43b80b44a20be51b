"""`CapturedPieces`: where one capture is cut into several graphs, so that copies between devices overlap with them.

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
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.calls import CALL, CompiledCall

MOST_PIECES = 6
"""If a module has more parts, a piece has several of them, so that there are few launches."""

LARGE_PIECE = 25 * 2**20
"""A piece with so many bytes of parameters gets no further part: sending them takes longer than a launch."""

_of_thread = threading.local()


def is_capturing() -> bool:
    """True while the calling thread captures."""
    return current_pieces() is not None


def current_pieces() -> CapturedPieces | None:
    """The pieces of what the calling thread captures."""
    found: CapturedPieces | None = getattr(_of_thread, "pieces", None)
    return found


@contextmanager
def capturing(pieces: CapturedPieces) -> Iterator[None]:
    """Inside the block the calling thread captures."""
    _of_thread.pieces = pieces
    try:
        yield
    finally:
        _of_thread.pieces = None


def is_part(module: nn.Module) -> bool:
    """True if a module of a replica has graphs of its own, or could have them. A piece may begin with it."""
    return not isinstance(vars(module).get(CALL), (CompiledCall, type(None)))


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
        runs_once: compiled code runs in it, which may write to what the forward has saved.
    """

    outputs: Sequence[Tensor]
    begins: Sequence[GradientEdge]
    below: Boundary | None
    leaves: Sequence[Tensor]
    runs_once: bool


class CapturedPieces:
    """The pieces of one capture.

    Args:
        module: what is captured.
        parameters: those that need gradients. A piece sees leaves in their place, in the same memory. The nodes of the
            parameters belong to other streams, which a captured backward must not touch. And other threads, which may
            use the same parameter, do not find what autocast has converted of a leaf.
        cut: ends a graph and begins the next one. It is called where parts begin. ``None``: there is one piece.
        is_here: true on the stream of the capture. A part that runs on another stream is not the end of a piece.

    Attributes:
        parameter_of: by the id of a leaf its parameter, and the leaf, which keeps the id.
        first_graph: for each module of the tree, by its number, the graph that looks its first parameter up.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        cut: Callable[[], None] | None,
        is_here: Callable[[], bool],
    ) -> None:
        self._cut, self._is_here = cut, is_here
        self._boundaries: list[Boundary] = []
        self._starts = self._graphs = 0
        self.first_graph: dict[int, int] = {}
        self.parameter_of: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._first_leaf = {id(parameter): self._leaf(parameter) for parameter in parameters}
        self._later_leaves: dict[tuple[int, int], Tensor] = {}
        parts = sum(is_part(child) for child in module.modules() if child is not module)
        self._parts_of_piece = math.ceil(parts / MOST_PIECES)
        self._most_pieces = max(parts, MOST_PIECES)  # a part may be called several times
        self._begun = self._nbytes = 0  # of the piece

    def _leaf(self, parameter: nn.Parameter) -> Tensor:
        leaf = parameter.detach().requires_grad_()
        leaf.__class__ = type(parameter)  # compiled code expects it
        self.parameter_of[id(leaf)] = parameter, leaf
        return leaf

    def leaves_of(self, registry: dict[str, Any]) -> dict[str, Any]:
        """What a copy of a module has in place of this registry. Lookups there wait for nothing."""
        return {name: self._first_leaf.get(id(value), value) for name, value in dict.items(registry)}

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
        if self._cut is not None and is_full and self._graphs + 1 < self._most_pieces and self._is_here():
            self._begin_piece(_torch.pytree.tree_leaves((args, kwargs)))
            self._cut()
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

    def forget_boundaries(self) -> None:
        """Ends a cycle. Their graph may hold the copy of the module, by a checkpoint for example, and the copy this."""
        self._boundaries.clear()

    def of_backward(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[BackwardPiece]:
        """The pieces of the backward, from the last one of the forward to the first.

        Raises:
            RuntimeError: it comes to a leaf that is none of these. A launch would not compute its gradient.
        """
        nodes = {
            get_gradient_edge(leaf).node: leaf for leaf in (*inputs, *(leaf for _, leaf in self.parameter_of.values()))
        }
        begins = [get_gradient_edge(output) for output in outputs]
        if any(hasattr(node, "variable") and node not in nodes for node in _reached(begins)[0]):
            raise RuntimeError(
                "it uses a tensor that needs a gradient and is neither an argument nor its own parameter"
            )

        def piece(below: Boundary | None, reached: set[Any]) -> BackwardPiece:
            leaves = [leaf for node, leaf in nodes.items() if node in reached]
            return BackwardPiece(outputs, begins, below, leaves, any(map(torch_compile.is_compiled_backward, reached)))

        found = []
        # Both a backward that ends at a tensor with hooks and one that begins there would call them.
        for boundary in (each for each in reversed(self._boundaries) if not _torch.hooks_of(each.tensor)):
            above, is_met = _reached(begins, boundary.edge)
            if is_met and above and above.isdisjoint(_reached([boundary.edge])[0]):
                place = Boundary(boundary.tensor.detach(), boundary.edge)
                found.append(piece(place, above))
                outputs, begins = [place.tensor], [place.edge]
        return [*found, piece(None, _reached(begins)[0])]


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
