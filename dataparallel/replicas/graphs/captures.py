"""`Captures`: the captures of one module of one replica, for each kind of arguments, and why others were not made.

``calls`` uses this file.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.replicas.build import ParameterRegistry
from dataparallel.replicas.compiled.calls import call_inside
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.replicas.graphs.captured import CannotBeCaptured, Captured
from dataparallel.replicas.graphs.kinds import kind_of
from dataparallel.replicas.graphs.places import CapturePlace
from dataparallel.replicas.graphs.pools import ForwardPool, Pools
from dataparallel.replicas.tree_state import TreeState

log = logging.getLogger("dataparallel")

WARM_UP = 2
"""How many calls with arguments of one kind run as they are before they are captured."""

MOST_DRAWS = 8
"""A module is not captured after so many calls in which the host has drawn random numbers.

In fewer calls another thread may have drawn them.
"""

MOST_CAPTURES = 8
"""How many kinds of arguments are captured for one module of one replica. Calls with other kinds run as they are."""

_MOST_KINDS = 1000
"""Of how many kinds of arguments calls are counted."""


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


_of_thread = threading.local()


def as_it_is(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module that has graphs, or may get them, without one. No part of it is captured meanwhile."""
    before = _is_part_of_another()
    _of_thread.is_part_of_another = True
    try:
        return call_inside(module, *args, **kwargs)
    finally:
        _of_thread.is_part_of_another = before


def _is_part_of_another() -> bool:
    return getattr(_of_thread, "is_part_of_another", False)


class _HostGenerators:
    """The global generators for the host. A captured graph would do for ever what they draw once."""

    def __init__(self) -> None:
        self._before = self._states()

    def _states(self) -> list[object]:
        states: list[object] = [torch.get_rng_state().tolist(), random.getstate()]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            states.append([numpy.asarray(each).tobytes() for each in numpy.random.get_state()])
        return states

    def have_drawn(self) -> bool:
        """True if one of them has drawn since, for this thread or for another one."""
        return self._states() != self._before


@dataclass
class _WarmUps:
    """Calls with arguments of one kind that ran as they are, before a capture.

    Attributes:
        calls: how many there were, without those in ``draws``.
        draws: in how many the host has drawn random numbers.
    """

    calls: int = 0
    draws: int = 0


class Captures:
    """The captures of one module of one replica, for each kind of arguments. Any thread may call it."""

    def __init__(self, segment: Segment, place: CapturePlace, pools: Pools, said: set[str]) -> None:
        self.segment, self._place, self._pools, self._said = segment, place, pools, said
        self._without_gradients: ForwardPool | None = None  # one launch after the other, each with its copies
        self._warm_ups: dict[Hashable, _WarmUps] = {}
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
            return as_it_is(module, args, kwargs)
        try:
            return self._call(module, args, kwargs, late)
        finally:
            self._busy.release()

    def _call(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], late: Sequence[tuple[int, ParameterRegistry]]
    ) -> Any:
        if torch.is_grad_enabled() and _torch.top_saved_tensors_hooks(True) is not None:
            # A capture would call them once, and launches would read for ever what they have packed then.
            self._say_if_alone("hooks for saved tensors are set, as in a checkpoint")
            return as_it_is(module, args, kwargs)
        leaves, spec = _torch.pytree.tree_flatten((args, kwargs))
        kind = kind_of(leaves, spec, self._place.device)
        if isinstance(kind, str):
            self._say_if_alone(kind)
            return call_inside(module, *args, **kwargs)
        captured = self._of_kind.get(kind)
        if captured is not None and (captured.misses > WARM_UP or not captured.still_fits()):
            del self._of_kind[kind]
        if kind not in self._of_kind:
            if self.segment.captures >= MOST_CAPTURES:
                self._say(f"{MOST_CAPTURES} kinds of arguments are captured, and this is another one")
                return as_it_is(module, args, kwargs)
            warm_ups = self._warm_ups_of(kind)
            if warm_ups.calls < WARM_UP:
                return self._warm_up(kind, warm_ups, module, args, kwargs)
            if _is_part_of_another():
                return call_inside(module, *args, **kwargs)
            self._of_kind[kind] = self._capture(module, leaves, spec)
        captured = self._of_kind[kind]
        if captured is None:
            return call_inside(module, *args, **kwargs)
        if _torch.why_hooks_are_disabled() is None:
            with self._pools.launching:
                if captured.may_be_launched():
                    self.segment.launches += 1
                    return captured.launch(leaves, late)
        return as_it_is(module, args, kwargs)

    def _warm_ups_of(self, kind: Hashable) -> _WarmUps:
        if len(self._warm_ups) > _MOST_KINDS:
            self._warm_ups.clear()
        return self._warm_ups.setdefault(kind, _WarmUps())

    def _warm_up(
        self, kind: Hashable, warm_ups: _WarmUps, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        state, generators = TreeState([*module.modules()], _torch.REGISTRIES), _HostGenerators()
        leaves, spec = _torch.pytree.tree_flatten((args, kwargs))
        output = as_it_is(module, args, kwargs)
        leaves_after, spec_after = _torch.pytree.tree_flatten((args, kwargs))
        if spec != spec_after or not all(map(is_, leaves, leaves_after)):
            self._refuse(kind, "its forward writes into a dict or list among its arguments")
        elif not state.is_unchanged():
            self._refuse(kind, "its forward assigns to attributes")
        elif not generators.have_drawn():
            warm_ups.calls += 1
        else:
            warm_ups.draws += 1
            if warm_ups.draws == MOST_DRAWS:
                self._refuse(kind, "its forward draws random numbers on the host")
        return output

    def _refuse(self, kind: Hashable, reason: str) -> None:
        self._of_kind[kind] = None
        self._say(reason)

    def _capture(self, module: nn.Module, leaves: Sequence[Any], spec: Any) -> Captured | None:
        try:
            # Inside the lock: a capture that has begun waits for nobody who compiles.
            captured = compile_lock.run_inside(Captured, module, leaves, spec, self._place, self._pool(), self._pools)
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

    def _say_if_alone(self, reason: str) -> None:
        # What is a part of another capture needs none of its own.
        if not _is_part_of_another():
            self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self.segment.reasons:
            self.segment.reasons.append(reason)
        warn_once(self._said, self.segment.name, reason)


def warn_once(said: set[str], name: str, reason: str) -> None:
    """Logs why a module runs without a graph, unless this text is in ``said``."""
    text = f"{name or 'the whole module'} runs without a graph: {reason}"
    if text not in said:
        said.add(text)
        log.warning(text)
