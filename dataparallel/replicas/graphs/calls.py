"""`GraphedReplicas` makes replicas launch captured graphs, and says what was captured and why not.

A replica runs as it is in the first calls with arguments of one kind: these warm up what is made lazily. Then it is
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
from dataparallel.batches.structures import Arguments
from dataparallel.comm.kinds import attributes_with_tensors
from dataparallel.replicas.build import ParameterRegistry
from dataparallel.replicas.compiled.calls import CALL, CompileArgument, call_inside, compiled_call, use_cuda_graphs
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.replicas.graphs.captured import Captured, Late, Pool
from dataparallel.replicas.graphs.kinds import (
    CannotBeCaptured,
    ForwardReads,
    Structure,
    difference,
    host_generators,
    settings,
)
from dataparallel.replicas.plan import UNIT_MODULE, ModulePlan, names_of
from dataparallel.replicas.replicate import Copies
from dataparallel.replicas.stamp import Stamp
from dataparallel.weak_members import WeakMembers

log = logging.getLogger("dataparallel")

WARM_UP = 2
"""How many calls with arguments of one kind run as they are before they are captured."""

MOST_CAPTURES = 8
"""How many kinds of arguments are captured for one state of a replica. Calls with other kinds run as they are."""

MOST_STATES = 4
"""How many states of a replica have captures: settings, and what its forward reads besides arguments."""

MOST_TRIES = 4
"""How often a capture of one kind may fail, or soon have no use, before the kind runs as it is.

Calls in which the host has drawn random numbers, perhaps for another thread, count too.
"""

MOST_NEW_KINDS = 8
"""After so many calls in a row with new kinds the log says what differs."""

_MOST_KINDS = 1000
"""How many kinds of calls are counted. The one whose last call is longest ago is forgotten first."""


def check_graphs(
    graphs: Any, modules: Sequence[nn.Module], compile: CompileArgument | None, slots: Sequence[torch.device]
) -> bool:
    """Checks the argument ``graphs`` of a form of ``modules``, and returns if replicas launch graphs.

    ``None``: as ``"auto"`` if the modules, or the argument ``compile``, are compiled with CUDA graphs, or else as
    ``False``. ``True`` where there are no graphs is logged, and ``"auto"`` is not.
    """
    if graphs is False or (graphs is None and not use_cuda_graphs(modules, compile)):
        return False
    without = [device for device in slots if device.type != "cuda"]
    if graphs is True and (without or not slots):
        where = f"{without[0]} has none" if without else "there are no CUDA devices"
        log.warning(
            f"graphs=True: {where}, and replicas run as they are. Take graphs='auto' to use graphs where they are"
        )
    return bool(slots) and not without


class GraphedReplicas:
    """The captured graphs of one module's replicas. Copying or unpickling gives an empty one.

    Graphs stay as long as the tensors of a replica do.
    """

    def __init__(self) -> None:
        self._own: dict[int, GraphedReplica] = {}
        self._said: set[str] = set()
        self._others: WeakMembers[GraphedReplicas] = WeakMembers()

    def __reduce__(self) -> tuple[type[GraphedReplicas], tuple[()]]:
        return GraphedReplicas, ()

    @property
    def replicas(self) -> list[GraphedReplica]:
        """What has been captured, and what cannot be, for each replica."""
        return [*self._own.values(), *(replica for other in self._others for replica in other.replicas)]

    def another(self) -> GraphedReplicas:
        """Graphs of other replicas of the same module. Its `replicas` are among those of this object."""
        made = GraphedReplicas()
        made._said = self._said
        self._others.add(made)
        return made

    def prepare(self, plan: ModulePlan, slots: Sequence[torch.device]) -> bool:
        """Tells compiled code of a plan's replicas, before it runs, that it will be captured.

        Returns false if replicas cannot be captured. The reason is logged once, and is in `replicas`.
        """
        for entry in plan.entries:
            if entry.compiled is not None and entry.compiled.functions is not None:
                entry.compiled.functions.are_captured = True
        reason = _why_none(plan)
        self.note_slots(slots, reason)
        return reason is None

    def note_slots(self, slots: Sequence[torch.device], why_none: str | None) -> None:
        """``why_none``: why no replica is captured, if there is a reason."""
        for slot, device in enumerate(slots):
            if slot not in self._own or self._own[slot].device != device:  # other slots may have been assigned
                self._own[slot] = GraphedReplica(device, self._said)
            if why_none is not None:
                self._own[slot].say(why_none)

    def serve(self, by_slot: Sequence[list[Tensor]]) -> None:
        """Drops graphs of slots that have other tensors in the next call."""
        for slot, tensors in enumerate(by_slot):
            self._own[slot].serve(tensors)

    def attach_all(self, replicas: Sequence[nn.Module], copies: Copies) -> None:
        """Makes new replicas launch graphs, if they can be captured. ``copies``: their parameters and buffers.

        Graphs of an earlier replica of a slot are launched for this one if it has the same tensors.
        """
        if not self.prepare(copies.plan, copies.slots):
            return
        self.serve(copies.by_slot)
        for slot, replica in enumerate(replicas):
            try:
                vars(replica)[CALL] = _GraphedCall(replica, self._own[slot])
            except CannotBeCaptured as error:
                self._own[slot].say(str(error))


def _why_none(plan: ModulePlan) -> str | None:
    """Why the plan's replicas are not captured; ``None`` if they may be."""
    shared = [child for item in plan.shared if isinstance(item, nn.Module) for child in item.modules()]
    if any(isinstance(child, torch.jit.ScriptModule) for child in shared):
        return "one of its ignored modules is a ScriptModule"
    for i, tensor in enumerate(plan.tensors):
        # What a class with operators of its own keeps in attributes, such as shards, is what its tensors consist of.
        has_own_operators = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        if not has_own_operators and (attributes := attributes_with_tensors(tensor)):
            return f"the attribute {attributes[0]!r} of {names_of(plan)[i]} holds tensors"
    if plan.is_plain:
        return None
    for entry in plan.entries:
        name, kind = entry.name or "the module", entry.cls.__name__
        if entry.has_hooks:
            return f"{name} has hooks"
        if entry.has_own_rule:
            return f"{name} is {'an' if kind[:1] in 'AEILO' else 'a'} {kind}, whose class makes its replicas itself"
    return "attributes of a module refer to other modules or to tensors"


