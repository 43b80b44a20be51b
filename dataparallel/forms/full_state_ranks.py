"""`act_together` makes all ranks save or load a model together, or raise together. Without machines it only acts.

Before a rank sends or changes anything, all ranks compare what they are about to send or load.
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
from dataparallel.forms.managed import form_and_state
from dataparallel.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from dataparallel.machines.group import Machines

T = TypeVar("T")

SAMPLES = 64
"""How many elements of a tensor ranks compare. They come from all over the tensor."""


def unit_states(model: nn.Module) -> list[FullyShardState]:
    """Returns the states of the model's units that have slots, each once."""
    states = [form_and_state(module)[1] for module in model.modules()]
    by_id = {id(state): state for state in states if isinstance(state, FullyShardState) and state.slots}
    return [*by_id.values()]


def parameters_by_key(optimizer: Optimizer, optimizer_state: Mapping[str, Any]) -> dict[Any, Tensor]:
    """Returns the optimizer's parameters by their keys in ``optimizer_state``, which was saved."""
    keys = chain.from_iterable(group["params"] for group in optimizer_state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return dict(zip(keys, parameters, strict=True))


def groups_that_save(model: nn.Module) -> list[Machines]:
    """Returns each group of machines that shards a tensor of the model: to save, its ranks gather the shards."""
    tensors = chain(model.parameters(), model.buffers())
    groups = dict.fromkeys(tensor.over for tensor in tensors if isinstance(tensor, ShardedTensor))
    if not any(groups):
        return []
    from dataparallel.machines.group import Machines

    return [group for group in groups if isinstance(group, Machines)]


def groups_that_load(model: nn.Module) -> list[Machines]:
    """Returns the whole group of each unit, with the ranks that replicate its shards: all have to load one state."""
    machines_of_units = (state.unit.machines for state in unit_states(model))
    return [*dict.fromkeys(machines.all for machines in machines_of_units if machines is not None)]


def act_together(
    groups: Sequence[Machines], what: str, act: Callable[[], T], describe: Callable[[T], Mapping[str, Any]]
) -> T:
    """Returns the result of ``act()`` after it has succeeded on all ranks and they agree on ``describe(result)``.

    All ranks of the groups call this. One group compares after the other; after an error all others hear of it.

    Raises:
        PeerFailed: it has failed on another rank.
        MachinesDiffer: descriptions differ.
    """
    remaining = [*groups]
    try:
        result = act()
        description = describe(result) if groups else {}
        while remaining:
            from dataparallel.machines.start import compare

            compare(remaining.pop(0), what, description)
    except BaseException as error:
        for group in remaining:
            group.queue.signal_failure(error)
        raise
    return result


def describe_sent_tensors(state: Any) -> dict[str, Any]:
    """Describes the tensors of a nested structure that ranks gather from each other to save it, in this order."""
    return {
        path: {"shape": tuple(leaf.shape), "dtype": leaf.dtype, "placement": leaf.placement}
        for path, leaf in _leaves_by_path(state).items()
        if isinstance(leaf, ShardedTensor) and leaf.over is not None
    }


def describe_loaded_tensors(
    model: nn.Module, optimizer: Optimizer | None, state: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> dict[str, Any]:
    """Describes tensors loaded into sharded parameters and their state. Others, as buffers, may differ on ranks."""
    model_state, optimizer_state = state
    targets = model.state_dict(keep_vars=True)
    loaded = {name: value for name, value in model_state.items() if isinstance(targets.get(name), ShardedTensor)}
    if optimizer is not None:
        parameters = parameters_by_key(optimizer, optimizer_state)
        for key, values in optimizer_state["state"].items():
            if isinstance(parameters[key], ShardedTensor):
                loaded |= {f"parameter {key} {path}": value for path, value in _leaves_by_path(values).items()}
    return {
        name: {"shape": tuple(value.shape), "dtype": value.dtype, "values": _checksum_of_samples(value)}
        for name, value in loaded.items()
        if isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
    }


def _checksum_of_samples(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    samples = flat[:: max(1, flat.numel() // SAMPLES)].to(CPU).resolve_conj().resolve_neg().contiguous()
    return f"{zlib.crc32(samples.view(torch.uint8).numpy().tobytes()):08x}"


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = _torch.pytree.tree_flatten_with_path(tree)
    return {_torch.pytree.keystr(path): leaf for path, leaf in leaves}
