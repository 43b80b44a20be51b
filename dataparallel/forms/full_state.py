"""`full_state_dict` saves a sharded model and its optimizer as one device would; `load_full_state_dict` loads that.

A full state has plain tensors on the CPU only. So any number of devices can load it, or code that does not know this
library. With machines, `act_together` makes all ranks save or load, or all raise, before one sends or changes anything.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.devices import CPU
from dataparallel.forms.fully_shard_state import FullyShardState
from dataparallel.forms.managed import form_and_state, hint_for_names
from dataparallel.replicas.replaced_parameters import check_optimizer
from dataparallel.sharded.distribute import counters, sharded_value
from dataparallel.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Machines


StateDict: TypeAlias = "dict[str, Any]"
StatePair: TypeAlias = "tuple[Mapping[str, Any], Mapping[str, Any]]"  # of the model and of the optimizer


@overload
def full_state_dict(model: nn.Module, optimizer: None = None) -> StateDict: ...


@overload
def full_state_dict(model: nn.Module, optimizer: Optimizer) -> tuple[StateDict, StateDict]: ...


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> StateDict | tuple[StateDict, StateDict]:
    """Returns ``model.state_dict()``, and ``optimizer.state_dict()``, as they would be on one device, in host memory.

    The tensors are plain copies on the CPU. They are complete when this returns, and further training does not change
    them. Tensors are joined in host memory, one at a time, so no device needs room for the model. Weights that are tied
    are one tensor in the result. The model is sharded afterwards: units that are full at the moment are freed. If
    parameters are sharded over machines, all ranks call this, and each gets the whole state.

    Args:
        model: a model with `fully_shard`, or one that has fully sharded parts. A model without is copied as it is.
        optimizer: an optimizer over its parameters.

    Returns:
        The state dict of the model; with an optimizer a pair, the state dict of the model and that of the optimizer.
        ``torch.load(file, weights_only=True)`` loads either.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
        RuntimeError: a parameter or a buffer is on meta; the optimizer was made before `fully_shard`. Over machines an
            error on one rank is a ``RuntimeError`` on the others, which names it.
    """
    checked("model", model, nn.Module)
    # The ranks that shard a unit gather its shards: those of the group that was given, whose errors end no step of all.
    given = (machines.given[0] for state in unit_states(model) if (machines := state.unit.machines) is not None)
    groups = [*dict.fromkeys(group for group in given if group is not None)]
    model_state, optimizer_state = act_together(
        groups, "full_state_dict", lambda: _state_to_save(model, optimizer), describe_sent_tensors
    )
    copies: dict[int, Tensor] = {}
    saved: Any = OrderedDict((name, full_copy(value, copies)) for name, value in model_state.items())
    if hasattr(model_state, "_metadata"):  # the versions of modules
        saved._metadata = model_state._metadata
    return saved if optimizer is None else (saved, full_copy(optimizer_state, copies))


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | tuple[Mapping[str, Any], Mapping[str, Any]],
    optimizer: Optimizer | None = None,
) -> None:
    """Loads what `full_state_dict` returned, or what one device has saved, into a model with any number of devices.

    Each owner gets its shard of each tensor, and no device has a whole one. Parameters and buffers on meta get memory:
    the sharded ones on their owners, others on the first slot, or on the CPU if there are no slots. They stay the same
    objects, so an optimizer may be made before. Everything is checked before anything is changed. Units that are full
    at the moment are freed.

    With machines, all ranks call this, each with the whole state, which any number of machines may have saved. Ranks
    compare samples of what they load, so that shards of different checkpoints are not mixed.

    Args:
        model: as for `full_state_dict`. It has the same parameter names as the one that was saved.
        state: the state dict of the model; with an optimizer the pair of ``model.state_dict()`` and
            ``optimizer.state_dict()``.
        optimizer: an optimizer over the model's parameters, with or without a state of its own. It gets the saved
            state, each tensor sharded as its parameter is.

    Raises:
        TypeError: an argument is of another type, or there is an optimizer without its state, or the other way round.
        ValueError: names are missing or unexpected, or shapes differ; the optimizer has other groups, or the saved
            state of a parameter does not fit it.
        RuntimeError: something on meta is not in the state dict, as buffers that are not persistent; the optimizer was
            made before `fully_shard`. With machines also: another rank has failed, and nothing is changed here, unless
            it says that it was in the middle of loading; ranks load different states.
    """
    checked("model", model, nn.Module)
    machines_of_units = (state.unit.machines for state in unit_states(model))
    # Also the ranks that replicate shards: all have to load one state.
    groups = [*dict.fromkeys(machines.all for machines in machines_of_units if machines is not None)]
    model_state, optimizer_state = act_together(
        groups,
        "load_full_state_dict",
        lambda: _state_to_load(model, state, optimizer),
        lambda states: describe_loaded_tensors(model, optimizer, states),
    )

    def load() -> None:
        _give_memory(model)
        model.load_state_dict(model_state)
        if optimizer is not None:
            optimizer.load_state_dict(_shard_optimizer_state(optimizer, optimizer_state))

    act_together(groups, "the end of load_full_state_dict", load)


# ---- saving ----------------------------------------------------------------------------------------------------------


def _state_to_save(model: nn.Module, optimizer: Optimizer | None) -> tuple[Mapping[str, Any], StateDict]:
    if optimizer is not None:
        check_optimizer(checked("optimizer", optimizer, Optimizer))
    # This frees full units. With `keep_vars` tied weights are one object, as in the model.
    model_state = model.state_dict(keep_vars=True)
    for name, value in model_state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise RuntimeError(
                f"{name!r} is on the meta device, so there is no value to save; load the model, or give it memory with "
                "to_empty(device=...) and initialise it"
            )
    return model_state, {} if optimizer is None else optimizer.state_dict()


def full_copy(tree: Any, copies: dict[int, Tensor]) -> Any:
    """Copies a nested structure, with full tensors on the CPU. ``copies``: those made before, by tensors' ids."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            if isinstance(leaf, ShardedTensor):
                copies[id(leaf)] = leaf.full_tensor(CPU)
            else:
                copies[id(leaf)] = leaf.detach().to(CPU, copy=True)
        return copies[id(leaf)]

    return _torch.pytree.tree_map(copy, tree)


