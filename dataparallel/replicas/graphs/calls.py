"""`GraphedReplicas` makes the modules of replicas launch captured graphs, and says what was captured and why not.

A module runs as it is in the first calls with arguments of one kind: these warm up what is made lazily. Then it is
captured, and launched from then on. What cannot be captured runs as it is, and the reason is logged once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.replicas.build import ParameterRegistry
from dataparallel.replicas.compiled.calls import CALL
from dataparallel.replicas.compiled.functions import by_call_impl
from dataparallel.replicas.graphs.captured import CannotBeCaptured, Captured
from dataparallel.replicas.graphs.kinds import contents_of, kind_of
from dataparallel.replicas.graphs.pieces import current_pieces
from dataparallel.replicas.graphs.places import Place
from dataparallel.replicas.graphs.pools import ForwardPool, Pools
from dataparallel.replicas.graphs.segments import Segments, why_none
from dataparallel.replicas.plan import ModulePlan
from dataparallel.replicas.tree_state import TreeState
from dataparallel.weak_members import WeakMembers

log = logging.getLogger("dataparallel")

WARM_UP = 2
"""How many calls with arguments of one kind run as they are before they are captured."""

MOST_CAPTURES = 8
"""How many kinds of arguments are captured for one module of one replica. Calls with other kinds run as they are."""

MOST_STATES = 4
"""How many states of a module's attributes, such as its mode, are remembered for one replica."""

_MOST_KINDS = 1000
"""Of how many kinds of arguments calls are counted."""


def check_graphs(graphs: Any, compile: object, slots: Sequence[torch.device]) -> bool:
    """Checks the argument ``graphs`` of a form, and returns if replicas launch graphs.

    ``compile``: the argument of this name. ``True`` where there are no graphs is logged, and ``"auto"`` is not.

    Raises:
        TypeError: ``graphs`` is neither a bool nor ``"auto"``.
        ValueError: the replicas are compiled too.
    """
    if not isinstance(graphs, bool) and graphs != "auto":
        raise TypeError(f"graphs is True, False or 'auto'; got {graphs!r}")
    if graphs is True and compile is not None:
        raise ValueError("graphs=True and compile= do not go together: replicas are compiled, or captured as they are")
    if graphs is False or compile is not None:
        return False
    without = [device for device in slots if device.type != "cuda"]
    if graphs is True and (without or not slots):
        where = f"{without[0]} has none" if without else "there are no CUDA devices"
        log.warning(
            f"graphs=True: {where}, and replicas run as they are. Take graphs='auto' to use graphs where they are"
        )
    return bool(slots) and not without


@dataclass
class Segment:
    """What has been captured of one module of one replica.

    Attributes:
        name: of the module, below the root.
        device: of the replica.
        captures: how many graphs there are, of a forward with its backward, if it has one.
        launches: how often they were launched.
        reasons: why calls run as they are, other than to warm up.
    """

    name: str
    device: torch.device
    captures: int = 0
    launches: int = 0
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.captures} captured, {self.launches} launches"
        reasons = "".join(f"; runs as it is: {reason}" for reason in self.reasons)
        return f"{self.name or 'the whole'} on {self.device}: {counts}{reasons}"


