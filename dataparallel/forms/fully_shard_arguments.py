"""`MixedPrecisionPolicy` and `OffloadPolicy`, and functions that check the arguments of `fully_shard` before it begins.

Policies have the names, fields and defaults of ``torch.distributed.fsdp``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.parameter import is_lazy

from dataparallel.arguments import checked
from dataparallel.comm.kinds import attributes_with_tensors
from dataparallel.forms.managed import check_runs, own_modules, own_parameters
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
            dtype = checked(name, getattr(self, name), torch.dtype, None)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name}={dtype}: expected a floating-point dtype, torch.bfloat16 for example")
        checked("cast_forward_inputs", self.cast_forward_inputs, bool)


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
        checked("pin_memory", self.pin_memory, bool)


def check_kind(module: nn.Module) -> None:
    for path, child in own_modules([module]):
        if isinstance(child, torch.jit.ScriptModule):
            what = f"{path!r}, a {type(child).__name__}" if path else f"a {type(child).__name__}"
            raise TypeError(
                f"cannot shard {what}: the parameters of a ScriptModule belong to TorchScript and cannot be replaced. "
                "Shard the module that is not scripted"
            )
    check_runs(module, "shard")


def check_reshard(value: bool | int, slots: int, machines: int = 1) -> bool | int:
    """``slots`` is 0 without devices. Over several machines all slots of one machine may be a group."""
    value = checked("reshard_after_forward", value, bool, int, above=1, hint=", the slots of a group")
    if isinstance(value, bool):
        return value
    if slots and value == slots and machines == 1:
        raise ValueError(f"reshard_after_forward={value} is the number of all slots; pass True for that")
    if slots and slots % value:
        groups = [size for size in range(2, slots) if slots % size == 0]
        instead = " or ".join(map(str, groups)) if groups else "there is no such number, so pass True or False"
        raise ValueError(
            f"reshard_after_forward={value}: groups of {value} slots do not divide {slots} slots evenly; possible: "
            f"{instead}"
        )
    return value


def parameters_of_unit(modules: Sequence[nn.Module], ignored: Sequence[Tensor]) -> list[tuple[str, nn.Parameter]]:
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
