"""`units_of` chooses the units of a model from its tree: ``fully_shard(model, units="auto")``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from torch import nn

from dataparallel.forms.managed import has_forward

_UNITS = 16
"""About as many units share the bytes of a model: enough that gathers and sums overlap with computation."""

_LEAST_BYTES = 2**20
"""A smaller unit costs the host more time than it saves the devices."""


def units_of(model: nn.Module) -> list[list[nn.Module]]:
    """Returns the modules of each unit, in the order of the model's tree. What is in none stays with the model.

    A block is an element of a ``Sequential`` or ``ModuleList``. If blocks of one class repeat in a large element, they
    are the blocks instead. Neighbours in a list share a unit until they have a sixteenth of the model's bytes, and at
    least 1 MiB. A block is left out if it shares a parameter with a module outside of it, or if its unit is smaller.
    """
    least = max(_bytes(model) // _UNITS, _LEAST_BYTES)
    places = _places(model)
    units: list[list[nn.Module]] = []
    seen: set[nn.Module] = set()  # a block may be in two lists
    for siblings in _lists_of_blocks(model, 2 * least):
        units.append([])
        for block in siblings:
            if block in seen or _shares_parameters(block, places):
                continue
            seen.add(block)
            if units[-1] and sum(map(_bytes, units[-1])) >= least:
                units.append([])
            units[-1].append(block)
    return [unit for unit in units if sum(map(_bytes, unit)) >= _LEAST_BYTES]


def _lists_of_blocks(module: nn.Module, most: int) -> Iterator[list[nn.Module]]:
    """Yields the blocks of each list, which have a ``forward``. One above ``most`` bytes has no blocks that repeat."""
    siblings: list[nn.Module] = []
    for child in module.children():
        if not has_forward(child) or (_bytes(child) > most and _repeats(child)):
            if siblings:
                yield siblings
                siblings = []
            yield from _lists_of_blocks(child, most)
        elif _is_list(module) and _bytes(child):
            siblings.append(child)
    if siblings:
        yield siblings


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList))


def _repeats(module: nn.Module) -> bool:
    lists = [below for below in module.modules() if _is_list(below)]
    return any(type(one) is type(other) and _bytes(one) for below in lists for one, other in pairwise(below.children()))


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _shares_parameters(module: nn.Module, places: Counter[int]) -> bool:
    """True if a parameter of the module has more ``places`` than below it."""
    return any(places[key] != count for key, count in _places(module).items())


def _places(module: nn.Module) -> Counter[int]:
    registered = (parameter for below in module.modules() for parameter in below._parameters.values())
    return Counter(id(parameter) for parameter in registered if parameter is not None)