class _GraphedCall:
    """Calls a replica by its graphs. It refers to the replica weakly, because the replica holds it."""

    def __init__(self, module: nn.Module, graphed: GraphedReplica) -> None:
        self._module, self._graphed = weakref.ref(module), graphed
        self.compiled = compiled_call(module)
        self.reads = ForwardReads(module)
        self.late = _late_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if _torch.is_in_backward():  # a checkpoint runs a forward again, and has to find the same operators
            return call_inside(module, *args, **kwargs)
        return self._graphed.call(self, module, args, kwargs)


def _late_of(root: nn.Module) -> list[Late]:
    """Lookups in registries of a replica wait for parameters that are on their way, and units below it are gathered."""
    registries = [vars(child)["_parameters"] for child in root.modules()]
    found = [
        Late(number, registry.wait_for_all)
        for number, registry in enumerate(registries)
        if isinstance(registry, ParameterRegistry)
    ]
    numbers = {id(registry): number for number, registry in enumerate(registries)}
    unit_module = vars(root).get(UNIT_MODULE)
    for below in () if unit_module is None else unit_module.lower_unit_modules:
        own = (numbers.get(id(registry)) for registry, _, _ in below.entries)
        found += [Late(number, below.wait_for_all) for number in own if number is not None]
    return found


@dataclass
class _GraphKind:
    """Calls of one kind.

    Attributes:
        calls: how many ran as they are, and the host has drawn no random numbers meanwhile.
        threads: in which they ran. Libraries of CUDA have handles for each thread, and make them lazily.
        tries: how often a capture failed, or was of no use soon, or the host has drawn random numbers.
    """

    state: Hashable
    calls: int = 0
    threads: weakref.WeakSet[threading.Thread] = field(default_factory=weakref.WeakSet)
    tries: int = 0
    is_refused: bool = False
    captured: Captured | None = None


