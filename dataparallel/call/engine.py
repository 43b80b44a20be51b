"""`ReplicaMaker.run` makes a call of any form: scatter -> replicate -> parallel_apply -> gather.

Each form has its own `ReplicaMaker`. ``torch.compile`` does not trace what runs on slots.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.batches.gather import Pad, gather_outputs
from dataparallel.batches.scatter import moved, scatter_arguments
from dataparallel.batches.structures import CopiedContainer, arguments_of_one, leaves, written_into
from dataparallel.call.options import CallOptions
from dataparallel.call.parallel_apply import is_serial, run_replicas
from dataparallel.comm.streams.ahead import HostReads
from dataparallel.comm.streams.arrivals import LateCopies
from dataparallel.devices import current_device_set, resolve, resolve_output
from dataparallel.profiling import stage
from dataparallel.replicas.kept_replicas import KeptReplicas
from dataparallel.replicas.references import Hold, ReferenceCycles, cycles_of, hold_by_output
from dataparallel.threads.meetings import Meeting
from dataparallel.threads.settings import refuse_what_cannot_be_shared

if TYPE_CHECKING:
    from dataparallel.machines.peer_rounds import PeerCall


class Method(NamedTuple):
    """Replicas run their method of this ``name``, a single slot runs ``of_module``. ``pad``: ``None`` is the form's."""

    name: str
    of_module: Callable[..., Any]
    pad: Pad = None


