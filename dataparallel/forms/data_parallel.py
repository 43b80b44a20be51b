"""`DataParallel` wraps a module and runs it on all slots. `WrapperOptions` is what it has beside torch's attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import DataParallel as TorchDataParallel

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.batches.gather import gather_outputs
from dataparallel.batches.scatter import scatter_arguments
from dataparallel.call.engine import Method, ReplicaMaker, call_of_this_thread, run_on_slots, run_without_slots
from dataparallel.call.options import CallOptions, FormOptions, checked_option, completed, described, takes
from dataparallel.call.parallel_apply import CALL, arguments_of_replicas, run_replicas
from dataparallel.comm.streams.ahead import HostReads
from dataparallel.devices import DeviceLike, device_id, resolve, resolve_output, resolve_slots
from dataparallel.forms.kept_tensors import KeptTensors
from dataparallel.forms.managed import names_explained
from dataparallel.nn.sync_batch_norm import prepare
from dataparallel.replicas.compiled.calls import CompileArgument, call_of
from dataparallel.replicas.graphs.calls import GraphedReplicas, check_graphs
from dataparallel.replicas.kept_replicas import KeptReplicas
from dataparallel.replicas.plan import check_placement
from dataparallel.replicas.replicate import BUCKET_CAP_MB, cap_in_bytes, make_replicas

if TYPE_CHECKING:
    from typing_extensions import Unpack

M = TypeVar("M", bound=nn.Module)


class WrapperOptions(CallOptions):
    """What a `DataParallel` has beside torch's attributes: ``model.options``. See `CallOptions`.

    ``chunk_sizes``, ``workers``, ``serial``, ``bucket_cap_mb``, ``scalars`` and ``pad`` may be assigned between calls:
    ``model.options.chunk_sizes = [4, 8]``. The others can be read.

    Attributes:
        compile, sync_batch_norm: as given.
        graphs: the captured graphs of the replicas; ``None`` if there are none. Its ``replicas`` say what was captured,
            and what was not and why.
        compiled: how replicas are compiled, if the argument ``compile`` says so.
        kept: makes the replicas, and keeps those that stay.
    """

    taken = CallOptions.taken | {"compile", "sync_batch_norm"}
    assignable = ("chunk_sizes", "workers", "serial", "bucket_cap_mb", "scalars", "pad")

    compile: bool | dict[str, Any] | None
    sync_batch_norm: bool | str
    kept: KeptReplicas
    compiled: CompileArgument | None

    def keep_replicas(self, compiled: CompileArgument | None, has_graphs: bool = False) -> None:
        slots = [resolve(slot) for slot in self.slots]
        tensors = KeptTensors(slots, cap_in_bytes(1), self.cap_bytes, True) if has_graphs else None
        kept = KeptReplicas(tensors, compiled, GraphedReplicas() if has_graphs else None)
        vars(self).update(compiled=compiled, kept=kept)

    def __copy__(self) -> WrapperOptions:
        """Returns options with replicas of their own."""
        copied = WrapperOptions.__new__(WrapperOptions)
        vars(copied).update(vars(self), kept=copy.copy(self.kept))
        return copied

    @property
    def graphs(self) -> GraphedReplicas | None:
        return self.kept.graphs

    def frozen(self) -> AbstractContextManager[None]:
        """For serving: inside the block replicas are made once and used again as they are, and nothing is sent.

        You promise that the module does not change inside: no values, no attributes, no modules. If it does change,
        replicas do not see it before the end, or only some of them do. :doc:`/guide/serving` says what becomes of what
        ``forward`` writes to its replica, and of calls that run at the same time.

        A call that records a graph raises ``RuntimeError``. Blocks may be nested.
        """
        return self.kept.frozen()


def own_options(wrapper: Any) -> WrapperOptions:
    """Returns the options of the wrapper, with those that are torch's attributes, which may have been assigned."""
    own: WrapperOptions | None = wrapper._dataparallel
    if own is None:
        # Only torch's attributes are set where the class of the wrapper has done so itself.
        own = WrapperOptions(wrapper.device_ids, completed(FormOptions, {}, "", bucket_cap_mb=BUCKET_CAP_MB))
        own.keep_replicas(None)
        own = vars(wrapper).setdefault("_dataparallel", own)  # several threads may call at once
    state = vars(own)  # item by item: the compiler of torch 2.11 cannot trace an update
    state["slots"], state["output_device"], state["dim"] = wrapper.device_ids, wrapper.output_device, wrapper.dim
    return own