# ---- loading ---------------------------------------------------------------------------------------------------------


def _state_to_load(model: nn.Module, state: Any, optimizer: Optimizer | None) -> StatePair:
    if optimizer is not None:
        check_optimizer(checked("optimizer", optimizer, Optimizer))
    model_state, optimizer_state = _model_and_optimizer_state(state, optimizer)
    _check_model_state(model, model_state)
    if optimizer is not None:
        _check_optimizer_groups(optimizer, optimizer_state)
        _check_optimizer_state(optimizer, optimizer_state)
    return model_state, optimizer_state


@torch.no_grad()
def _give_memory(model: nn.Module) -> None:
    states = unit_states(model)
    offloaded = {id(p) for state in states if state.unit.is_offloaded for p in state.unit.parameters}
    buffer_device = _buffer_device(model)
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            continue
        device = CPU if id(tensor) in offloaded else buffer_device
        if isinstance(tensor, ShardedTensor) and device != CPU:
            device = tensor.devices[0]  # `empty_like` takes any owner for all owners
        made: Tensor = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update({name: value for name, value in vars(tensor).items() if name not in vars(made)})
        torch.utils.swap_tensors(tensor, made)


def _shard_optimizer_state(optimizer: Optimizer, optimizer_state: Mapping[str, Any]) -> StateDict:
    """Shares no tensor with the saved state: optimizers write into what they load, and the user may load it twice."""
    parameters, saved = parameters_by_key(optimizer, optimizer_state), optimizer_state["state"]
    plain_names = counters([(parameters[key], state) for key, state in saved.items()])

    def shard(name: str, value: Any, parameter: Tensor) -> Any:
        sharded = value if name in plain_names else sharded_value(value, parameter)
        return value.detach().clone() if sharded is value and isinstance(value, Tensor) else sharded

    def shard_all(values: Mapping[str, Any], parameter: Tensor) -> StateDict:
        return {
            name: _torch.pytree.tree_map(partial(shard, name, parameter=parameter), value)
            for name, value in values.items()
        }

    return {**optimizer_state, "state": {key: shard_all(values, parameters[key]) for key, values in saved.items()}}


