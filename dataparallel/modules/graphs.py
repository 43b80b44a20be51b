"""Modules whose forward is the code of a graph, as exported programs have it: what in it is right on one device only.

``torch.export`` and ``torch.fx`` make a graph of what a module does with an example. Where the module asks an input for
its device, the graph has the device of the example. Where the module makes a tensor of numbers, the graph may have the
tensor, in a plain attribute. Replicas on other devices need their own of both. ``modules.plan`` asks for what a graph
has, and ``modules.build`` for the code of a replica. Graphs are never changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

from dataparallel import _torch

__all__ = ["constants_of", "devices_of", "forward_on", "is_graph"]


class _Constants(NamedTuple):
    names: tuple[str, ...]
    """Names of what the graph reads from its module: parameters, buffers and constants, at any depth."""
    devices: frozenset[torch.device]
    """The devices that the graph names."""


_known: weakref.WeakKeyDictionary[Any, _Constants] = weakref.WeakKeyDictionary()
"""By the function that torch.fx has made of the graph: it makes another one where a graph is compiled anew."""

_on_devices: weakref.WeakKeyDictionary[Any, dict[tuple[torch.device, torch.device], FunctionType]]
_on_devices = weakref.WeakKeyDictionary()
"""What `forward_on` has made of such a function."""


def is_graph(module: nn.Module) -> bool:
    """True if the module's forward is the code of a graph of ``torch.fx``."""
    return isinstance(module, torch.fx.GraphModule)


def constants_of(module: Any, device: torch.device) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Tensors on ``device`` that the graph reads from plain attributes: who has it, under which name, the tensor."""
    for path in _read(module).names:
        owner, _, key = path.rpartition(".")
        try:
            holder = module.get_submodule(owner)
        except AttributeError:
            continue
        value = vars(holder).get(key)
        if isinstance(value, Tensor) and value.device == device:
            yield holder, key, value


def devices_of(module: Any) -> frozenset[torch.device]:
    """The devices that the graph names."""
    return _read(module).devices


def forward_on(forward: Any, source: torch.device, target: torch.device) -> FunctionType:
    """The code of a graph that names ``source``, for replicas on ``target``: the same function each time.

    The code names devices as ``device(...)``, and in the function that is returned that name means another function.

    Raises:
        RuntimeError: it names devices in another way.
    """
    made = _on_devices.setdefault(forward, {})
    if (source, target) not in made:
        if forward.__globals__.get("device") is not torch.device:
            raise RuntimeError(
                f"cannot replicate a graph of torch.fx to {target}: it names {source}, and in a way that this library "
                "does not know, so the replica would compute there. Wrap the module of which the graph was made"
            )

        def device(*args: Any, **kwargs: Any) -> torch.device:
            named = torch.device(*args, **kwargs)
            return target if named == source else named

        code = FunctionType(forward.__code__, {**forward.__globals__, "device": device}, forward.__name__)
        code.__defaults__, code.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
        made[source, target] = code
    return made[source, target]


def _read(module: Any) -> _Constants:
    forward: Callable[..., Any] = type(module).forward
    if forward not in _known:
        names = tuple(dict.fromkeys(str(node.target) for node in module.graph.find_nodes(op="get_attr")))
        devices: set[torch.device] = set()
        for node in module.graph.nodes:
            leaves = _torch.pytree.tree_leaves((node.args, node.kwargs))
            devices.update(leaf for leaf in leaves if isinstance(leaf, torch.device))
        _known[forward] = _Constants(names, frozenset(devices))
    return _known[forward]
