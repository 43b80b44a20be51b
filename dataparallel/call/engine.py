"""`run_on_slots` makes a call of any form: scatter -> replicate -> parallel_apply -> gather.

Each form has its own `ReplicaMaker`. ``torch.compile`` does not trace what runs on slots.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.batches.gather import Pad, gather_outputs
from dataparallel.batches.scatter import moved, scatter_arguments
from dataparallel.batches.structures import CopiedContainer, arguments_of_one, leaves, number_of_samples, written_into
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
    """What the calls of a form need of it. Its replicas come from fresh copies, copies that stay, or shards.

    Attributes:
        may_use_source: true if code of the user may write to parameters between the stages: see `Call`.
        overridden: by name the stages that a user's subclass overrides.
    """

    may_use_source = False
    overridden: Mapping[str, Callable[..., Any]] = {}
    kept: KeptReplicas
    options: CallOptions

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
        """Returns the function that runs ``method`` of the module itself."""
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


@_torch.not_traced
def run_on_slots(maker: ReplicaMaker, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the output of ``method`` for the whole batch, on the output device. There is at least one slot."""
    options = maker.options
    with maker.spans_machines(method) as peers, Call(maker, method, peers) as call:
        with stage("scatter"):
            if (scatter := call.overridden("scatter")) is None:
                chunks, keywords = scatter_arguments(
                    inputs, kwargs, call.slots, options.dim, options.split, call.reads, call.copied
                )
            else:
                chunks, keywords = scatter(inputs, kwargs)
        if not chunks and not keywords:  # a call without arguments
            chunks, keywords = ((),), ({},)
        slots = call.slots[: len(chunks)]
        if len(call.slots) == 1 and maker.needs_no_replica():
            output = call.run_alone(chunks[0], keywords[0])
        else:
            call.note_samples(chunks, keywords)
            with maker.lends(slots) as lent, _InsideReplicas(maker.source(), method.name):
                with stage("replicate"), call.copies.may_begin():  # only here copies of parameters may be late
                    replicate = call.overridden("replicate")
                    replicas = maker.replicas(method, lent, slots) if replicate is None else replicate(slots)
                    call.hold(replicas)
                with stage("parallel_apply"):
                    if (run := call.overridden("parallel_apply")) is None:
                        outputs = run_replicas(
                            replicas,
                            chunks,
                            keywords,
                            slots,
                            workers=options.workers,
                            serial=options.serial,
                            permits=options.permits,
                            method=method.name,
                            peer_call=peers,
                        )
                    else:
                        outputs = run(replicas, chunks, keywords)
            output = call.gather(outputs)
    return output


def run_without_slots(maker: ReplicaMaker, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `run_on_slots`, where there is no slot: the module itself runs. ``torch.compile`` may trace this."""
    inputs, kwargs = arguments_of_one(inputs, kwargs)
    return maker.alone(method)(*inputs, **kwargs)


_of_thread = threading.local()
"""``call``: the `Call` whose overridden stage this thread runs. The stage calls the wrapper's stage by ``super()``,
which has torch's signature, with no parameter for the call."""


class Call:
    """What one call has: a context around its stages. It refuses calls that cannot run, and releases memory after them.

    If the call fails, the traceback keeps activations and copies alive, and this object with its holds of the
    `ReferenceCycles`.

    However the call ends, the host then waits until no copy reads pinned memory of the caller. The copies wait for
    nothing that the devices compute.

    If replicas run one after the other, no copies of parameters are late: the computing streams wait for all copies
    before the first replica starts. If code of the user runs between the stages, which may write to the source or step
    an optimizer, no copies are late either, because only lookups in replicas wait for late copies.

    Attributes:
        copied: containers among the arguments, to which replicas may write: see ``batches.structures``.
        combine_scalars, pad: what the stage gather takes.
    """

    def __init__(self, maker: ReplicaMaker, method: Method, peers: PeerCall | None) -> None:
        options = maker.options
        self._maker, self._method, self._peers = maker, method, peers
        self.slots = [resolve(device) for device in options.slots]
        self._output_device = resolve_output(options.output_device, self.slots)
        maker.check(self.slots)
        if len(self.slots) > 1:
            refuse_what_cannot_be_shared()
        self.kept = maker.kept
        self.combine_scalars: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.pad = options.pad if method.pad is None else method.pad
        self._cycles: list[ReferenceCycles] = []
        self._holds: list[Hold] = []
        in_order = is_serial(options.serial) or maker.may_use_source
        self.copies = LateCopies(allowed=not (_torch.note_whether_compiler_is_in_use() or in_order))
        self.reads = HostReads()
        self.copied: list[CopiedContainer] = []

    def overridden(self, name: str) -> Callable[..., Any] | None:
        """Returns the stage of a subclass that overrides the engine's stage, if any. `call_of_this_thread` knows it."""
        stage_of_user = self._maker.overridden.get(name)

        def run(*args: Any) -> Any:
            assert stage_of_user is not None
            outer_call = getattr(_of_thread, "call", None)
            _of_thread.call = self
            try:
                return stage_of_user(*args)
            finally:
                _of_thread.call = outer_call

        return None if stage_of_user is None else run

    def note_samples(self, chunks: Sequence[Any], keywords: Sequence[Any]) -> None:
        """Counts the samples of each chunk, by which scalars are combined: before ``forward`` writes to arguments."""
        options = self._maker.options
        if (rule := options.combines) is not None:
            of_slots = zip(chunks, keywords, strict=True)
            samples = tuple(number_of_samples(arguments, options.dim) for arguments in of_slots)
            self.combine_scalars = lambda values: rule(values, samples)

    def hold(self, replicas: Sequence[Any]) -> None:
        """Keeps what leads from replicas back to themselves until the call ends."""
        self._cycles = cycles_of(replicas)
        self._holds = [cycles.hold("call") for cycles in self._cycles]

    def run_alone(self, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the module itself on the only slot."""
        (slot,), output_device, method = self.slots, self._output_device, self._maker.alone(self._method)

        def run() -> Any:
            with stage("parallel_apply"), current_device_set(slot):
                output = method(*inputs, **kwargs)
            return output if output_device == slot else moved(output, output_device)

        output = run() if self._peers is None else Meeting(self.slots, self._peers).run_replica(0, run)
        for entry in written_into(self.copied):
            entry.hand_back(moved(entry.values[0], output_device))
        return output

    def gather(self, outputs: Any) -> Any:
        """Runs the stage ``gather``, and has the graph of the output keep what its backward needs."""
        dim, written = self._maker.options.dim, written_into(self.copied)
        with stage("gather"), self._maker.joins([*self.slots, self._output_device]):
            gather = partial(gather_outputs, target_device=self._output_device, dim=dim)
            gather = partial(gather, combine=self.combine_scalars, pad=self.pad)
            if (overridden := self.overridden("gather")) is None:
                output = gather(outputs, written=written)
            else:
                output = overridden(outputs)
                if written:
                    gather([None] * len(outputs), written=written)
        returned = (output, [entry.joined for entry in written]) if written else output
        # The graph of the output may need the replicas. If no tensor is found in it, nothing is noted.
        if self._cycles and (found := [leaf for _, leaf in leaves(returned, "") if isinstance(leaf, torch.Tensor)]):
            hold_by_output(self._cycles, found)
        self._maker.returns(returned)
        return output

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        _torch.note_whether_compiler_is_in_use()  # before the next call, code may make torch forget compiled code
        try:
            self.copies.wait_for_copies()  # first: what follows frees memory
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
