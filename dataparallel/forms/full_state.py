"""What one device would save of a sharded model and its optimizer, and back.

It has plain tensors on the CPU only, so it can be loaded with another number of devices, or with none, by code that
does not know this library.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.forms.full_state_machines import (
    all_machines,
    checked_together,
    described,
    sampled,
    saved_parameters,
    sharded_over,
    states_of,
)
from dataparallel.replicas.replaced_parameters import check_optimizer
from dataparallel.sharded.distribute import counters, sharded_value
from dataparallel.sharded.tensor import ShardedTensor

StateDict: TypeAlias = "dict[str, Any]"


@overload
def full_state_dict(model: nn.Module, optimizer: None = None) -> StateDict: ...


@overload
def full_state_dict(model: nn.Module, optimizer: Optimizer) -> tuple[StateDict, StateDict]: ...


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> StateDict | tuple[StateDict, StateDict]:
    """What ``model.state_dict()`` would be on one device, and ``optimizer.state_dict()``, in host memory.

    The tensors are plain copies on the CPU. They are complete when this returns, and further training does not change
    them. One tensor is joined at a time, in host memory, so no device needs room for the model. Weights that are tied
    are one tensor in the result. The model is sharded afterwards: units that are full at the moment are freed. If
    parameters are sharded over machines, all ranks call this, and each gets the whole.

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
    _check_model_is_one(model)
    groups = sharded_over(model)
    found, of_optimizer = checked_together(
        groups, "full_state_dict", lambda: _to_save(model, optimizer), lambda both: described(both) if groups else {}
    )
    copied: dict[int, Tensor] = {}
    of_model: Any = OrderedDict((name, _full(value, copied)) for name, value in found.items())
    if hasattr(found, "_metadata"):  # the versions of modules
        of_model._metadata = found._metadata
    if optimizer is None:
        return of_model
    return of_model, _full(of_optimizer, copied)


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | tuple[Mapping[str, Any], Mapping[str, Any]],
    optimizer: Optimizer | None = None,
) -> None:
    """Loads what `full_state_dict` returned, or what one device has saved, into a model with any number of devices.

    Each owner gets its part of each tensor, and no device has the whole. Parameters and buffers on meta get memory: the
    sharded ones on their owners, others on the first slot, or on the CPU if there are no slots. They stay the same
    objects, so an optimizer may be made before. Everything is checked before anything is changed. Units that are full
    at the moment are freed.

    With machines, all ranks call this, each with the whole state. It need not be of as many machines. Samples of what
    the ranks load are compared, so that parts of different checkpoints are not mixed.

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
    _check_model_is_one(model)
    groups = all_machines(model)
    of_model, of_optimizer = checked_together(
        groups,
        "load_full_state_dict",
        lambda: _to_load(model, state, optimizer),
        lambda both: sampled(model, optimizer, both) if groups else {},
    )

    def load() -> None:
        _give_memory(model)
        model.load_state_dict(of_model)
        if optimizer is not None:
            optimizer.load_state_dict(_sharded(optimizer, of_optimizer))

    checked_together(groups, "the end of load_full_state_dict", load, lambda nothing: {})


# ---- saving ----------------------------------------------------------------------------------------------------------


def _to_save(model: nn.Module, optimizer: Optimizer | None) -> tuple[Mapping[str, Any], StateDict]:
    """The state dicts, with tensors as they are."""
    _check_optimizer(optimizer)
    # Frees full parameters. With `keep_vars` tied weights are one object, as in the model.
    found = model.state_dict(keep_vars=True)
    for name, value in found.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise RuntimeError(
                f"{name!r} is on the meta device, so there is no value to save; load the model, or give it memory with "
                "to_empty(device=...) and initialise it"
            )
    return found, {} if optimizer is None else optimizer.state_dict()


def _full(tree: Any, copied: dict[int, Tensor]) -> Any:
    """A copy of a nested structure, with full tensors on the CPU. ``copied`` has those that were met before, by id."""

    def full(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copied:
            if isinstance(leaf, ShardedTensor):
                copied[id(leaf)] = leaf.full_tensor(CPU)
            else:
                copied[id(leaf)] = leaf.detach().to(CPU, copy=True)
        return copied[id(leaf)]

    return _torch.pytree.tree_map(full, tree)


# ---- loading ---------------------------------------------------------------------------------------------------------


def _to_load(model: nn.Module, state: Any, optimizer: Optimizer | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The state dicts, once they are checked."""
    _check_optimizer(optimizer)
    of_model, of_optimizer = _taken_apart(state, optimizer)
    _check_model(model, of_model)
    if optimizer is not None:
        _check_groups(optimizer, of_optimizer)
        _check_state(optimizer, of_optimizer)
    return of_model, of_optimizer


