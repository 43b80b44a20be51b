"""`same_kind` gives a copy of a tensor's data what else the tensor is: its class, and its Python attributes.

Operators are called as functions of torch, ``Tensor.to(tensor, ...)``: a subclass may have methods of these names that
need attributes, which a chunk or a copy gets only afterwards. ``__torch_function__`` of the subclass still applies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.comm.buckets import PLAIN_TYPES

Send: TypeAlias = "Callable[[Tensor, torch.device], Tensor]"
"""Makes a copy of a tensor's data on a device."""

_data_of: Callable[[Tensor], Tensor] = Tensor.data.__get__  # type: ignore[attr-defined]


def send_by_torch(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of the tensor's data on ``device``, made by torch."""
    return Tensor.to(tensor, device, copy=True)


def same_kind(new: Tensor, original: Tensor, send: Send = send_by_torch) -> Tensor:
    """Gives ``new``, a copy of the data of ``original``, the class and the Python attributes of ``original``.

    What the copy has of its own stays, such as the tensors that a wrapper consists of. ``send`` copies tensors in
    attributes, see `give_attributes`.
    """
    if type(new) is type(original) and not original.__dict__:
        return new
    return _Attributes(original.device, new.device, send).same_kind(new, original)


def give_attributes(new: Tensor, original: Tensor) -> bool:
    """Gives ``new``, a copy of ``original``, the Python attributes that ``original`` has now.

    If ``new`` is on another device, it gets copies of the tensors that are beside ``original``: in the attributes, in
    containers that torch knows, and in attributes of objects with a method ``to``, such as the state of a quantised
    weight. A tensor that needs gradients stays where it is, because a copy would cut its graph.

    Returns:
        True if there are such copies.
    """
    return _Attributes(original.device, new.device, send_by_torch).give(new, original, inner_tensors(original))


def attributes_with_tensors(tensor: Tensor) -> list[str]:
    """The names of the attributes in which tensors follow a copy of ``tensor``; see `give_attributes`."""
    attributes = _Attributes(tensor.device, torch.device("meta"), lambda each, _: each)
    inner = inner_tensors(tensor)
    return [name for name, each in vars(tensor).items() if name not in inner and attributes.moved(each) is not each]


def alias(tensor: Tensor, slot: int) -> Tensor:
    """A new tensor object on the same memory, without a graph, with the same class and Python attributes.

    On slot 0 it shares the version counter of ``tensor``, so that autograd notices if the source changes before
    backward. On other slots it has a version counter of its own: otherwise autograd would take an in-place change by
    one replica for a change of all of them.
    """
    return same_kind(_data_of(tensor) if slot else Tensor.detach(tensor), tensor)


def is_wrapper(tensor: Tensor) -> bool:
    """True for a tensor that consists of other tensors, and says of which."""
    return type(tensor) not in PLAIN_TYPES and hasattr(tensor, "__tensor_flatten__")


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that a wrapper consists of, by name. Other tensors have none."""
    if not is_wrapper(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copies the values of ``source`` into ``target``, its copy. Few classes of wrappers have a rule for ``copy_``."""
    inner = inner_tensors(source)
    if not inner:
        target.copy_(source)
    for name, values in inner.items():
        copy_values(getattr(target, name), values)


class _Attributes:
    """Attributes for copies on another device. What two attributes share, the copies share too."""

    def __init__(self, source: torch.device, target: torch.device, send: Send) -> None:
        self._source, self._target, self._send = source, target, send
        # By the id of an object: the object, so that its id stays taken, and what stands for it on the target.
        self._done: dict[int, tuple[Any, Any]] = {}

    def same_kind(self, new: Tensor, original: Tensor) -> Tensor:
        cls = type(original)
        if type(new) is not cls and cls not in PLAIN_TYPES:
            if is_wrapper(original):
                raise TypeError(
                    f"a {cls.__name__} consists of other tensors, and its class made a {type(new).__name__} of it when "
                    "it was copied. To be on several devices it needs rules for aten.detach, aten.clone and "
                    f"aten._to_copy that return a {cls.__name__}"
                )
            if type(new) is Tensor:
                new = new.as_subclass(cls)
        if original.__dict__:
            # The class may have handed on the very same object.
            own = [name for name, each in vars(new).items() if each is not vars(original).get(name)]
            self.give(new, original, own)
        return new

    def give(self, new: Tensor, original: Tensor, left_out: Collection[str]) -> bool:
        self._done[id(original)] = original, new
        given = {name: self.moved(each) for name, each in vars(original).items() if name not in left_out}
        vars(new).update(given)
        return any(each is not vars(original)[name] for name, each in given.items())

    def moved(self, value: Any) -> Any:
        """``value`` with copies of the tensors in it, or ``value`` itself if there are none to copy."""
        if self._source == self._target:
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if isinstance(value, Tensor):
            if value.device != self._source or value.requires_grad:
                return value
            new = self.same_kind(self._send(Tensor.detach(value), self._target), value)
            self._done[id(value)] = value, new
            return new
        if isinstance(value, (list, tuple, dict)):
            leaves, spec = _torch.pytree.tree_flatten(value)
            moved = [leaf if leaf is value else self.moved(leaf) for leaf in leaves]
            return value if all(map(is_, moved, leaves)) else _torch.pytree.tree_unflatten(moved, spec)
        if not hasattr(value, "to") or not hasattr(value, "__dict__") or isinstance(value, (nn.Module, type)):
            return value
        self._done[id(value)] = value, value  # an attribute may lead back to it
        changed = {name: new for name, each in vars(value).items() if (new := self.moved(each)) is not each}
        if changed:
            self._done[id(value)] = value, copy.copy(value)
            vars(self._done[id(value)][1]).update(changed)
        return self._done[id(value)][1]