class DataParallel(TorchDataParallel[M]):
    """Uses every device for one module: splits the batch, runs a replica on each slot, joins the outputs.

    Gradients of all replicas are summed into the parameters of ``module``, which stay where they are, so the optimizer,
    the loss and the training loop are those of one device. It is a ``torch.nn.DataParallel`` for ``isinstance`` only.

    Args:
        module: the module; its parameters and buffers are on the first slot when it is called. It may be moved there
            after it was wrapped; with a single slot it is moved at once, as torch does.
        <options>
        bucket_cap_mb: size in MiB of the buckets in which parameters are sent, and in which gradients are sent back
            while backward still runs. The first bucket has 1 MiB, and each further one twice the size of the one before
            it, up to this size.

    Attributes:
        module: the wrapped module.
        device_ids: the slots, accelerators as ints, CPU slots as ``torch.device``; empty if there are none.
        output_device: like one of ``device_ids``.
        src_device_obj: the first slot as a ``torch.device``.
        options: the keyword arguments that torch's class does not have: see `WrapperOptions`. They are no attributes of
            the wrapper, so a subclass may use their names for its own attributes and methods.

    Raises:
        TypeError: ``module`` is no module, or is already wrapped; an option has another type.
        ValueError: devices do not exist or do not go together; ``workers`` is below 1; ``bucket_cap_mb`` is not above
            0; ``chunk_sizes`` are not one positive number for each slot; ``compile`` is given for a compiled module;
            ``module`` contains a ``torch.nn.SyncBatchNorm`` and is not to be converted.
    """

    module: M
    device_ids: list[int | torch.device]  # type: ignore[assignment]
    output_device: int | torch.device | None = None  # type: ignore[assignment]
    src_device_obj: torch.device | None = None  # type: ignore[assignment]
    dim: int = 0
    options: WrapperOptions  # by `__getattr__`

    _dataparallel: WrapperOptions | None = None  # until `own_options` makes them

    __doc__ = described(__doc__)

    @takes(FormOptions)
    def __init__(
        self,
        module: M,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        **options: Unpack[FormOptions],
    ) -> None:
        _check_module(module)
        others = {"output_device": output_device, "dim": dim, "bucket_cap_mb": bucket_cap_mb}
        given = completed(FormOptions, options, "DataParallel", **others)
        slots = resolve_slots(device_ids, given["devices"])
        own = WrapperOptions(slots, given)
        compiled = CompileArgument.checked(module, own.compile)
        has_graphs = check_graphs(given["graphs"], [module], compiled, slots)
        prepare(module, own.sync_batch_norm, slots)
        super(TorchDataParallel, self).__init__()  # past torch's, but not past other bases of a subclass
        self.module = module
        self.device_ids = [device_id(slot) for slot in slots]
        self.output_device = device_id(resolve_output(own.output_device, slots)) if slots else None
        self.src_device_obj = slots[0] if slots else None
        self.dim = own.dim
        own.keep_replicas(compiled, has_graphs)
        vars(self)["_dataparallel"], vars(own)["slots"] = own, self.device_ids
        if len(slots) == 1:
            self.module.to(slots[0])

    def extra_repr(self) -> str:
        return f"slots: {', '.join(map(str, self.device_ids)) or 'none, so the module runs as it is'}"

    @_torch.not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output for the whole batch, on ``output_device``.

        Raises:
            RuntimeError: a parameter or buffer is not on the first slot; a replica cannot be made or run here.
            ValueError: inputs cannot be split or outputs cannot be joined; the message names the place.
            Exception: a replica raised it.
        """
        maker, method = _Maker(self), Method(CALL, self.module)
        if not self.device_ids:
            return run_without_slots(maker, method, inputs, kwargs)
        return run_on_slots(maker, method, inputs, kwargs)

    def replicate(self, module: M, device_ids: Sequence[DeviceLike]) -> list[M]:
        """The stage `dataparallel.replicate`; override it to make replicas in another way.

        It uses parts of the last call's replicas again: see ``dataparallel.replicas.kept_replicas``.

        Raises:
            RuntimeError: a graph is recorded inside `frozen`.
        """
        own, slots = own_options(self), resolve_slots(device_ids)
        if "_is_replica" in vars(self):  # this wrapper is a part of a replica, which ends with the call
            root_call = None if own.compiled is None else own.compiled.of(module)
            return make_replicas(module, slots, own.cap_bytes, root_call=root_call)
        return own.kept.replicas(module, slots, own.cap_bytes)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        """The stage `dataparallel.scatter_kwargs`; override it to split inputs in another way.

        As a stage of a call it does not wait for copies from pinned memory: the call does, before it returns.
        """
        own = own_options(self)
        call = call_of_this_thread(own.kept)
        if call is not None:
            return scatter_arguments(inputs, kwargs, device_ids, self.dim, own.split, call.reads, call.copied)
        with HostReads() as reads:
            return scatter_arguments(inputs, kwargs, device_ids, self.dim, own.split, reads)

    def parallel_apply(self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """The stage `dataparallel.parallel_apply`; override it to run replicas in another way."""
        own, slots = own_options(self), self.device_ids[: len(replicas)]
        arguments = arguments_of_replicas(replicas, inputs, kwargs, slots)
        return run_replicas(replicas, *arguments, workers=own.workers, serial=own.serial, permits=own.permits)

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """The stage `dataparallel.gather`; override it to join outputs in another way."""
        own = own_options(self)
        call = call_of_this_thread(own.kept)
        if call is None:
            return gather_outputs(outputs, output_device, self.dim, pad=own.pad)
        return gather_outputs(outputs, output_device, self.dim, call.combine_scalars, call.pad)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            module_has = module is not None and hasattr(module, name)
            if name == "options":
                hands_on = type(self).__getattr__ is not DataParallel.__getattr__  # a subclass asks the module next
                if not (hands_on and module_has):
                    return own_options(self)
            hint = f"but the module that it wraps has: write .module.{name}" if module_has else _INSTEAD.get(name)
            if hint is None:
                raise
            error = AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}, {hint}")
            raise error from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "options"]

    def __getstate__(self) -> dict[str, Any]:
        """Returns all attributes, so that a copy has options of its own."""
        own = self._dataparallel
        return {**vars(self), **({} if own is None else {"_dataparallel": copy.copy(own)})}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of every module. The names of a wrapper's state dict begin with ``module.``.

        Raises:
            RuntimeError: the state dict has other names or shapes. If it is that of the module, the error says so.
        """
        with names_explained(self, state_dict):
            return super().load_state_dict(state_dict, strict, assign)


