"""`CapturedPieces`: where one capture is cut into several graphs, so that copies between devices overlap with them.

A forward is cut where parts of the module begin: each graph waits only for the parameters that its piece looks up. The
backward is cut there too, if the one tensor with which the part begins carries all gradients back. So the gradients of
one piece are summed while the next one runs. The capture runs a copy of the module, with leaves in the place of its
parameters. The module itself stays as it is, so other threads may call it meanwhile. ``captured`` uses this file.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dataparallel import _torch
from dataparallel.comm.kinds import alias
from dataparallel.replicas.build import ParameterRegistry, bare_module, give_attributes
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.calls import CALL, CompiledCall, call_inside, compiled_calls
from dataparallel.replicas.plan import UNIT_MODULE, instance_slots

MOST_PIECES = 6
"""If a module has more parts, a piece has several of them, so that there are few launches."""

MOST_UNITS = 16
"""The same for a sharded module, whose parts are its units."""

LARGE_PIECE = 25 * 2**20
"""A piece with so many bytes of parameters gets no further part: sending them takes longer than a launch."""

_LARGE_PART = 0.5
"""A part with more than this share of the parameters is taken apart, so that not all gradients come at the end."""

_of_thread = threading.local()


def is_capturing() -> bool:
    """True while the calling thread captures the forward of a replica."""
    return getattr(_of_thread, "pieces", None) is not None


def parts_of(root: nn.Module) -> dict[str, nn.Module]:
    """The modules with which a piece may begin, by name.

    These are the children of the root that have children themselves. Lists and dicts of modules have no forward, so
    their entries take their place. So do the parts of a child with more than half of the parameters, such as the model
    in a module that computes its loss. What is compiled is not taken apart.
    """
    whole, found = _nbytes_of(root), dict[str, nn.Module]()

    def look_below(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            before = len(found)
            if (not has_forward or _nbytes_of(child) > _LARGE_PART * whole) and not compiled_calls(child):
                look_below(child, f"{prefix}{name}.")
            is_part = has_forward and len(found) == before and any(True for _ in child.children())
            if is_part and child not in found.values():
                found[f"{prefix}{name}"] = child

    if not compiled_calls(root):
        look_below(root, "")
    return found


def _nbytes_of(root: nn.Module) -> int:
    # Not by a lookup, which would wait for parameters that are on their way.
    registries = [vars(child)["_parameters"] for child in root.modules()]
    return sum(p.nbytes for registry in registries for p in dict.values(registry) if p is not None)


class Recording(NamedTuple):
    """Graphs of a piece of the backward, for one pattern of incoming gradients.

    ``grads_below``: where they leave those of the tensor below. ``taken`` returns those of the leaves.
    """

    graphs: list[Any]
    grads_below: list[Tensor | None]
    taken: Callable[[], list[Tensor | None]]


@dataclass(eq=False)
class BackwardPiece:
    """A piece of a backward: from gradients at ``begins`` to those of leaves, and of the tensor ``below``.

    Attributes:
        begins: edges of the tensors whose gradients come in.
        below: the edge with which the next piece begins, and its tensor, if there is one.
        leaves: whose gradients it computes, those of inputs first.
        runs_once: compiled code runs in it, which may write to what the forward has saved.
        outputs: what its node gives: the outputs of the module, or the tensor at which the piece above begins.
        have_grads: for each of them if the piece takes its gradient.
        grad_outputs: where graphs read these gradients.
        inputs, parameters: what its node takes: arguments, by number among those with gradients.
        recordings: by the pattern of gradients that come in. ``None``: that pattern runs as it is.
        missed: a pattern that came without a recording.
    """

    begins: Sequence[GradientEdge]
    below: tuple[GradientEdge, Tensor] | None
    leaves: Sequence[Tensor]
    runs_once: bool
    outputs: Sequence[Tensor] = ()
    have_grads: Sequence[bool] = ()
    grad_outputs: Sequence[Tensor] = ()
    inputs: Sequence[int] = ()
    parameters: Sequence[Tensor] = ()
    recordings: dict[tuple[bool, ...], Recording | None] = field(default_factory=dict)
    missed: tuple[bool, ...] | None = None


class CapturedPieces:
    """The pieces of one capture.

    Args:
        module: what is captured.
        cut: ends a graph and begins the next one. It is called where parts begin. ``None``: there is one piece.

    Attributes:
        copy: of the module, with leaves in the same memory as the parameters, whose nodes belong to other streams, and
            of which other threads must not find what autocast has converted here. Each piece has leaves of its own.
        parameter_of: by the id of a leaf its parameter, and the leaf, which keeps the id.
        first_graph: for each module of the tree, by its number, the graph that looks its first parameter up.
    """

    def __init__(self, module: nn.Module, cut: Callable[[], None] | None) -> None:
        self._cut = cut
        self._boundaries: list[Tensor] = []
        self._begun = self._nbytes = self._graphs = 0  # the first two are of the piece
        self._given: list[Any] = []  # to the last part that has begun
        self.first_graph: dict[int, int] = {}
        self.parameter_of: dict[int, tuple[Tensor, Tensor]] = {}
        self._registries: list[tuple[dict[str, Any], dict[str, Any]]] = []  # those of the copy, and the module's
        units = {id(child) for child in module.modules() if child is not module and UNIT_MODULE in vars(child)}
        parts = units or {id(part) for part in parts_of(module).values()}
        self._parts_of_piece = math.ceil(len(parts) / (MOST_UNITS if units else MOST_PIECES))
        self._most_pieces = max(len(parts), MOST_PIECES)  # a part may be called several times
        self.copy = self._copied(module, parts)

    def _copied(self, root: nn.Module, parts: set[int]) -> Any:
        modules = [*root.modules()]
        copies = {id(module): bare_module(type(module)) for module in modules}
        calls = {id(module): compiled_calls(module) for module in modules}
        compiled = [call.module for found in calls.values() for call in found.values() if call.functions is not None]
        traced = {id(child) for module in compiled for child in module.modules()}
        for number, module in enumerate(modules):
            copy, own = copies[id(module)], vars(module).copy()
            registry = own["_parameters"]
            # Compiled code looks at the types of what it has traced.
            own["_parameters"] = {} if id(module) in traced else _Lookups(number, self)
            self._registries.append((own["_parameters"], registry))
            buffers = own["_buffers"].items()
            own["_buffers"] = {name: value if value is None else alias(value, 1) for name, value in buffers}
            own["_modules"] = {name: copies.get(id(child), child) for name, child in own["_modules"].items()}
            own.pop(CALL, None)
            if UNIT_MODULE in own:
                own[UNIT_MODULE] = own[UNIT_MODULE].for_capture()
            own.update({name: call.of(copies[id(call.module)]) for name, call in calls[id(module)].items()})
            if id(module) in parts:
                own[CALL] = _PartCall(copy, own.get(CALL))
            give_attributes(copy, own, module, instance_slots(type(module)))
        self._give_leaves()
        return copies[id(root)]

    def _give_leaves(self) -> None:
        leaves: dict[int, Tensor] = {}  # one for each parameter: modules share some
        for own, registry in self._registries:
            for name, value in dict.items(registry):
                if value is not None and value.requires_grad:
                    if id(value) not in leaves:
                        leaf = leaves[id(value)] = alias(value, 1).requires_grad_()  # with versions of its own
                        leaf.__class__ = type(value)  # compiled code expects it
                        self.parameter_of[id(leaf)] = value, leaf
                    value = leaves[id(value)]
                dict.__setitem__(own, name, value)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside the block the calling thread captures the forward."""
        _of_thread.pieces = self
        try:
            yield
        finally:
            _of_thread.pieces = None
            self._given.clear()

    def note_use(self, number: int) -> None:
        """Module ``number`` uses its parameters."""
        self.first_graph.setdefault(number, self._graphs)

    def part_begins(self, part: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called before a part of the module runs in the forward, with its arguments."""
        is_full = self._begun >= self._parts_of_piece or self._nbytes >= LARGE_PIECE
        given, self._given = self._given, _torch.pytree.tree_leaves((args, kwargs))
        # A part that begins with the arguments of the part around it would end an empty graph.
        is_first = len(given) == len(self._given) and all(map(is_, given, self._given))
        if self._cut is not None and is_full and not is_first and self._graphs + 1 < self._most_pieces:
            recorded = [leaf for leaf in self._given if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
            if len(recorded) == 1:
                self._boundaries.append(recorded[0])
                self._give_leaves()
            self._graphs += 1
            self._cut()
            self._begun = self._nbytes = 0
        self._begun += 1
        self._nbytes += _nbytes_of(part)

    def of_backward(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[BackwardPiece]:
        """The pieces of the backward, from the last one of the forward to the first.

        Raises:
            RuntimeError: it comes to a leaf that is none of these. A launch would not compute its gradient.
        """
        # Both a backward that ends at a tensor with hooks and one that begins there would call them.
        edges = [(get_gradient_edge(each), each) for each in self._boundaries if not _torch.hooks_of(each)]
        self._boundaries.clear()  # their graph may hold the copy, by a checkpoint for example, and the copy this
        leaves = [*inputs, *(leaf for _, leaf in self.parameter_of.values())]
        nodes = {get_gradient_edge(leaf).node: leaf for leaf in leaves}
        begins = [get_gradient_edge(output) for output in outputs]
        if any(hasattr(node, "variable") and node not in nodes for node in _reached(begins)[0]):
            raise RuntimeError(
                "it uses a tensor that needs a gradient and is neither an argument nor its own parameter"
            )

        def piece(below: tuple[GradientEdge, Tensor] | None, reached: set[Any]) -> BackwardPiece:
            found = [leaf for node, leaf in nodes.items() if node in reached]
            return BackwardPiece(begins, below, found, any(map(torch_compile.is_compiled_backward, reached)))

        found = []
        for edge, tensor in reversed(edges):
            above, is_met = _reached(begins, edge)
            if is_met and above and above.isdisjoint(_reached([edge])[0]):
                found.append(piece((edge, tensor.detach()), above))
                begins = [edge]
        return [*found, piece(None, _reached(begins)[0])]


class _PartCall:
    """Calls a part of the copy, where a piece may begin. It refers to the part weakly, because the part holds it."""

    def __init__(self, part: nn.Module, compiled: CompiledCall | None) -> None:
        self._part, self.compiled = weakref.ref(part), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part: Any = self._part()
        if is_capturing():  # not in a backward, where a checkpoint runs the part again
            _of_thread.pieces.part_begins(part, args, kwargs)
        return call_inside(part, *args, **kwargs)


class _Lookups(ParameterRegistry):
    """The parameters of a module of the copy. Lookups note which graph they are in, while the forward is captured."""

    __slots__ = ("_number", "_pieces")

    def __init__(self, number: int, pieces: CapturedPieces) -> None:
        dict.__init__(self)
        self._number, self._pieces = number, weakref.proxy(pieces)

    def __getitem__(self, name: str) -> Any:
        self.wait_for_all()
        return dict.__getitem__(self, name)

    def wait_for_all(self) -> None:
        if is_capturing():
            self._pieces.note_use(self._number)


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
