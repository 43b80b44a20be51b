"""`GraphedReplicas` makes the modules of replicas launch captured graphs, and says what was captured and why not.

A module runs as it is in the first calls with arguments of one kind: these warm up what is made lazily. Then it is
captured, and launched from then on. What cannot be captured runs as it is, and the reason is logged once. If that is
the whole replica, its parts are captured instead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.replicas.build import ParameterRegistry
from dataparallel.replicas.compiled.calls import CALL, CompileArgument, call_inside, compiled_call, use_cuda_graphs
from dataparallel.replicas.graphs.captures import Captures, Segment, warn_once
from dataparallel.replicas.graphs.kinds import contents_of
from dataparallel.replicas.graphs.places import CapturePlace
from dataparallel.replicas.graphs.pools import Pools
from dataparallel.replicas.graphs.segments import Segments, why_none
from dataparallel.replicas.plan import ModulePlan
from dataparallel.weak_members import WeakMembers

log = logging.getLogger("dataparallel")

MOST_STATES = 4
"""How many states of a module's attributes, such as its mode, are remembered for one replica."""


def check_graphs(
    graphs: Any, modules: Sequence[nn.Module], compile: CompileArgument | None, slots: Sequence[torch.device]
) -> bool:
    """Checks the argument ``graphs`` of a form of ``modules``, and returns if replicas launch graphs.

    ``None``: as ``"auto"`` if the modules, or the argument ``compile``, are compiled with CUDA graphs, or else as
    ``False``. ``True`` where there are no graphs is logged, and ``"auto"`` is not.

    Raises:
        TypeError: ``graphs`` is none of these.
    """
    if graphs is not None and not isinstance(graphs, bool) and graphs != "auto":
        raise TypeError(f"graphs is True, False, 'auto' or None; got {graphs!r}")
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
        self._places: dict[torch.device, CapturePlace] = {}
        self._pools: dict[int, Pools] = {}
        self._tensors: dict[int, list[Tensor]] = {}
        self._captures: dict[tuple[int, str, Hashable], Captures] = {}
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

    def prepare(self, plan: ModulePlan, slots: Sequence[torch.device]) -> bool:
        """Tells compiled code of a plan's replicas, before it runs, that it will be captured.

        Returns false if no module can be captured. The reason is logged once, and is in `segments`.
        """
        for entry in plan.entries:
            if entry.compiled is not None and entry.compiled.functions is not None:
                entry.compiled.functions.are_captured = True
        reason = why_none(plan)
        self._refused = [] if reason is None else [Segment("", slot, reasons=[reason]) for slot in slots]
        if reason is not None:
            warn_once(self._said, "", reason)
        return reason is None

    def attach_all(self, plan: ModulePlan, replicas: Sequence[nn.Module], copies: Sequence[list[Tensor]]) -> None:
        """Calls `attach` for new replicas of a plan, if their modules can be captured."""
        if not self.prepare(plan, [tensors[0].device for tensors in copies if tensors]):
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
        place, pools = self._places.setdefault(device, CapturePlace(device)), self._pools.setdefault(slot, Pools())
        segments = Segments.of(replica)
        for name, module in segments.modules.items():
            key = slot, name, contents_of(module)
            captures = self._captures.get(key)
            if captures is None:
                self._forget_oldest(slot, name)
                captures = self._captures[key] = Captures(Segment(name, device), place, pools, self._said)
            vars(module)[CALL] = _GraphedCall(module, captures, segments)

    def _forget_oldest(self, slot: int, name: str) -> None:
        states = [key for key in self._captures if key[:2] == (slot, name)]
        if len(states) >= MOST_STATES:
            del self._captures[states[0]]


class _GraphedCall:
    """Calls a module by its graphs. It refers to the module weakly, because the module holds it.

    Outputs of the root are copies: the next launch would write to those that are in a graph's memory.
    """

    def __init__(self, module: nn.Module, captures: Captures, segments: Segments) -> None:
        self._module, self._captures = weakref.ref(module), captures
        self.compiled = compiled_call(module)
        name = captures.segment.name
        self._is_root = not name
        self._is_captured = {False: name in segments.without_gradients, True: name in segments.with_gradients}
        # Their lookups wait for parameters that are on their way. A graph looks nothing up.
        registries = enumerate(vars(child)["_parameters"] for child in module.modules())
        self._late = [late for late in registries if isinstance(late[1], ParameterRegistry)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if _torch.is_in_backward():  # a checkpoint runs a forward again, and has to find the same operators
            return call_inside(module, *args, **kwargs)
        if self._is_captured[torch.is_grad_enabled()]:
            output = self._captures.call(module, args, kwargs, self._late)
        else:
            output = call_inside(module, *args, **kwargs)
        return self._captures.apart(output) if self._is_root else output