_STAGES = {name: vars(DataParallel)[name] for name in ("scatter", "replicate", "parallel_apply", "gather")}
"""The functions of stages that are not overridden. Somebody may assign another one to the class later."""


def _overridden(wrapper: DataParallel[Any]) -> list[str]:
    return [name for name, own in _STAGES.items() if getattr(getattr(wrapper, name), "__func__", None) is not own]


def _stages(wrapper: DataParallel[Any]) -> dict[str, Callable[..., Any]]:
    """Returns all stages as methods with torch's arguments. An overridden one may assign options for the others."""

    def gather(outputs: Any) -> Any:
        return wrapper.gather(
            outputs, wrapper.device_ids[0] if wrapper.output_device is None else wrapper.output_device
        )

    return {
        "scatter": lambda inputs, kwargs: wrapper.scatter(inputs, kwargs, wrapper.device_ids),
        "replicate": lambda slots: wrapper.replicate(wrapper.module, wrapper.device_ids[: len(slots)]),
        "parallel_apply": lambda *args: wrapper.parallel_apply(*args),
        "gather": gather,
    }


_INSTEAD = {
    name: "because a replica lives for one call, and so do its gradients: each backward sums them, without a network. "
    f"Leave it out, or use composable.replicate(model), which has {name}"
    for name in ("no_sync", "register_comm_hook")
}
"""What to do about methods of torch's DistributedDataParallel."""


class _Maker(ReplicaMaker):
    """Makes the replicas of a wrapper. They get new tensors in each call that records a graph, unless they stay."""

    @_torch.leave_alone
    def __init__(self, wrapper: DataParallel[Any]) -> None:
        self._wrapper, own = wrapper, own_options(wrapper)
        vars(own)["dim"] = checked_option("dim", own.dim)
        self.options, self.kept, self._compiled = own, own.kept, own.compiled
        if wrapper.device_ids and (names := _overridden(wrapper)):
            self.overridden, self.may_use_source = _stages(wrapper), names != ["scatter"]

    def source(self) -> nn.Module:
        return self._wrapper.module

    def needs_no_replica(self) -> bool:
        return self.kept.graphs is None

    def check(self, slots: Sequence[torch.device]) -> None:
        if len(slots) == 1:
            check_placement(self.source(), slots[0])

    def alone(self, method: Method) -> Callable[..., Any]:
        source, is_traced = self.source(), torch.compiler.is_dynamo_compiling()  # dynamo compiles what calls the module
        root = None if self._compiled is None or is_traced else self._compiled.of(source)
        return method.of_module if root is None else call_of(source, root)

    def replicas(self, method: Method, lent: Any, slots: list[torch.device]) -> list[Any]:
        return self._wrapper.replicate(self.source(), slots)


@_torch.not_traced
def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    devices: Sequence[DeviceLike] | None = None,
) -> Any:
    """Calls ``module`` once on all slots, as a `DataParallel` would.

    Args:
        module: a module whose parameters and buffers are on the first slot.
        inputs: a tuple of positional arguments, a single argument that is no tuple, or ``None`` for no argument.
        device_ids, output_device, dim, devices: as for `DataParallel`.
        module_kwargs: keyword arguments.

    Raises:
        As `DataParallel` and its ``forward``; ``RuntimeError`` if there is no accelerator and no ``device_ids``.
    """
    slots = resolve_slots(device_ids, devices)
    if not slots:
        raise RuntimeError(
            "data_parallel found no accelerator; pass device_ids=['cpu', 'cpu'] for CPU slots, or call the module"
        )
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    module_kwargs = checked("module_kwargs", module_kwargs, Mapping, None)
    _check_module(module)
    check_placement(module, slots[0])
    model = DataParallel(module, slots, output_device, dim)
    return model(*inputs, **(module_kwargs or {}))


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"DataParallel wraps a torch.nn.Module; got {type(module).__name__}. Wrap the model alone: optimizers, "
            "schedulers and loaders stay as they are"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"the module is wrapped already, in a {type(module).__name__}; wrap its .module instead: "
            "wrappers do not nest"
        )