# ---- checks ----------------------------------------------------------------------------------------------------------


def _model_and_optimizer_state(state: Any, optimizer: Optimizer | None) -> StatePair:
    if optimizer is None:
        if isinstance(state, Mapping):
            return state, {}
        what = "a pair, as with an optimizer: pass the optimizer too, or state[0] to load the model alone"
        given = what if isinstance(state, (tuple, list)) else type(state).__name__
        raise TypeError(f"expected the state dict of a model; got {given}")
    is_pair = isinstance(state, (tuple, list)) and len(state) == 2
    if not is_pair or not all(isinstance(part, Mapping) for part in state):
        raise TypeError(
            "with an optimizer, expected the pair of the model's state dict and the optimizer's, which "
            f"full_state_dict(model, optimizer) returns; got {type(state).__name__}"
        )
    if not {"state", "param_groups"} <= state[1].keys() or not isinstance(state[1]["state"], Mapping):
        raise TypeError(
            "expected the optimizer's state dict as the second of the pair, with 'state' and 'param_groups'; got a "
            f"dict with {_listed(state[1])}"
        )
    return state[0], state[1]


def _check_model_state(model: nn.Module, given: Mapping[str, Any]) -> None:
    expected = model.state_dict(keep_vars=True)
    wrong = []
    if missing := [name for name in expected if name not in given]:
        wrong.append(f"it lacks {_listed(missing)}")
    if unexpected := [name for name in given if name not in expected]:
        wrong.append(f"the model has no {_listed(unexpected)}")
    tensors = [(name, value) for name, value in given.items() if isinstance(expected.get(name), Tensor)]
    wrong += [f"{name!r} {why}" for name, value in tensors if (why := _why_no_value(value, expected[name], "model"))]
    if wrong:
        hint = hint_for_names(model, given)
        what = f"this state dict does not fit the {type(model).__name__}: {'; '.join(wrong)}"
        raise ValueError(f"{what}. {hint}" if hint else what)
    without = [name for name, value in given.items() if isinstance(value, Tensor) and value.is_meta]
    if without:
        raise ValueError(f"this state dict has no values for {_listed(without)}: they are on the meta device")
    in_state_dict = {id(value) for value in expected.values()}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta and id(tensor) not in in_state_dict:
            raise RuntimeError(
                f"{name!r} is on the meta device and in no state dict, so it would have no value: give it one before, "
                f"on {str(_buffer_device(model))!r}"
            )


def _why_no_value(value: Any, tensor: Tensor, where: str) -> str | None:
    """Why ``value`` cannot be copied into a tensor of the model or optimizer, in words; ``None`` if it can."""
    if not isinstance(value, Tensor):
        return f"is no tensor, but of type {type(value).__name__}"
    if (value.layout, value.is_quantized) != (tensor.layout, tensor.is_quantized):
        kind = "a quantised tensor" if value.is_quantized else f"a tensor of layout {value.layout}"
        return f"is {kind}, and one of layout {tensor.layout} in the {where}"
    if not is_lazy(tensor) and value.shape != tensor.shape:
        return f"has the shape {tuple(value.shape)}, and {tuple(tensor.shape)} in the {where}"
    return None


def _buffer_device(model: nn.Module) -> torch.device:
    states = unit_states(model)
    return states[0].slots[0] if states else CPU