@torch.no_grad()
def _give_memory(model: nn.Module) -> None:
    """Gives memory to parameters and buffers on meta. They stay the same objects."""
    states = states_of(model)
    in_host_memory = {id(p) for state in states if state.unit.is_offloaded for p in state.unit.parameters}
    elsewhere = _place(model)
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            continue
        device = CPU if id(tensor) in in_host_memory else elsewhere
        if isinstance(tensor, ShardedTensor) and device != CPU:
            device = tensor.devices[0]  # means all owners
        made: Tensor = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update({name: value for name, value in vars(tensor).items() if name not in vars(made)})
        torch.utils.swap_tensors(tensor, made)


def _sharded(optimizer: Optimizer, of_optimizer: Mapping[str, Any]) -> StateDict:
    """The saved state with each value sharded as its parameter. It shares no tensor with what was saved.

    Optimizers write into the tensors that they load, and two may be given one state.
    """
    parameters, saved = saved_parameters(optimizer, of_optimizer), of_optimizer["state"]
    plain = counters([(parameters[key], state) for key, state in saved.items()])

    def own(name: str, value: Any, parameter: Tensor) -> Any:
        divided = value if name in plain else sharded_value(value, parameter)
        return _torch.pytree.tree_map(_copied, value) if divided is value else divided

    divided = {
        key: {name: own(name, value, parameters[key]) for name, value in state.items()} for key, state in saved.items()
    }
    return {**of_optimizer, "state": divided}


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_model_is_one(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module; got {type(model).__name__}")


def _check_optimizer(optimizer: object) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer; got {type(optimizer).__name__}")
    check_optimizer(optimizer)


def _taken_apart(state: Any, optimizer: Optimizer | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The state of the model and that of the optimizer, empty without one."""
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
    if not {"state", "param_groups"} <= state[1].keys():
        raise TypeError(
            "expected the optimizer's state dict as the second of the pair, with 'state' and 'param_groups'; got a "
            f"dict with {_listed(state[1])}"
        )
    return state[0], state[1]


def _check_model(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Compares the state with that of the model, and looks for what would have no value afterwards."""
    expected = model.state_dict(keep_vars=True)
    wrong = []
    if missing := [name for name in expected if name not in given]:
        wrong.append(f"it lacks {_listed(missing)}")
    if unexpected := [name for name in given if name not in expected]:
        wrong.append(f"the model has no {_listed(unexpected)}")
    wrong += [
        f"{name!r} has the shape {tuple(value.shape)}, and {tuple(expected[name].shape)} in the model"
        for name, value in given.items()
        if isinstance(value, Tensor) and isinstance(expected.get(name), Tensor) and not is_lazy(expected[name])
        if value.shape != expected[name].shape
    ]
    if wrong:
        raise ValueError(f"this state dict does not fit the {type(model).__name__}: {'; '.join(wrong)}")
    without = [name for name, value in given.items() if isinstance(value, Tensor) and value.is_meta]
    if without:
        raise ValueError(f"this state dict has no values for {_listed(without)}: they are on the meta device")
    loaded = {id(value) for value in expected.values()}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta and id(tensor) not in loaded:
            raise RuntimeError(
                f"{name!r} is on the meta device and in no state dict, so it would have no value: give it one before, "
                f"on {str(_place(model))!r}"
            )


def _place(model: nn.Module) -> torch.device:
    """Where buffers are."""
    states = states_of(model)
    return states[0].slots[0] if states else CPU


def _check_groups(optimizer: Optimizer, of_optimizer: Mapping[str, Any]) -> None:
    saved = [len(group["params"]) for group in of_optimizer["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        raise ValueError(
            f"this state is of an optimizer whose groups have {saved} parameters; the groups of this "
            f"{type(optimizer).__name__} have {present}. Make it with the same groups"
        )


def _check_state(optimizer: Optimizer, of_optimizer: Mapping[str, Any]) -> None:
    """Checks that each tensor of the state can be divided as its parameter."""
    parameters = saved_parameters(optimizer, of_optimizer)
    for key, state in of_optimizer["state"].items():
        parameter = parameters.get(key)
        if parameter is None:
            raise ValueError(f"the saved state of the {type(optimizer).__name__} has a parameter {key!r} in no group")
        for name, value in state.items():
            is_divided = isinstance(parameter, ShardedTensor) and isinstance(value, Tensor) and value.dim() > 0
            if is_divided and value.shape != parameter.shape:
                raise ValueError(
                    f"{name!r} of parameter {key!r} has the shape {tuple(value.shape)} in the saved state of the "
                    f"{type(optimizer).__name__}; the parameter has {tuple(parameter.shape)}, and its state is sharded "
                    "as it is"
                )


def _listed(names: Iterable[str]) -> str:
    """The names, of many the first few."""
    names = [*names]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