class GraphedReplicas:
    """The captured graphs of one module's replicas. Copying or unpickling gives an empty one.

    Graphs stay as long as the tensors of a replica do.
    """

    def __init__(self) -> None:
        self._places: dict[torch.device, Place] = {}
        self._pools: dict[int, Pools] = {}
        self._tensors: dict[int, list[Tensor]] = {}
        self._captures: dict[tuple[int, str, Hashable], _Captures] = {}
        self._refused: list[Segment] = []
        self._said: set[str] = set()
        self._others: WeakMembers[GraphedReplicas] = WeakMembers()

    def __reduce__(self) -> tuple[type[GraphedReplicas], tuple[()]]:
        return GraphedReplicas, ()

    @property
    def segments(self) -> list[Segment]:
        """What has been captured, and what cannot be, for each module of each replica."""
        found = [captures.segment for captures in self._captures.values()]
        own = [segment for segment in found if segment.captures or segment.reasons]
        return [*self._refused, *own, *(segment for other in self._others for segment in other.segments)]

    def another(self) -> GraphedReplicas:
        """Graphs of other replicas of the same module. Its `segments` are among those of this object."""
        made = GraphedReplicas()
        made._said = self._said
        self._others.add(made)
        return made

    def are_refused(self, plan: ModulePlan, slots: Sequence[torch.device]) -> bool:
        """True if no module of a plan's replicas can be captured. The reason is logged once, and is in `segments`."""
        reason = why_none(plan)
        self._refused = [] if reason is None else [Segment("", slot, reasons=[reason]) for slot in slots]
        if reason is not None:
            _warn_once(self._said, "", reason)
        return reason is not None

    def attach_all(self, plan: ModulePlan, replicas: Sequence[nn.Module], copies: Sequence[list[Tensor]]) -> None:
        """Calls `attach` for new replicas of a plan, if their modules can be captured."""
        if self.are_refused(plan, [tensors[0].device for tensors in copies if tensors]):
            return
        for slot, (replica, tensors) in enumerate(zip(replicas, copies, strict=True)):
            self.attach(replica, slot, tensors)

    def attach(self, replica: nn.Module, slot: int, tensors: list[Tensor]) -> None:
        """Makes a new replica of a plain tree launch graphs. ``tensors``: its parameters and buffers.

        Graphs of an earlier replica of the slot are launched for this one if it has the same tensors.
        """
        former = self._tensors.get(slot, [])
        if len(former) != len(tensors) or not all(map(is_, former, tensors)):
            self._captures = {key: captures for key, captures in self._captures.items() if key[0] != slot}
            self._tensors[slot] = tensors
        devices = {tensor.device for tensor in tensors}
        device = next(iter(devices), None)
        if device is None or device.type != "cuda" or len(devices) > 1:
            return
        place, pools = self._places.setdefault(device, Place(device)), self._pools.setdefault(slot, Pools())
        segments = Segments.of(replica)
        for name, module in segments.modules.items():
            key = slot, name, contents_of(module)
            captures = self._captures.get(key)
            if captures is None:
                self._forget_oldest(slot, name)
                captures = self._captures[key] = _Captures(Segment(name, device), place, pools, self._said)
            vars(module)[CALL] = _GraphedCall(module, captures, segments)

    def _forget_oldest(self, slot: int, name: str) -> None:
        states = [key for key in self._captures if key[:2] == (slot, name)]
        if len(states) >= MOST_STATES:
            del self._captures[states[0]]