def _check_optimizer_groups(optimizer: Optimizer, optimizer_state: Mapping[str, Any]) -> None:
    saved = [len(group["params"]) for group in optimizer_state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        raise ValueError(
            f"this state is of an optimizer whose groups have {saved} parameters; the groups of this "
            f"{type(optimizer).__name__} have {present}. Make it with the same groups"
        )


def _check_optimizer_state(optimizer: Optimizer, optimizer_state: Mapping[str, Any]) -> None:
    """Checks that each state has a parameter, and fits it and the state that it has."""
    parameters = parameters_by_key(optimizer, optimizer_state)
    shapes: defaultdict[str, dict[Any, tuple[int, ...]]] = defaultdict(dict)  # by the name of the entry
    for key, state in optimizer_state["state"].items():
        if key not in parameters:
            raise ValueError(f"the saved state of the {type(optimizer).__name__} has a parameter {key!r} in no group")
        checked(f"the saved state of parameter {key!r}", state, Mapping)
        for name, value in state.items():
            if isinstance(value, Tensor):
                shapes[name][key] = tuple(value.shape)
                if value.is_meta:
                    raise ValueError(f"{name!r} of parameter {key!r} is on the meta device, and has no values")
    for name, saved in shapes.items():
        present = {key: tuple(parameters[key].shape) for key in saved}
        if saved != present and sorted(saved.values()) == sorted(present.values()):
            key = next(key for key in saved if saved[key] != present[key])
            raise ValueError(
                f"{name!r} of parameter {key!r} has the shape {saved[key]} in the saved state of the "
                f"{type(optimizer).__name__}; the parameter has {present[key]}. Make the optimizer with its parameters "
                "in the same order"
            )
    for key, state in optimizer_state["state"].items():
        for name, own in optimizer.state.get(parameters[key], {}).items():
            if not isinstance(own, Tensor) or own.dim() == 0:
                continue
            if why := _why_no_value(state.get(name, own), own, "optimizer"):
                raise ValueError(f"{name!r} of parameter {key!r} {why}")


def _listed(names: Iterable[str]) -> str:
    names = [*names]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


T = TypeVar("T")

SAMPLES = 64
"""How many elements of a tensor ranks compare. They come from all over the tensor."""


def unit_states(model: nn.Module) -> list[FullyShardState]:
    states = [form_and_state(module)[1] for module in model.modules()]
    by_id = {id(state): state for state in states if isinstance(state, FullyShardState) and state.slots}
    return [*by_id.values()]


def parameters_by_key(optimizer: Optimizer, optimizer_state: Mapping[str, Any]) -> dict[Any, Tensor]:
    keys = chain.from_iterable(group["params"] for group in optimizer_state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return dict(zip(keys, parameters, strict=True))


def act_together(
    groups: Sequence[Machines],
    what: str,
    act: Callable[[], T],
    describe: Callable[[T], Mapping[str, Any]] = lambda result: {},
) -> T:
    """Returns the result of ``act()`` after it has succeeded on all ranks and they agree on ``describe(result)``.

    All ranks of the groups call this. One group compares after the other, also after an error, which all ranks hear.
    """
    if not groups:
        return act()
    from dataparallel.machines.errors import MachinesError, describe_error
    from dataparallel.machines.start import compare

    result: Any = None
    errors: list[BaseException] = []
    description: Mapping[str, Any] = {}
    try:
        result = act()
        description = describe(result)
    except BaseException as error:
        errors.append(error)
    for group in groups:
        try:
            compare(group, what, {"error": describe_error(errors[0]) if errors else "none", **description})
        except MachinesError as error:
            errors.append(error)
    if errors:
        raise errors.pop(0)
    found: T = result
    return found


def describe_sent_tensors(state: Any) -> dict[str, Any]:
    """Describes the tensors of a nested structure that ranks gather from each other to save it, in this order."""
    return {
        path: {"shape": tuple(leaf.shape), "dtype": leaf.dtype, "placement": leaf.placement}
        for path, leaf in _leaves_by_path(state).items()
        if isinstance(leaf, ShardedTensor) and leaf.over is not None
    }


def describe_loaded_tensors(model: nn.Module, optimizer: Optimizer | None, state: StatePair) -> dict[str, Any]:
    """Describes tensors loaded into sharded parameters and their state. Others, as buffers, may differ on ranks."""
    model_state, optimizer_state = state
    targets = model.state_dict(keep_vars=True)
    loaded = {name: value for name, value in model_state.items() if isinstance(targets.get(name), ShardedTensor)}
    if optimizer is not None:
        parameters = parameters_by_key(optimizer, optimizer_state)
        for key, values in optimizer_state["state"].items():
            if isinstance(parameters[key], ShardedTensor):
                loaded |= {f"parameter {key} {path}": leaf for path, leaf in _leaves_by_path(values).items()}
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
