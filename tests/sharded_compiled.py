"""Ways to compile a model that is sharded, for the tests of ``fully_shard`` over compiled modules, and their training.

The models are in `sharded_models`. `sharded_steps` trains them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dataparallel.compiled import FrameCounts, counts
from dataparallel.composable import fully_shard
from sharded_steps import (
    Loop,
    Model,
    Trained,
    assert_all_sharded,
    assert_same,
    batches_of,
    on_device,
    one_backward,
    train,
)

Options = dict[str, Any]
Way = Callable[[Any, Sequence[Any], Options, Options], nn.Module]
"""Compiles and shards a model. The options are those of ``torch.compile`` and of ``fully_shard``."""


def flat(units: Sequence[Any]) -> list[nn.Module]:
    return [module for unit in units for module in (unit if isinstance(unit, list) else [unit])]


def shard(units: Sequence[Any], model: Any, slots: Sequence[Any], options: Options, **of_model: Any) -> Any:
    for unit in units:
        fully_shard(unit, devices=slots, **options)
    return fully_shard(model, devices=slots, **{**options, **of_model})


def wrap(model: nn.Module, module: nn.Module, how: Options) -> Any:
    """``torch.compile(module)``, which replaces the module in the model."""
    parents = [(parent, key) for parent in model.modules() for key, child in parent._modules.items() if child is module]
    wrapper: Any = torch.compile(module, **how)
    for parent, key in parents:
        parent._modules[key] = wrapper
    return wrapper


def units_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    for module in flat(model.units()):
        module.compile(**how)
    return shard(model.units(), model, slots, options)


def units_after(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    shard(model.units(), model, slots, options)
    for module in flat(model.units()):
        module.compile(**how)
    return model


def units_between(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    """After they were sharded, before the model is."""
    units = model.units()
    for unit in units:
        fully_shard(unit, devices=slots, **options)
    for module in flat(units):
        module.compile(**how)
    return fully_shard(model, devices=slots, **options)


def wrapped_units_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    units = [
        [wrap(model, module, how) for module in unit] if isinstance(unit, list) else wrap(model, unit, how)
        for unit in model.units()
    ]
    return shard(units, model, slots, options)


def wrapped_units_after(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    units = model.units()
    shard(units, model, slots, options)
    for module in flat(units):
        wrap(model, module, how)
    return model


def whole_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    model.compile(**how)
    return shard(model.units(), model, slots, options)


def whole_after(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    shard(model.units(), model, slots, options)
    model.compile(**how)
    return model


def whole_wrapped_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    return shard(model.units(), torch.compile(model, **how), slots, options)


def argument_of_units(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    return shard(model.units(), model, slots, {**options, "compile": how}, compile=None)


def argument_of_model(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    return shard(model.units(), model, slots, options, compile=how)


OF_UNITS: dict[str, Way] = {
    way.__name__: way
    for way in (
        units_before,
        units_after,
        units_between,
        wrapped_units_before,
        wrapped_units_after,
        argument_of_units,
    )
}
"""Ways in which each unit is compiled by itself."""

OF_THE_MODEL: dict[str, Way] = {
    way.__name__: way for way in (whole_before, whole_after, whole_wrapped_before, argument_of_model)
}
"""Ways in which the model is compiled."""

WAYS = OF_UNITS | OF_THE_MODEL


def unwrapped(trained: Trained) -> Trained:
    """With the names that parameters have without wrappers."""

    def plain(table: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("_orig_mod.", ""): value for name, value in table.items()}

    return replace(trained, gradients=[*map(plain, trained.gradients)], state=plain(trained.state))


def assert_same_compiled(
    way: str,
    model: Model,
    slots: Sequence[Any],
    backend: str,
    *,
    loop: Loop = one_backward,
    steps: int = 3,
    atol: float = 1e-9,
    how: Options | None = None,
    **options: Any,
) -> FrameCounts:
    """Asserts that a sharded model with compiled units trains as its twin does on one device.

    Nothing may run as it is because it could not be compiled. Returns what was compiled.

    Args:
        way: in `WAYS`.
        how: more options of ``torch.compile``.
        options: of ``fully_shard``.
    """
    several, one = on_device(model.build, slots[0]), on_device(model.build, slots[0])
    before = counts()
    several = WAYS[way](several, slots, {"backend": backend, **(how or {})}, options)
    assert_all_sharded(several)
    ours = train(several, batches_of(model, slots), steps=steps, loop=loop)
    assert_all_sharded(several)
    theirs = train(one, batches_of(model, slots), steps=steps, loop=loop)
    assert_same(unwrapped(ours), theirs, atol=atol)
    found = counts() - before
    assert not found.eager, f"{dict(found.eager)} frames could not be compiled"
    return found
