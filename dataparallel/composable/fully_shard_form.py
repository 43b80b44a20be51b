"""``fully_shard(module)``: each device owns a part of the module's parameters, and the module runs on all slots.

One call makes one unit: the parameters that are gathered and freed together. Call it for children and then for their
parents. This file has the function. ``composable.fully_sharded_module`` has the class that modules get,
``composable.fully_shard_arguments`` has the checks, ``composable.fully_shard_state`` has the call of a unit,
``composable.contract`` has the rules of all forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from dataparallel.composable import replaced_parameters
from dataparallel.composable.contract import Form
from dataparallel.composable.full_state import full_state_dict, load_full_state_dict
from dataparallel.composable.fully_shard_arguments import (
    check_children,
    check_kind,
    check_options,
    check_parameters,
    check_reshard,
    parameters_of_unit,
    places_of,
)
from dataparallel.composable.fully_shard_state import FullyShardState
from dataparallel.composable.fully_sharded_module import FullyShardedModule
from dataparallel.composable.managed import own_parameters
from dataparallel.composable.policies import MixedPrecisionPolicy, OffloadPolicy
from dataparallel.composable.rebound_attributes import rebind
from dataparallel.devices import DeviceLike, resolve_output, resolve_slots

__all__ = ["fully_shard"]

_P = ParamSpec("_P")


def _prepare(
    module: list[nn.Module],
    *,
    devices: Sequence[DeviceLike] | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[Tensor] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
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

    Names, defaults and meanings are those of ``torch.distributed.fsdp.fully_shard``, as far as they make sense in one
    process.

    Args:
        module: a module that has a ``forward``, or a list of them that makes one unit. Parameters may be on any one
            device, or on meta to be initialised later.
        devices: the slots: ints (accelerators), strings, ``torch.device``; one device may be listed several times,
            ``["cpu", "cpu"]`` are two slots on the CPU. Default: all accelerators; without any the module just runs,
            and its parameters stay as they are.
        reshard_after_forward: ``True`` frees the full parameters after forward. ``False`` keeps them until backward. An
            int above 1 that divides the number of slots makes groups of as many slots: each slot keeps a part, and
            backward gathers from the group. ``None`` means ``True``, but ``False`` for the outermost module, which
            backward needs at once.
        shard_placement_fn: takes a parameter and returns the ``Shard(dim)`` that says how it is cut, or ``None`` for
            ``Shard(0)``. A dimension other than 0 has to be a multiple of the number of slots.
        mp_policy: the dtypes to compute and to sum in.
        offload_policy: where the shards are kept; ``CPUOffloadPolicy()`` keeps them in host memory.
        ignored_params: parameters that are not sharded, not copied to the slots and not summed. Those of other modules
            are allowed.
        output_device: the device of the outputs; default the first slot, -1 or ``"cpu"`` for the CPU.
        dim: the batch dimension of inputs and outputs.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, has no ``forward``, or is a wrapper or a ScriptModule; an argument or what
            ``shard_placement_fn`` returns is of another type.
        ValueError: devices as for `dataparallel.DataParallel`; nothing to shard, parameters on two devices, a
            ``reshard_after_forward`` that does not divide the number of slots, a dimension that cannot be cut, a child
            that is sharded over other devices; a list that is empty or has a module twice.
        RuntimeError: the module or a parent is fully sharded already, a module or a parameter of the tree has another
            form, a parameter is shared with another unit, or a lazy one is not initialised.
    """
    for each in module:
        check_kind(each)
    slots = resolve_slots(devices)
    if slots:
        resolve_output(output_device, slots)
    check_options(dim, mp_policy, offload_policy)
    if reshard_after_forward is not None:
        check_reshard(reshard_after_forward, len(slots))
    ignored = [] if ignored_params is None else [*ignored_params]
    named = parameters_of_unit(module, ignored)
    fully_shard.check_unshared(named)
    check_parameters(named)
    check_children(module, slots)
    kept = {id(parameter) for parameter in ignored}
    placements = places_of(named, shard_placement_fn, len(slots))
    return FullyShardState(
        module,
        [parameter for _, parameter in named],
        slots,
        placements=placements,
        reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward,
        is_reshard_automatic=reshard_after_forward is None,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_parameters=[parameter for _, parameter in own_parameters(module) if id(parameter) in kept],
        output_device=output_device,
        dim=dim,
    )


def _begin(modules: list[nn.Module], state: FullyShardState) -> None:
    """Replaces the parameters by sharded ones."""
    if not state.slots:
        return
    before = own_parameters(modules)
    state.shard()
    now = dict(own_parameters(modules))
    replaced = [(name, parameter, now[name]) for name, parameter in before if now[name] is not parameter]
    owner = type(modules[0]).__name__ if len(modules) == 1 else f"list of {len(modules)} modules"
    replaced_parameters.remember(replaced, owner, "fully_shard")
    rebind({id(module): module for top in modules for module in top.modules()}.values())


class _FullyShard(Form[_P, FullyShardState]):
    """The form, with the functions that save and load what it has sharded."""

    full_state_dict = staticmethod(full_state_dict)
    load_full_state_dict = staticmethod(load_full_state_dict)


_prepare.__name__ = _prepare.__qualname__ = "fully_shard"
fully_shard = _FullyShard(_prepare, FullyShardedModule, nests=True, begin=_begin)
