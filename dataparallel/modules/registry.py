"""The registry of a replica's parameters: a lookup makes the current stream wait for the parameter.

Copies of parameters may still be on their way when a replica starts (``streams.arrivals``). ``Module.__getattr__``
looks a parameter up as ``_parameters[name]``, and that lookup makes the current stream of the replica's device wait for
the parameter's bucket, once for each stream and call. To use it on another stream, make that stream current before the
lookup, or let it wait for this one after the lookup. Every other way to the values waits for all parameters of the
module. Copies and pickles of a registry are plain dicts.

Only dict's own methods, called as ``dict.values(registry)``, do not wait. ``modules.build`` and ``kept.shell`` make
registries. Tensors that a module reaches past its registry are in ``ModulePlan.read_directly``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dataparallel import _torch
from dataparallel.streams.arrivals import Expected

__all__ = ["ParameterRegistry"]

_get = dict.__getitem__
_current_stream = _torch.current_stream_at


class ParameterRegistry(dict[str, Any]):
    """The parameters of one module of a replica, by name.

    Args:
        positions: for each name the position in the plan.
        expected: what the replica waits for; all of its registries share it.
    """

    __slots__ = ("_expected", "_positions")

    def __init__(self, positions: Mapping[str, int], expected: Expected) -> None:
        super().__init__()
        self._positions, self._expected = positions, expected

    def __getitem__(self, name: str) -> Any:
        position = self._positions.get(name)
        if position is not None:
            expected = self._expected
            arrival = expected.by_position[position]
            if arrival is not None and (stream := _current_stream(expected.index)) not in arrival.waited:
                arrival.make_wait(stream)
        return _get(self, name)

    def wait(self) -> None:
        """Makes the current stream wait for all parameters of the module."""
        expected = self._expected
        for position in self._positions.values():
            arrival = expected.by_position[position]
            if arrival is not None and (stream := _current_stream(expected.index)) not in arrival.waited:
                arrival.make_wait(stream)

    def __iter__(self) -> Iterator[str]:
        # Also what makes ``dict(registry)`` and ``**registry`` look every value up: see `PyDict_Merge`.
        self.wait()
        return super().__iter__()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)


def _after_the_wait(name: str) -> Any:
    method = getattr(dict, name)

    def waiting(self: ParameterRegistry, *args: Any, **kwargs: Any) -> Any:
        self.wait()
        return method(self, *args, **kwargs)

    waiting.__name__, waiting.__doc__ = name, method.__doc__
    return waiting


for _name in (
    *("get", "items", "values", "copy", "pop", "popitem", "setdefault"),
    *("__eq__", "__ne__", "__or__", "__ror__", "__repr__"),
):
    setattr(ParameterRegistry, _name, _after_the_wait(_name))