class _GraphedCall:
    """Calls a module by its graphs. It refers to the module weakly, because the module holds it.

    Outputs of the root are copies: the next launch would write to those that are in a graph's memory.
    """

    def __init__(self, module: nn.Module, captures: _Captures, segments: Segments) -> None:
        self._module, self._captures = weakref.ref(module), captures
        name = captures.segment.name
        self._is_root = not name
        self._is_captured = {False: name in segments.without_gradients, True: name in segments.with_gradients}
        # Their lookups wait for parameters that are on their way. A graph looks nothing up.
        registries = enumerate(vars(child)["_parameters"] for child in module.modules())
        self._late = [late for late in registries if isinstance(late[1], ParameterRegistry)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        pieces = current_pieces()
        if pieces is not None:
            pieces.part_begins(module, args, kwargs)
        # A checkpoint runs a forward again in a backward, and has to find the same operators.
        if pieces is not None or _torch.is_in_backward():
            return by_call_impl(module, *args, **kwargs)
        if self._is_captured[torch.is_grad_enabled()]:
            output = self._captures.call(module, args, kwargs, self._late)
        else:
            output = by_call_impl(module, *args, **kwargs)
        return self._captures.apart(output) if self._is_root else output


_of_thread = threading.local()


def _as_it_is(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module that has graphs, or may get them, without one. No part of it is captured meanwhile."""
    before = _is_part_of_another()
    _of_thread.is_part_of_another = True
    try:
        return by_call_impl(module, *args, **kwargs)
    finally:
        _of_thread.is_part_of_another = before


def _is_part_of_another() -> bool:
    return getattr(_of_thread, "is_part_of_another", False)


class _Captures:
    """The captures of one module of one replica, for each kind of arguments. Any thread may call it."""

    def __init__(self, segment: Segment, place: Place, pools: Pools, said: set[str]) -> None:
        self.segment, self._place, self._pools, self._said = segment, place, pools, said
        self._without_gradients: ForwardPool | None = None  # one launch after the other, each with its copies
        self._calls: dict[Hashable, int] = {}
        self._of_kind: dict[Hashable, Captured | None] = {}
        self._busy = threading.Lock()

    def apart(self, output: Any) -> Any:
        """The output, with copies of tensors that are in a graph's memory."""
        return _torch.pytree.tree_map_only(Tensor, self._place.apart, output)

    def call(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], late: Sequence[tuple[int, ParameterRegistry]]
    ) -> Any:
        """Calls the module, by a graph if it can. ``late``: see `Captured.launch`.

        A call from another thread would write to the same places meanwhile, so it runs as it is.
        """
        if not self._busy.acquire(blocking=False):
            return _as_it_is(module, args, kwargs)
        try:
            return self._call(module, args, kwargs, late)
        finally:
            self._busy.release()

    def _call(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], late: Sequence[tuple[int, ParameterRegistry]]
    ) -> Any:
        leaves, spec = _torch.pytree.tree_flatten((args, kwargs))
        kind = kind_of(leaves, spec, self._place.device)
        if isinstance(kind, str):
            self._say(kind)
            return by_call_impl(module, *args, **kwargs)
        captured = self._of_kind.get(kind)
        if captured is not None and (captured.misses > WARM_UP or not captured.still_fits()):
            del self._of_kind[kind]
        if kind not in self._of_kind:
            if self.segment.captures >= MOST_CAPTURES:
                self._say(f"{MOST_CAPTURES} kinds of arguments are captured, and this is another one")
                return _as_it_is(module, args, kwargs)
            if self._is_warming_up(kind):
                return self._warm_up(kind, module, args, kwargs)
            if _is_part_of_another():
                return by_call_impl(module, *args, **kwargs)
            self._of_kind[kind] = self._capture(module, leaves, spec)
        captured = self._of_kind[kind]
        if captured is None:
            return by_call_impl(module, *args, **kwargs)
        if _torch.why_saved_tensors_hooks_are_disabled() is None:
            with self._pools.launching:
                if captured.may_be_launched():
                    self.segment.launches += 1
                    return captured.launch(leaves, late)
        return _as_it_is(module, args, kwargs)

    def _is_warming_up(self, kind: Hashable) -> bool:
        if len(self._calls) > _MOST_KINDS:
            self._calls.clear()
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        return calls <= WARM_UP

    def _warm_up(self, kind: Hashable, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = TreeState([*module.modules()], _torch.REGISTRIES)
        output = _as_it_is(module, args, kwargs)
        if not state.is_unchanged():
            self._of_kind[kind] = None
            self._say("its forward assigns to attributes")
        return output

    def _capture(self, module: nn.Module, leaves: Sequence[Any], spec: Any) -> Captured | None:
        try:
            captured = Captured(module, leaves, spec, self._place, self._pool(), self._pools)
        except CannotBeCaptured as error:
            self._say(str(error))
            return None
        self.segment.captures += 1
        return captured

    def _pool(self) -> ForwardPool:
        if torch.is_grad_enabled():
            return self._pools.for_forward()
        if self._without_gradients is None:
            self._without_gradients = ForwardPool()
        return self._without_gradients

    def _say(self, reason: str) -> None:
        if reason not in self.segment.reasons:
            self.segment.reasons.append(reason)
        _warn_once(self._said, self.segment.name, reason)


def _warn_once(said: set[str], name: str, reason: str) -> None:
    text = f"{name or 'the whole module'} runs without a graph: {reason}"
    if text not in said:
        said.add(text)
        log.warning(text)
