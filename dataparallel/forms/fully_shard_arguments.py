"""`MixedPrecisionPolicy` and `OffloadPolicy`, and functions that check the arguments of `fully_shard` before it begins.

Policies have the names, fields and defaults of ``torch.distributed.fsdp``. Each error of a check says what was passed,
what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.parameter import is_lazy

from dataparallel.comm.kinds import attributes_with_tensors
from dataparallel.forms.managed import has_forward, own_modules, own_parameters
from dataparallel.replicas.plan import FORM_ATTRIBUTE
from dataparallel.sharded.placements import check_placement
from dataparallel.sharded.tensor import ShardedTensor


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit. Sharded parameters, and so the optimizer's state, keep their own dtype.

    Unlike autocast this chooses one dtype for a whole module: its full parameters, what it saves for backward, its
    inputs. All four fields concern floating-point tensors only.

    Attributes:
        param_dtype: the dtype of the full parameters, in which they are gathered. ``None``: the sharded ones' dtype.
        reduce_dtype: the dtype in which gradients of the slots are summed, and wait inside ``no_sync``. ``None``:
            ``param_dtype``.
        output_dtype: the dtype to which outputs of the module's forward are cast. ``None``: they are not cast.
        cast_forward_inputs: if true, the inputs of the module's forward are cast to ``param_dtype``.

    Raises:
        TypeError: a field has another type.
        ValueError: a dtype is not a floating-point one.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name}={dtype!r}: expected a torch.dtype, torch.bfloat16 for example, or None")
            if not dtype.is_floating_point:
                raise ValueError(f"{name}={dtype}: expected a floating-point dtype, torch.bfloat16 for example")
        _check_flag("cast_forward_inputs", self.cast_forward_inputs)


@dataclass(frozen=True)
class OffloadPolicy:
    """Says that the shards stay on the devices that own them. It is the base of other policies."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Says that shards, their gradients and the optimizer's state are kept in host memory.

    A shard is copied to its owner before the unit is gathered, and its gradient is copied back in backward. The
    optimizer steps on the CPU.

    Attributes:
        pin_memory: if true, this memory is pinned, so that copies run beside other work. Other processes cannot use
            pinned memory: turn it off where there is too little.

    Raises:
        TypeError: ``pin_memory`` is no bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _check_flag("pin_memory", self.pin_memory)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False")


def check_kind(module: nn.Module) -> None:
    """Checks that the module can be a unit: it has a forward, and is no wrapper or ScriptModule."""
    name = type(module).__name__
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"the module is wrapped already, in a {name}; shard its .module instead: forms do not nest")
    for path, child in own_modules([module]):
        if isinstance(child, torch.jit.ScriptModule):
            what = f"{path!r}, a {type(child).__name__}" if path else f"a {name}"
            raise TypeError(
                f"cannot shard {what}: the parameters of a ScriptModule belong to TorchScript and cannot be replaced. "
                "Shard the module that is not scripted"
            )
    if not has_forward(module):
        raise TypeError(
            f"a {name} has no forward of its own, so there is no call that could gather its parameters; shard each of "
            "its modules, or the module that holds it"
        )


def check_policies(mp_policy: object, offload_policy: object) -> None:
    for name, policy, expected in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if not isinstance(policy, expected):
            raise TypeError(f"{name}={policy!r}: expected a dataparallel.composable.{expected.__name__}")


def check_reshard(value: object, slots: int, machines: int = 1) -> None:
    """Checks that ``reshard_after_forward`` is a bool, or a number of slots that makes groups.

    Over several machines all slots of one machine may be a group. ``slots`` is 0 without devices.
    """
    if isinstance(value, bool):
        return
    if not isinstance(value, int):
        raise TypeError(
            f"reshard_after_forward={value!r}: expected True, False, or an int, the number of slots in a group"
        )
    if value == 1:
        raise ValueError("reshard_after_forward=1: each slot would keep all parameters; pass False for that")
    if value < 1:
        raise ValueError(f"reshard_after_forward={value}: expected a number of slots above 1, or True or False")
    if slots and value == slots and machines == 1:
        raise ValueError(f"reshard_after_forward={value} is the number of all slots; pass True for that")
    if slots and slots % value:
        groups = [size for size in range(2, slots) if slots % size == 0]
        instead = " or ".join(map(str, groups)) if groups else "there is no such number, so pass True or False"
        raise ValueError(
            f"reshard_after_forward={value}: groups of {value} slots do not divide {slots} slots evenly; possible: "
            f"{instead}"
        )


