"""`fully_shard` shards a module's parameters over the devices, and makes the module run on all slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from dataparallel.arguments import checked, listed
from dataparallel.call.options import CallOptions, InPlaceOptions, completed, takes
from dataparallel.devices import CPU, resolve_slots
from dataparallel.forms.form import Form
from dataparallel.forms.full_state import full_state_dict, load_full_state_dict
from dataparallel.forms.fully_shard_arguments import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_children,
    check_kind,
    check_parameters,
    check_reshard,
    parameters_of_unit,
    placements_of,
)
from dataparallel.forms.fully_shard_state import FullyShardState
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.forms.managed import own_modules, own_parameters
from dataparallel.forms.unit_choice import units_of
from dataparallel.nn.sync_batch_norm import check_sync_batch_norm, prepare
from dataparallel.replicas import replaced_parameters
from dataparallel.replicas.compiled.calls import CompileArgument
from dataparallel.replicas.graphs.calls import check_graphs
from dataparallel.replicas.plan import dotted
from dataparallel.replicas.replicate import BUCKET_CAP_MB

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from dataparallel.machines.arguments import MachineMesh

_P = ParamSpec("_P")


@takes(InPlaceOptions)
def _prepare(
    module: list[nn.Module],
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    units: Literal["auto"] | None = None,
    **options: Unpack[InPlaceOptions],
) -> FullyShardState:
    """Shards the parameters of ``module`` over the devices, in place, and makes it run on all slots.

    The parameters of the module make one unit, except those of children that are fully sharded already. A unit is
    gathered on each slot when its module is called, freed afterwards, and gathered again in backward. Its gradients are
    summed, and each device keeps its part of the sum. So a device holds a part of parameters, gradients and optimizer
    state, and two or three full units at a time. Apply this to the blocks of a model, then to the model. Make the
    optimizer afterwards.

    The module stays the same object with the same parameter names. Its class becomes a subclass of `FullyShardedModule`
    and of its former class; its parameters become sharded tensors. The outermost module that is called splits the
    batch, runs a replica on each slot and joins the outputs. Gradients are those of the whole batch's loss: they are
    summed and not divided. ``fully_shard.state(module)`` returns the unit's state.

    Options of calls are those of the outermost module. ``compile`` is for each unit below too, unless it has its own,
    and ``sync_batch_norm`` for no BatchNorm that has a unit of its own. With ``graphs`` all units need
    ``reshard_after_forward=False``: their full parameters keep their memory, also between steps, and graphs read them
    there. Graphs begin and end where units do.

    Names, defaults and meanings are those of ``torch.distributed.fsdp.fully_shard``, as far as they make sense in one
    process.

    Args:
        module: a module that has a ``forward``, or a list of them that makes one unit. Parameters may be on any one
            device, or on meta to be initialised later.
        reshard_after_forward: ``True`` frees the full parameters after forward. ``False`` keeps them until backward. An
            int above 1 that divides the number of slots, and is smaller, makes groups of as many slots: each slot keeps
            a part, and backward gathers from the group. ``None`` means ``True``, but ``False`` for the outermost
            module, which backward needs at once.
        shard_placement_fn: takes a parameter and returns the ``Shard(dim)`` that says how it is cut, or ``None`` for
            ``Shard(0)``. A dimension other than 0 has to be a multiple of the number of slots.
        mp_policy: the dtypes to compute and to sum in.
        offload_policy: where the shards are kept; ``CPUOffloadPolicy()`` keeps them in host memory.
        ignored_params: parameters that are not sharded, not copied to the slots and not summed. Those of other modules
            are allowed.
        units: ``"auto"`` shards the blocks of the model first, with these arguments: elements of its ``Sequential`` and
            ``ModuleList``, in about 16 units of as many bytes, of at least 1 MiB. Each of them has to be run by calling
            it. Without it the module is one unit.
        <options>
        process_group: a ``torch.distributed`` group with one process for each machine. Parameters are sharded over the
            devices of each machine, and replicated over machines.
        mesh: the same as a mesh over processes, with the meaning that it has for ``torch.distributed.fsdp``. One
            dimension shards over all devices of all machines. Of two dimensions the first replicates and the second
            shards. :doc:`/guide/machines` says what is averaged, and what ranks have to do alike.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, has no ``forward``, or is a wrapper or a ScriptModule; an argument or what
            ``shard_placement_fn`` returns is of another type. A parameter is a ``DTensor``.
        ValueError: devices as for `dataparallel.DataParallel`; nothing to shard, parameters on two devices, a
            ``reshard_after_forward`` that does not divide the number of slots, a dimension that cannot be cut, a child
            that is sharded over other devices; a list that is empty or has a module twice; ``compile`` for a module
            that is compiled; ``graphs`` where units are freed after forward, or sharded over machines.
        RuntimeError: the module or a parent is fully sharded already, a module or a parameter of the tree has another
            form, a parameter is shared with another unit, or a lazy one is not initialised. There is no process group.
            It is called inside ``torch.inference_mode()``.
        dataparallel.machines.errors.MachinesError: ranks differ in what they are about to do, or one has failed or is
            gone.
    """
    process_group, mesh = options.get("process_group"), options.get("mesh")
    slots = resolve_slots(options.get("device_ids"), options.get("devices"))
    if slots and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "fully_shard was called inside torch.inference_mode(), where its shards would be inference tensors, which "
            "no later call can use outside. Call it before, or inside torch.no_grad(); call the module where you like"
        )
    if not slots and (process_group is not None or mesh is not None):
        slots = [CPU]
    machines, together = _machines_of(process_group, mesh)
    parts, given = (1, (None, None)) if machines is None else (machines.shard_size, machines.given)
    with together:
        own_options = {"bucket_cap_mb": BUCKET_CAP_MB, "units": units, "shard_placement_fn": shard_placement_fn}
        given_options = completed(InPlaceOptions, options, "fully_shard", **own_options)
        graphs, sync_batch_norm = given_options["graphs"], given_options["sync_batch_norm"]
        for each in module:
            check_kind(each)
            check_sync_batch_norm(each, sync_batch_norm, slots, machines is not None)
        call_options = CallOptions(slots, given_options)
        checked("mp_policy", mp_policy, MixedPrecisionPolicy, hint="; import it from dataparallel.composable")
        checked("offload_policy", offload_policy, OffloadPolicy, hint="; import it from dataparallel.composable")
        compiled = [CompileArgument.checked(each, given_options["compile"]) for each in module]
        has_graphs = graphs is not None and check_graphs(graphs, module, compiled[0], slots)
        if has_graphs and (reshard_after_forward or (reshard_after_forward is None and units)):
            raise ValueError(
                f"graphs={graphs!r} with reshard_after_forward={reshard_after_forward!r}: a captured graph reads full "
                "parameters where they are, so no unit may free them after forward. If the model fits on each device, "
                "pass reshard_after_forward=False to all calls of fully_shard; otherwise leave graphs out"
            )
        if has_graphs and parts > 1:
            raise ValueError(
                f"graphs={graphs!r} with parameters that are sharded over machines: these gather units in one order, "
                "which captured graphs do not keep. Pass a process_group, or a mesh whose first dimension has all "
                "machines; or leave graphs out"
            )
        if reshard_after_forward is not None:
            reshard_after_forward = check_reshard(reshard_after_forward, len(slots), parts)
        ignored = listed("ignored_params", given_options["ignored_params"], Tensor)
        named = parameters_of_unit(module, ignored)
        fully_shard.check_unshared(named)
        check_parameters(named)
        check_children(module, slots, given)
        if units and len(module) > 1:
            raise ValueError(f"units={units!r}: expected one module, and got a list of {len(module)}")
        ignored_ids = {id(parameter) for parameter in ignored}
        placements = placements_of(named, shard_placement_fn, len(slots) * parts)
        for unit in units_of(module[0]) if units and slots else ():
            fully_shard(
                unit,
                devices=slots,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=shard_placement_fn,
                mp_policy=replace(mp_policy, output_dtype=None),  # the output is the model's
                offload_policy=offload_policy,
                ignored_params=ignored,
                dim=given_options["dim"],
                process_group=process_group,
                mesh=mesh,
            )
        if units:
            named = parameters_of_unit(module, ignored)
            placements = placements_of(named, shard_placement_fn, len(slots) * parts)
    settings = {
        "reshard_after_forward": reshard_after_forward,
        "placements": placements,
        "mp_policy": mp_policy,
        "offload_policy": type(offload_policy).__name__,
        "sync_batch_norm": sync_batch_norm,
    }
    if machines is not None:
        _compare_start(machines, module, named, slots, settings)
    for each in module:
        prepare(each, sync_batch_norm, slots, machines is not None)
    return FullyShardState(
        module,
        [parameter for _, parameter in named],
        call_options,
        placements=placements,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_parameters=[parameter for _, parameter in own_parameters(module) if id(parameter) in ignored_ids],
        machines=machines,
        compile=compiled[0],
        graphs=has_graphs,
    )


def _begin(modules: list[nn.Module], state: FullyShardState) -> None:
    if not state.slots:
        if state.compile is not None:
            for module in modules:
                module.compile(**state.compile.options)
        return
    before = own_parameters(modules)
    if state.machines is not None:
        from dataparallel.machines.start import send_values

        named = {name: p for name, p in before if state.manages(p)} | _buffers(modules)
        # Tensors on meta have no values yet: ``units.tree`` sends them later.
        send_values(state.machines.lane, {name: tensor for name, tensor in named.items() if not tensor.is_meta})
    state.shard()
    after = dict(own_parameters(modules))
    replaced = [(name, parameter, after[name]) for name, parameter in before if after[name] is not parameter]
    module_name = type(modules[0]).__name__ if len(modules) == 1 else f"list of {len(modules)} modules"
    replaced_parameters.remember(replaced, module_name, "fully_shard")
    replaced_parameters.rebind({id(module): module for top in modules for module in top.modules()}.values())


def _machines_of(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[MachineMesh | None, AbstractContextManager[None]]:
    """Returns the machines of the arguments, and a context in which an error on this rank makes all ranks raise."""
    if process_group is None and mesh is None:
        return None, nullcontext()
    from dataparallel.machines.arguments import MachineMesh
    from dataparallel.machines.start import failing_together

    machines = MachineMesh(process_group, mesh)
    return machines, failing_together(machines.all)


def _compare_start(
    machines: MachineMesh,
    modules: Sequence[nn.Module],
    parameters: Sequence[tuple[str, nn.Parameter]],
    slots: Sequence[torch.device],
    settings: Mapping[str, Any],
) -> None:
    from dataparallel.machines.start import compare, describe

    names = " and ".join(type(module).__name__ for module in modules)
    settings = {"machines": machines.describe(slots), **settings}
    description = describe(dict(parameters), _buffers(modules), slots, settings)
    compare(machines.all, f"fully_shard of {names}", description)
    machines.make_communicators(slots)


def _buffers(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        dotted(name, key): buffer
        for name, module in own_modules(modules)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


class _FullyShard(Form[_P, FullyShardState]):
    """The form, with the functions that save and load a sharded model."""

    def __init__(self, prepare: Callable[Concatenate[Any, _P], FullyShardState]) -> None:
        super().__init__(prepare, FullyShardedModule, nests=True, begin=_begin)
        # Not as static methods of the class: mypy would see the first overload only.
        self.full_state_dict, self.load_full_state_dict = full_state_dict, load_full_state_dict


_prepare.__name__ = _prepare.__qualname__ = "fully_shard"
fully_shard: Final = _FullyShard(_prepare)
