"""Parameters that a form has replaced by others, remembered as long as somebody else holds them.

`fully_shard` replaces a module's parameters by sharded ones. Attributes of its modules that refer to the old ones are
rebound. An optimizer that was made before would change nothing that the module uses: its first step raises. A module
outside that was tied to an old parameter is not tied any more. Only weak references are kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.optimizer_steps import before_steps
from dataparallel.replicas.references import ATOMIC, Rebinding, reached

_lock = threading.Lock()
_replaced: Any = WeakIdKeyDictionary()
"""For each replaced parameter that is still there: its name, the form that has replaced it, and by what."""


def remember(parameters: Iterable[tuple[str, Tensor, Tensor]], owner: str, form: str) -> None:
    """Remembers replaced parameters: their names, themselves and the new ones. Messages name ``owner`` and ``form``."""
    before_steps(check_optimizer)
    with _lock:
        for name, parameter, new in parameters:
            _replaced[parameter] = f"{name!r} of a {owner}", form, weakref.ref(new)


def where(parameter: Tensor) -> tuple[str, str] | None:
    """Where the parameter was before it was replaced, in words, and the form that did so; ``None`` if none did."""
    found = _replaced.get(parameter) if _replaced else None
    return None if found is None else found[:2]


def rebind(modules: Iterable[nn.Module]) -> None:
    """Makes attributes of these modules that refer to replaced parameters refer to the new ones.

    Examples are lists of weights (torch's RNNs have one), partials, and closures of hooks. They would keep the memory
    of the old parameters, and compute with their values. Variables outside of the modules keep the old ones.
    """
    attributes = [
        (vars(module), key, value)
        for module in modules
        for key, value in vars(module).items()
        if key not in REGISTRIES and type(value) not in ATOMIC
    ]
    items = (item for _, _, value in attributes for item in reached(value) if issubclass(type(item), Tensor))
    rebinding = Rebinding({id(item): new for item in items if (new := _replacement_of(item)) is not None})
    for own, key, value in attributes:
        if key in HOOK_TABLES:  # the table stays: the handles of hooks refer to it
            value.update({number: rebinding.rebound(hook) for number, hook in value.items()})
        else:
            own[key] = rebinding.rebound(value)


def _replacement_of(parameter: Tensor) -> Tensor | None:
    """The parameter that has replaced this one. ``None``: it was not replaced, or the new one is gone."""
    found = _replaced.get(parameter) if _replaced else None
    new: Tensor | None = None if found is None else found[2]()
    return new


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ``RuntimeError`` if an optimizer holds a replaced parameter. Runs before each step of every optimizer."""
    if not _replaced:  # nobody holds one
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = where(parameter)
            if found is not None:
                name, form = found
                raise RuntimeError(
                    f"this {type(optimizer).__name__} holds {name} as it was before `{form}`, which replaced it by a "
                    "sharded parameter: a step would change nothing that the module uses. Make the optimizer after "
                    f"{form}, with the parameters that the module has then"
                )
