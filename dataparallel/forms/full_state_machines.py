"""What ranks tell each other when they save or load the state of a model together; without machines, nothing.

Before anything is sent or changed all ranks say that they can go on and with what: an error on one is an error on all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.forms.fully_shard_state import FullyShardState
from dataparallel.forms.managed import KEY
from dataparallel.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from dataparallel.machines.group import Machines

T = TypeVar("T")

SAMPLES = 64
"""Elements of a tensor that ranks compare, from all over it."""


def states_of(model: nn.Module) -> list[FullyShardState]:
    """The states of the units in the model, each once; none where there are no devices."""
    of_modules = [vars(module).get(KEY, (None, None))[1] for module in model.modules()]
    found = {id(state): state for state in of_modules if isinstance(state, FullyShardState) and state.slots}
    return [*found.values()]


def saved_parameters(optimizer: Optimizer, of_optimizer: Mapping[str, Any]) -> dict[Any, Tensor]:
    """The optimizer's parameters, by their keys in the saved state."""
    saved = chain.from_iterable(group["params"] for group in of_optimizer["param_groups"])
    present = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return dict(zip(saved, present, strict=True))


def sharded_over(model: nn.Module) -> list[Machines]:
    """The machines over which tensors of the model are sharded."""
    tensors = chain(model.parameters(), model.buffers())
    found = dict.fromkeys(tensor.over for tensor in tensors if isinstance(tensor, ShardedTensor))
    if not any(found):
        return []
    from dataparallel.machines.group import Machines

    return [over for over in found if isinstance(over, Machines)]


def all_machines(model: nn.Module) -> list[Machines]:
    """Also those that have the same parts as this one."""
    of_units = (state.unit.machines for state in states_of(model))
    return [*dict.fromkeys(machines.all for machines in of_units if machines is not None)]


def checked_together(
    groups: Sequence[Machines], what: str, act: Callable[[], T], describe: Callable[[T], Mapping[str, Any]]
) -> T:
    """What ``act`` returns, once it has returned on all ranks and they agree on the description of it.

    All ranks of the groups call this. A failure in one of these is passed on to the next one.

    Raises:
        PeerFailed: it has failed on another rank.
        MachinesDiffer: descriptions differ.
    """
    left = [*groups]
    try:
        result = act()
        description = describe(result)
        while left:
            from dataparallel.machines.start import compare

            compare(left.pop(0), what, description)
    except BaseException as error:
        for machines in left:
            machines.queue.signal_failure(error)
        raise
    return result


def described(state: Any) -> dict[str, Any]:
    """The tensors of a nested structure that are sharded over machines: what will be sent, in this order."""
    return {
        name: {"shape": tuple(leaf.shape), "dtype": leaf.dtype, "placement": leaf.placement}
        for name, leaf in _named(state).items()
        if isinstance(leaf, ShardedTensor) and leaf.over is not None
    }


def sampled(
    model: nn.Module, optimizer: Optimizer | None, state: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> dict[str, Any]:
    """What is loaded into sharded parameters and their state. Other tensors may differ between ranks, as buffers do."""
    of_model, of_optimizer = state
    expected = model.state_dict(keep_vars=True)
    found = {name: value for name, value in of_model.items() if isinstance(expected.get(name), ShardedTensor)}
    if optimizer is not None:
        parameters = saved_parameters(optimizer, of_optimizer)
        for key, values in of_optimizer["state"].items():
            if isinstance(parameters[key], ShardedTensor):
                found |= {f"parameter {key} {name}": value for name, value in _named(values).items()}
    return {
        name: {"shape": tuple(value.shape), "dtype": value.dtype, "values": _sample(value)}
        for name, value in found.items()
        if isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
    }


def _sample(tensor: Tensor) -> str:
    """A number made of some elements."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLES)].to(CPU).resolve_conj().resolve_neg().contiguous()
    return f"{zlib.crc32(some.view(torch.uint8).numpy().tobytes()):08x}"


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = _torch.pytree.tree_flatten_with_path(tree)
    return {_torch.pytree.keystr(path): leaf for path, leaf in leaves}
