"""`CallEngine`: one call of any form, scatter -> replicate -> parallel_apply -> gather.

What a user has chosen is in `CallOptions`. What differs between the forms is in their `ReplicaMaker`. The forms make an
engine for each call; it knows none of them.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.batches.chunk_sizes import ChunkSizes
from dataparallel.batches.scatter_gather import gather, scatter_arguments
from dataparallel.batches.structures import arguments_of_one
from dataparallel.call.batch_split import BatchSplit
from dataparallel.call.context import Call, run_alone
from dataparallel.call.losses import CallLoss, Criterion, ReplicaLoss
from dataparallel.call.parallel_apply import check_workers, run_replicas
from dataparallel.devices import DeviceLike, resolve, resolve_output
from dataparallel.profiling import stage
from dataparallel.replicas.kept_replicas import KeptReplicas
from dataparallel.replicas.replicate import cap_in_bytes
from dataparallel.threads.meetings import Meeting
from dataparallel.threads.permits import PermitChooser

if TYPE_CHECKING:
    from dataparallel.machines.peer_rounds import PeerCall


class Method(NamedTuple):
    """A method that runs on the slots: each replica runs its own of this ``name``, a single slot the module's."""

    name: str
    of_module: Callable[..., Any]


@dataclass
class CallOptions:
    """What the calls of one form have in common.

    Attributes:
        slots: where replicas run; none if there is no accelerator, and then the module just runs.
        output_device: of the outputs; ``None`` is the first slot.
        dim: the batch dimension of inputs and outputs.
        split: how the slots share a batch.
        cap_bytes: the largest bucket.
        workers, serial: as for `parallel_apply`.
        loss: what replicas compute of their outputs.
        permits: chooses how many replicas run at a time, and learns from each call.
        overridden: what a user's subclass has in place of the engine's stages, by name.
        may_use_source: one of them may write to parameters: see `Call`.
    """

    slots: Sequence[DeviceLike]
    output_device: DeviceLike | None
    dim: int
    split: BatchSplit
    cap_bytes: int
    workers: int | None = None
    serial: bool | None = None
    loss: ReplicaLoss | None = None
    permits: PermitChooser = field(default_factory=PermitChooser)
    overridden: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    may_use_source: bool = False

    @classmethod
    def checked(
        cls,
        modules: Sequence[nn.Module],
        slots: Sequence[torch.device],
        *,
        output_device: DeviceLike | None,
        dim: int,
        chunk_sizes: ChunkSizes,
        bucket_cap_mb: float,
        workers: int | None,
        serial: bool | None,
        loss: Criterion | None,
    ) -> CallOptions:
        """The options that a user gave for ``modules``, which are called as one form.

        Raises:
            TypeError: ``dim`` is no int; ``loss`` cannot be called; ``chunk_sizes`` are no numbers.
            ValueError: ``output_device`` is none; ``workers`` is below 1; ``bucket_cap_mb`` is not above 0;
                ``chunk_sizes`` are not one positive number for each slot; ``forward`` has a parameter with a name that
                ``loss`` needs.
        """
        if slots:
            resolve_output(output_device, slots)
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"dim={dim!r}: the batch dimension is an int")
        dim = operator.index(dim)
        check_workers(workers)
        options = cls(slots, output_device, dim, BatchSplit(chunk_sizes, len(slots)), cap_in_bytes(bucket_cap_mb))
        options.workers, options.serial = workers, serial
        if loss is not None:
            options.loss, *_ = [ReplicaLoss(loss, module) for module in modules]
        return options


class ReplicaMaker(ABC):
    """What differs between the forms: how replicas are made, of fresh copies, of copies that stay, or of shards.

    Attributes:
        form: its name, for recordings.
        may_use_source: code of the user may write to parameters between the stages: see `Call`.
        kept: makes the replicas.
    """

    form: str
    may_use_source = False
    kept: KeptReplicas

    @abstractmethod
    def source(self) -> nn.Module:
        """The module that is called."""

    def spans_machines(self, method: Method) -> AbstractContextManager[PeerCall | None]:
        """A context around a call. Over several machines it has what spans them in forward, and a failure is told."""
        return nullcontext()

    @abstractmethod
    def check(self, slots: Sequence[torch.device]) -> None:
        """Before each call. Raises ``RuntimeError`` if a tensor is not where it is expected."""

    def alone(self, method: Method) -> Callable[..., Any]:
        """What runs ``method`` without replicas."""
        return method.of_module

    def needs_no_replica(self) -> bool:
        """True if a single slot can run the module itself."""
        return True

    def lends(self, slots: Sequence[torch.device]) -> AbstractContextManager[Any]:
        """A context around ``replicate`` and ``parallel_apply``. What it has is ``lent`` to the replicas."""
        return nullcontext()

    @abstractmethod
    def replicas(self, method: Method, lent: Any, slots: list[torch.device]) -> list[Any]:
        """The stage ``replicate``."""

    def returns(self, output: Any) -> None:  # noqa: B027 - most forms do nothing
        """After a call that has made replicas, with its output."""