def parameters_of_unit(modules: Sequence[nn.Module], ignored: Sequence[object]) -> list[tuple[str, nn.Parameter]]:
    """Returns the unit's parameters with their names: the parameters of `own_modules` that are not ignored."""
    for i, parameter in enumerate(ignored):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"ignored_params[{i}] is {parameter!r}; expected parameters, not their names")
    ignored_ids = {id(parameter) for parameter in ignored}
    named = [(name, parameter) for name, parameter in own_parameters(modules) if id(parameter) not in ignored_ids]
    if not named and not _children(modules):
        names = " and ".join(f"a {type(module).__name__}" for module in modules)
        raise ValueError(
            f"there is nothing to shard in {names}: it has no parameters and none below, or all of them are in "
            "ignored_params. Leave it to the module that holds it"
        )
    return named


def check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Checks that the unit's parameters are plain ones, initialised, and on one device."""
    for name, parameter in named:
        if is_lazy(parameter):
            raise RuntimeError(
                f"{name!r} is not initialised yet; run the module once on a sample batch before it is sharded"
            )
        if isinstance(parameter, ShardedTensor) or hasattr(parameter, "__tensor_flatten__"):
            raise TypeError(
                f"{name!r} is a {type(parameter).__name__}, which stands for other tensors already; `fully_shard` "
                "takes plain parameters. Replicate the module instead"
            )
        if attributes := attributes_with_tensors(parameter):
            raise TypeError(
                f"{name!r} has the attribute {attributes[0]!r}, which holds tensors; `fully_shard` leaves attributes "
                "behind. Replicate the module, or make buffers of these tensors"
            )
        if type(parameter) not in (nn.Parameter, nn.Buffer, Tensor):
            raise TypeError(
                f"{name!r} is a {type(parameter).__name__}, a class of its own, which `fully_shard` would drop: shards "
                "are plain tensors. Make it a plain torch.nn.Parameter, or leave it whole with ignored_params"
            )
    first_names: dict[torch.device, str] = {}
    for name, parameter in named:
        if parameter.device.type != "meta":
            first_names.setdefault(parameter.device, name)
    if len(first_names) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in first_names.items())
        raise ValueError(
            f"the parameters of one unit are on {len(first_names)} devices: {where}. Move the module to one device "
            "before, with .to(device); the CPU is one"
        )


def check_children(modules: Sequence[nn.Module], slots: Sequence[torch.device], groups: tuple[Any, Any]) -> None:
    """Checks that units below are sharded over the same devices as this one, and over the same groups of machines."""
    for path, state in _children(modules):
        if [*state.slots] != [*slots]:
            theirs, ours = (", ".join(map(str, each)) or "no devices" for each in (state.slots, slots))
            raise ValueError(
                f"the child {path!r} is sharded over {theirs}, and this module would be over {ours}; give all modules "
                "of one tree the same devices, in the same order"
            )
        given = (None, None) if state.machines is None else state.machines.given
        if given != groups:
            theirs, ours = ("one machine" if each == (None, None) else "several machines" for each in (given, groups))
            raise ValueError(
                f"the child {path!r} is spread over {theirs}, and this module would be over {ours}"
                + (", with another group or mesh" if ours == theirs else "")
                + ". Give all modules of one tree the same process_group or mesh, the same object"
            )


def placements_of(
    named: Collection[tuple[str, nn.Parameter]], place: Callable[[nn.Parameter], Any] | None, slots: int
) -> list[Shard]:
    """Returns for each parameter how it is cut. ``place`` is the user's ``shard_placement_fn``."""
    return [_check_shard(name, parameter, place and place(parameter), slots) for name, parameter in named]


def _check_shard(name: str, parameter: nn.Parameter, given: object, slots: int) -> Shard:
    if given is None:
        return Shard(0)
    if type(given) is not Shard:
        raise TypeError(
            f"shard_placement_fn returned {given!r} for {name!r}; expected torch.distributed.tensor.Shard(dim), or "
            "None for Shard(0)"
        )
    try:
        placement = check_placement(given, parameter.shape)
    except ValueError as error:
        raise ValueError(f"shard_placement_fn for {name!r}: {error}") from None
    assert isinstance(placement, Shard)
    dim = placement.dim
    if dim and slots and parameter.shape[dim] % slots:
        raise ValueError(
            f"shard_placement_fn returned {given!r} for {name!r} of shape {tuple(parameter.shape)}: "
            f"{parameter.shape[dim]} is no multiple of {slots} slots. Only dimension 0 may be cut unevenly: return None"
        )
    return placement


def _children(modules: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    own = {id(module) for module in modules}
    return [
        (path, vars(child)[FORM_ATTRIBUTE][1])
        for module in modules
        for path, child in module.named_modules()
        if FORM_ATTRIBUTE in vars(child) and id(child) not in own
    ]