class GraphedReplica:
    """What has been captured of one replica, for each kind of call. Any thread may call it.

    Attributes:
        device: of the replica.
        launches: how often captures were launched.
        reasons: why calls run as they are, other than to warm up.
    """

    def __init__(self, device: torch.device, said: set[str]) -> None:
        self.device, self.launches, self.reasons = device, 0, list[str]()
        self._said = said
        self._tensors: Sequence[Tensor] = ()
        self._kinds: dict[Hashable, _GraphKind] = {}  # in the order of their last calls
        self._free: list[Pool] = []
        self._last: Sequence[Any] = ()
        self._new_kinds = 0
        self._busy = threading.Lock()

    @property
    def captures(self) -> int:
        """How many captures there are, of a forward with its backward, if it has one."""
        return sum(kind.captured is not None for kind in [*self._kinds.values()])

    def __str__(self) -> str:
        reasons = "".join(f"; runs as it is: {reason}" for reason in self.reasons)
        return f"the replica on {self.device}: {self.captures} captures, {self.launches} launches{reasons}"

    def serve(self, tensors: Sequence[Tensor]) -> None:
        """Drops all captures if they are not of a replica with these tensors."""
        if len(self._tensors) != len(tensors) or not all(map(is_, self._tensors, tensors)):
            self._tensors, self._kinds, self._new_kinds = tensors, {}, 0

    def say(self, reason: str) -> None:
        """Notes and logs, once, why calls run as they are."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        if reason not in self._said:
            self._said.add(reason)
            log.warning(f"replicas run without a graph: {reason}")

    def call(self, made: _GraphedCall, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module, by a graph if it can.

        A call from another thread would write to the same places meanwhile, so it runs as it is.
        """
        if not self._busy.acquire(blocking=False):
            return call_inside(module, *args, **kwargs)
        try:
            try:
                arguments = Structure(Arguments((args, kwargs)), "arguments", self.device)
                state = (made.reads.now(), *settings())
                kind = self._kind_of(state, (*state, *arguments.kinds()))
                captured = self._captured(kind, module, arguments, made.late)
            except CannotBeCaptured as error:
                self.say(str(error))
                return call_inside(module, *args, **kwargs)
            if captured is not None:
                self.launches += 1
                return captured.launch(arguments.leaves, made.late)
            if kind.is_refused or kind.captured is not None:
                return call_inside(module, *args, **kwargs)
            return self._warm_up(made, kind, module, arguments, args, kwargs)
        finally:
            self._busy.release()

    def _kind_of(self, state: Hashable, key: tuple[Any, ...]) -> _GraphKind:
        kind = self._kinds.pop(key, None)
        self._new_kinds = self._new_kinds + 1 if kind is None else 0
        if self._new_kinds == MOST_NEW_KINDS:
            self.say(difference(self._last, key))
        self._last = key
        while len(self._kinds) >= _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        found = self._kinds[key] = kind or _GraphKind(state)
        return found

    def _captured(
        self, kind: _GraphKind, module: nn.Module, arguments: Structure, late: Sequence[Late]
    ) -> Captured | None:
        """The capture to launch, which is made if it is time; ``None`` if the call runs as it is."""
        if kind.captured is not None and not kind.captured.still_fits():
            if kind.captured.launches < MOST_TRIES:
                self._count_try(kind, "its parameters are elsewhere in each call")
            kind.captured = None
        if kind.captured is None:
            is_warm = kind.calls >= WARM_UP and threading.current_thread() in kind.threads
            if kind.is_refused or not is_warm or not self._has_room(kind):
                return None
            for each in late:  # the capture reads all parameters
                each.wait()
            try:
                # Inside the lock: a capture that has begun waits for nobody who compiles.
                kind.captured = compile_lock.run_inside(Captured, module, arguments, self.device, self._free)
            except CannotBeCaptured as error:
                kind.is_refused = error.is_final
                if error.is_final:
                    raise
                self._count_try(kind, str(error))
                return None
        if kind.captured.is_waiting:
            return None
        compile_lock.run_inside(kind.captured.record_what_was_missed)
        return kind.captured

    def _count_try(self, kind: _GraphKind, reason: str) -> None:
        kind.tries += 1
        if kind.tries >= MOST_TRIES:
            kind.is_refused = True
            self.say(reason)

    def _has_room(self, kind: _GraphKind) -> bool:
        alive = [other for other in self._kinds.values() if other.captured is not None]
        if sum(other.state == kind.state for other in alive) >= MOST_CAPTURES:
            self.say(f"{MOST_CAPTURES} kinds of arguments are captured, and this is another one")
            return False
        states = [*dict.fromkeys(other.state for other in reversed(alive) if other.state != kind.state)]
        for other in alive:
            if other.state in states[MOST_STATES - 1 :]:
                other.captured = None
        return True

    def _warm_up(
        self, made: _GraphedCall, kind: _GraphKind, module: Any, arguments: Structure, args: Any, kwargs: Any
    ) -> Any:
        """Runs the call as it is, and refuses its kind if a graph would not do what the call does."""
        # Units register full parameters and sharded ones in turn.
        registries = ("_buffers", "_modules") if UNIT_MODULE in vars(module) else _torch.REGISTRIES
        state, reached = Stamp([*module.modules()], registries), made.reads.reached()
        generators = host_generators()
        output = call_inside(module, *args, **kwargs)
        kind.threads.add(threading.current_thread())
        try:
            arguments.check_unwritten()
            if not state.holds():
                raise CannotBeCaptured("its forward assigns to attributes")
            if reached != made.reads.reached():
                raise CannotBeCaptured("its forward writes into a list or dict that is global or enclosed")
            found = Structure(output, "its output", self.device)
            self._refuse_if_differentiated(kind, found.leaves)
            if generators == host_generators():
                kind.calls += 1
            else:
                self._count_try(kind, "its forward draws random numbers on the host")
        except CannotBeCaptured as error:
            kind.is_refused = True
            self.say(str(error))
        return output

    def _refuse_if_differentiated(self, kind: _GraphKind, outputs: Sequence[Any]) -> None:
        """Refuses a kind of calls if a backward is differentiated, which a captured one cannot be."""

        def look(grad: Tensor) -> None:
            if torch.is_grad_enabled() and not kind.is_refused:
                kind.is_refused = True
                self.say("its backward is differentiated (create_graph=True)")

        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(look)