class CallEngine:
    """Makes a call of one form.

    Args:
        options: what the user has chosen.
        maker: makes the replicas.
    """

    def __init__(self, options: CallOptions, maker: ReplicaMaker) -> None:
        self._options, self._maker = options, maker

    def run(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``method`` for the whole batch, on the output device.

        Raises:
            RuntimeError: a parameter or buffer is not on the first slot; a replica cannot be made or run here.
            ValueError: inputs cannot be split or outputs cannot be joined; the message names the place.
            Exception: a replica raised it.
        """
        loss = None
        if self._options.loss is not None:
            kwargs, loss = self._options.loss.asked(kwargs)
        if not self._options.slots:
            inputs, kwargs = arguments_of_one(inputs, kwargs)
            return self._alone(method, loss)(*inputs, **kwargs)
        return self._run_on_slots(method, inputs, kwargs, loss)

    @_torch.not_traced
    def _run_on_slots(
        self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any], loss: CallLoss | None
    ) -> Any:
        """The checks before the four stages, and the contexts around them."""
        options, maker = self._options, self._maker
        with maker.spans_machines(method) as peers:
            slots = [resolve(device) for device in options.slots]
            output_device = resolve_output(options.output_device, slots)
            maker.check(slots)
            may_use_source = maker.may_use_source or options.may_use_source
            with Call(slots, maker.kept, options.serial, may_use_source, options.split) as call:
                call.balanced = options.split.begin_call(maker.source(), slots, inputs, kwargs, method.name)
                return self._stages(call, slots, output_device, method, inputs, kwargs, loss, peers)

    def _stages(
        self,
        call: Call,
        slots: list[torch.device],
        output_device: torch.device,
        method: Method,
        inputs: Any,
        kwargs: Any,
        loss: CallLoss | None,
        peers: PeerCall | None,
    ) -> Any:
        """The four stages. ``inputs`` and ``kwargs`` are those of the batch, then a tuple with one entry per slot."""
        maker = self._maker
        with stage("scatter"):
            inputs, kwargs = self._scatter(call, slots, inputs, kwargs)
        if not inputs and not kwargs:  # a call without arguments
            inputs, kwargs = ((),), ({},)
        if len(slots) == 1 and maker.needs_no_replica():
            run = partial(run_alone, self._alone(method, loss), inputs[0], kwargs[0], slots[0], output_device)
            return run() if peers is None else Meeting(slots, peers).run_replica(0, run)
        slots = slots[: len(inputs)]
        with maker.lends(slots) as lent:
            with stage("replicate", maker.form), call.replicates():
                replicas = call.uses(self._replicate(call, slots, method, lent))
                options = self._options
                then = None if loss is None else loss.on_slots(slots, kwargs, options.dim, options.cap_bytes)
            with stage("parallel_apply"):
                outputs = self._parallel_apply(call, slots, replicas, inputs, kwargs, method, then, peers)
        with stage("gather"):
            gather_here = partial(self._gather, call, output_device)
            output = gather_here(outputs) if loss is None else loss.of_batch(outputs, gather_here)
        maker.returns(output)
        if peers is not None:
            peers.watch(output)
        return output

    def _scatter(self, call: Call, slots: list[torch.device], inputs: Any, kwargs: Any) -> Any:
        overridden = self._options.overridden.get("scatter")
        if overridden is not None:
            return call.known_to(overridden)(inputs, kwargs)
        return scatter_arguments(inputs, kwargs, slots, self._options.dim, call.chunk_sizes, call.reads)

    def _replicate(self, call: Call, slots: list[torch.device], method: Method, lent: Any) -> Any:
        overridden = self._options.overridden.get("replicate")
        if overridden is not None:
            return call.known_to(overridden)(slots)
        return self._maker.replicas(method, lent, slots)

    def _parallel_apply(
        self,
        call: Call,
        slots: list[torch.device],
        replicas: Sequence[Any],
        inputs: Any,
        kwargs: Any,
        method: Method,
        then: Sequence[Callable[[Any], Any]] | None,
        peers: PeerCall | None,
    ) -> Any:
        options = self._options
        overridden = options.overridden.get("parallel_apply")
        if overridden is not None and then is None:
            return call.known_to(overridden)(replicas, inputs, kwargs)
        return run_replicas(
            replicas,
            inputs,
            kwargs,
            slots,
            workers=options.workers,
            serial=options.serial,
            chooser=options.permits,
            method=method.name,
            balanced=call.balanced,
            then=then,
            machines=peers,
        )

    def _gather(self, call: Call, output_device: torch.device, outputs: Any) -> Any:
        overridden = self._options.overridden.get("gather")
        if overridden is not None:
            return call.known_to(overridden)(outputs)
        return gather(outputs, output_device, self._options.dim)

    def _alone(self, method: Method, loss: CallLoss | None) -> Callable[..., Any]:
        """What runs ``method`` without replicas, and computes the loss if there is one."""
        run = self._maker.alone(method)
        return run if loss is None else loss.alone(run)