class ReplicaMaker(ABC):
    """Makes the calls of a form. Its replicas come from fresh copies, copies that stay, or shards. Forms subclass it.

    ``may_use_source``: true if code of the user may write to parameters between the stages: see `Call`.
    """

    may_use_source = False
    kept: KeptReplicas
    options: CallOptions

    @_torch.not_traced
    def run(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of ``method`` for the whole batch, on the output device. There is at least one slot."""
        with self.spans_machines(method) as peers, Call(self, method, peers) as call:
            output = call.stages(inputs, kwargs)
        checks = self.options.checks
        if checks.are_open:
            is_training = getattr(self.source(), "training", False)  # frozen ScriptModules have no mode
            checks.look_at(self.options, call.slots, (inputs, kwargs), is_training)
        return output

    def run_without_slots(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `run`, where there is no slot: the module itself runs. ``torch.compile`` may trace this."""
        inputs, kwargs = arguments_of_one(inputs, kwargs)
        return self.alone(method)(*inputs, **kwargs)

    @abstractmethod
    def source(self) -> nn.Module:
        """Returns the module that is called."""

    def spans_machines(self, method: Method) -> AbstractContextManager[PeerCall | None]:
        """Returns a context around a call. Over several machines it gives a `PeerCall`, and tells them of a failure."""
        return nullcontext()

    @abstractmethod
    def check(self, slots: Sequence[torch.device]) -> None:
        """Called before each call. Raises ``RuntimeError`` if a tensor is not on the expected device.

        Copies on several slots are checked when they are made: `KeptReplicas` has their plan.
        """

    def alone(self, method: Method) -> Callable[..., Any]:
        return method.of_module

    def needs_no_replica(self) -> bool:
        """True if a single slot can run the module itself."""
        return True

    def lends(self, slots: Sequence[torch.device]) -> AbstractContextManager[Any]:
        """Returns a context around ``replicate`` and ``parallel_apply``. `replicas` gets its value as ``lent``."""
        return nullcontext()

    @abstractmethod
    def replicas(self, method: Method, lent: Any, slots: list[torch.device]) -> list[Any]:
        """Runs the stage ``replicate``: returns the replicas for ``slots``."""

    def joins(self, devices: Sequence[torch.device]) -> AbstractContextManager[None]:
        """Returns a context around ``gather``. ``devices``: all slots, and the device for outputs."""
        return nullcontext()

    def returns(self, output: Any) -> None:  # noqa: B027 - most forms do nothing
        """Called with the output of each call that has made replicas."""


_of_thread = threading.local()
"""``call``: the `Call` whose overridden stage this thread runs. The stage calls the wrapper's stage by ``super()``,
which has torch's signature, with no parameter for the call."""


class Call:
    """One call: a context around its `stages`. It refuses calls that cannot run, and releases memory after the stages.

    When the call ends without an error, activations and copies are freed, unless the output or other code still refers
    to them: the local variables of `stages` are gone then. If the call fails, the traceback keeps the variables alive,
    and this object with its holds of the `ReferenceCycles`.

    However the call ends, the host then waits until no copy reads pinned memory of the caller. The copies wait for
    nothing that the devices compute.

    If replicas run one after the other, no copies of parameters are late: the computing streams wait for all copies
    before the first replica starts. If code of the user runs between the stages, which may write to the source or step
    an optimizer, no copies are late either, because only lookups in replicas wait for late copies.

    Attributes:
        copied: containers among the arguments to which replicas may write; ``None`` if they are not handed back.
        combine_scalars, pad: what the stage gather takes.
    """

    def __init__(self, maker: ReplicaMaker, method: Method, peers: PeerCall | None = None) -> None:
        options = maker.options
        self.maker, self.options, self.method, self.peers = maker, options, method, peers
        self.slots = [resolve(device) for device in options.slots]
        self.output_device = resolve_output(options.output_device, self.slots)
        maker.check(self.slots)
        if len(self.slots) > 1:
            refuse_what_cannot_be_shared()
        self.kept = maker.kept
        self.combine_scalars: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.pad = options.pad if method.pad is None else method.pad
        self._cycles: list[ReferenceCycles] = []
        self._holds: list[Hold] = []
        in_order = is_serial(options.serial) or maker.may_use_source or options.may_use_source
        self._copies = LateCopies(allowed=not (_torch.note_whether_compiler_is_in_use() or in_order))
        self.reads = HostReads()
        self.copied: list[CopiedContainer] | None = [] if options.hands_back else None

    def stages(self, inputs: Any, kwargs: Any) -> Any:
        """Runs the four stages. ``inputs`` and ``kwargs`` are the batch's; scatter makes one entry per slot."""
        options, maker, slots = self.options, self.maker, self.slots
        with stage("scatter"):
            overridden = self._overridden("scatter")
            if overridden is None:
                inputs, kwargs = scatter_arguments(
                    inputs, kwargs, slots, options.dim, options.split, self.reads, self.copied
                )
            else:
                inputs, kwargs = overridden(inputs, kwargs)
        if not inputs and not kwargs:  # a call without arguments
            inputs, kwargs = ((),), ({},)
        if len(slots) == 1 and maker.needs_no_replica():
            return self._run_alone(inputs[0], kwargs[0])
        slots = slots[: len(inputs)]
        self.combine_scalars = options.combines.of_chunks(inputs, kwargs, options.dim)
        with maker.lends(slots) as lent, _InsideReplicas(maker.source(), self.method.name):
            with stage("replicate"), self._copies.may_begin():  # only here copies of parameters may be late
                overridden = self._overridden("replicate")
                replicas = maker.replicas(self.method, lent, slots) if overridden is None else overridden(slots)
                self._cycles = cycles_of(replicas)
                self._holds = [cycles.hold("call") for cycles in self._cycles]
            with stage("parallel_apply"):
                overridden = self._overridden("parallel_apply")
                if overridden is None:
                    outputs = run_replicas(
                        replicas,
                        inputs,
                        kwargs,
                        slots,
                        workers=options.workers,
                        serial=options.serial,
                        permits=options.permits,
                        method=self.method.name,
                        machines=self.peers,
                    )
                else:
                    outputs = overridden(replicas, inputs, kwargs)
        with stage("gather"), maker.joins([*self.slots, self.output_device]):
            gather = partial(gather_outputs, target_device=self.output_device, dim=options.dim)
            gather = partial(gather, combine=self.combine_scalars, pad=self.pad)
            overridden, written = self._overridden("gather"), written_into(self.copied or ())
            if overridden is None:
                output = gather(outputs, written=written)
            else:
                output = overridden(outputs)
                if written:
                    gather([None] * len(outputs), written=written)
        returned = (output, [entry.joined for entry in written]) if written else output
        # The graph of the output may need the replicas. If no tensor is found in it, nothing is noted.
        if self._cycles and (found := [leaf for _, leaf in leaves(returned, "") if isinstance(leaf, torch.Tensor)]):
            hold_by_output(self._cycles, found)
        maker.returns(returned)
        if self.peers is not None:
            self.peers.expect_backward_of(returned)
        return output

    def _run_alone(self, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        (slot,), output_device, method = self.slots, self.output_device, self.maker.alone(self.method)

        def run() -> Any:
            with stage("parallel_apply"), current_device_set(slot):
                output = method(*inputs, **kwargs)
            return output if output_device == slot else moved(output, output_device)

        output = run() if self.peers is None else Meeting(self.slots, self.peers).run_replica(0, run)
        for entry in written_into(self.copied or ()):
            entry.hand_back(moved(entry.values[0], output_device))
        return output

    def _overridden(self, name: str) -> Callable[..., Any] | None:
        """Returns the stage of a subclass that overrides the engine's stage, if any. `call_of_this_thread` knows it."""
        overridden = self.options.overridden.get(name)

        def run(*args: Any) -> Any:
            assert overridden is not None
            outer_call = getattr(_of_thread, "call", None)
            _of_thread.call = self
            try:
                return overridden(*args)
            finally:
                _of_thread.call = outer_call

        return None if overridden is None else run

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        _torch.note_whether_compiler_is_in_use()  # before the next call, code may make torch forget compiled code
        try:
            self._copies.wait_for_copies()  # first: what follows frees memory
            if kind is None:
                self._holds = []
            else:  # a failed call has no output; its holds live as long as its traceback
                hold_by_output(self._cycles, ())
                self.kept.drop_modules()
        finally:
            self.reads.close()


def call_of_this_thread(kept: KeptReplicas) -> Call | None:
    """Returns the call whose overridden stage this thread runs, if its replicas come from ``kept``."""
    call: Call | None = getattr(_of_thread, "call", None)
    return call if call is not None and call.kept is kept else None


_around: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("dataparallel_calls", default=())
"""The calls in whose replicas this code runs, from the outermost one: the id of the module, and the method."""

_DEEPEST = 8
"""A replica may call its model, whose replicas may call it again. Calls that are nested deeper would never end."""


class _InsideReplicas:
    """A context around the replicas of a call. It is no generator, which could not pass on a frozen exception."""

    def __init__(self, source: nn.Module, method: str) -> None:
        self._source, self._here = source, (id(source), method)

    def __enter__(self) -> None:
        around = _around.get()
        if around.count(self._here) >= _DEEPEST:
            name, held = type(self._source).__name__, vars(self._source).get("forward")
            what = "an attribute of the module" if held is None else f"its forward, which is a {type(held).__name__},"
            raise RuntimeError(
                f"a replica of this {name} calls the {name} itself, which would run replicas again and again: {what} "
                "leads to the module where replicas cannot follow, for example in an attribute of an attribute. Let an "
                "object that stands in the place of a method have the module, or the former method, as its own "
                "attribute"
            )
        self._token = _around.set((*around, self._here))

    def __exit__(self, *error: object) -> None:
        _around.reset(self._token)
