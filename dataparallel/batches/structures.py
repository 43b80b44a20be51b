"""Nested structures: the types that a call looks into (containers) or splits (batches), and how they are walked.

A *container* holds other values under keys, and can be built again with other values. A *batch* holds many samples, is
not a tensor, and can be split (``PackedSequence``). Everything else is a leaf, and so is a `PerReplica`. ``scatter``
and ``gather`` move the tensors.

`CopiedContainer` is a container that ``scatter`` has copied: `Written` is an entry that ``forward`` writes there, which
``gather`` hands back.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dataparallel import _torch
from dataparallel._torch import pytree
from dataparallel.comm.kinds import alias, same_kind
from dataparallel.samples import Samples

T = TypeVar("T")


class PerReplica(list[T]):
    """A list with one entry for each replica of a call, in slot order.

    A call returns one in place of values that differ between replicas and are neither tensors nor containers: a cache
    of keys and values, a state, a string. Pass it to a later call, anywhere in the arguments, and each replica gets its
    own entry: ``model(ids, past_key_values=output.past_key_values)``.

    The later call raises ``ValueError`` if it has another number of replicas than there are entries. Replicas get the
    entries themselves, no copies. Entries that are tensors or containers of tensors are moved to the replica's device.
    Tensors inside other objects stay where they are, so use the same slots in the same order.

    You may make one to give each replica its own object: ``PerReplica([State(), State()])`` for a batch that is split
    into two chunks. With one replica, or without slots, a call returns values as the module returned them, and takes a
    `PerReplica` with a single entry. In all other respects it is a list: it is equal to a list of the same entries, and
    can be pickled if they can. Slices and sums are plain lists.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"PerReplica({super().__repr__()})"

    def __getattr__(self, name: str) -> Any:
        """Only for what a list lacks: a program reads an attribute of the value that one device returns."""
        hint = ""
        if self and not name.startswith("__"):
            kind = type(self[0]).__name__
            hint = (
                f": it has the {len(self)} values that the replicas returned, one {kind} each, as nothing says how "
                "they are joined. Return a dict or a dataclass. Or say how, in dataparallel.batch_types: "
                f"register_container({kind}, ...) for objects that hold tensors, register_batch({kind}, ...) for "
                f"batches. Or take the value of one replica: [0].{name}"
            )
        raise AttributeError(f"'PerReplica' object has no attribute {name!r}{hint}", name=name, obj=self)


class Container(NamedTuple):
    """How to walk one type: see `register_container`."""

    children: Callable[[Any], list[tuple[str, Any]]]
    rebuild: Callable[[Any, list[Any]], Any]


class Batch(NamedTuple):
    """How to split one type: see `register_batch`."""

    size: Callable[[Any], int]
    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    to: Callable[[Any, torch.device], Any]
    merge: Callable[[Sequence[Any]], Any]


_containers: dict[type, Container] = {}
_batches: dict[type, Batch] = {}


def register_container(
    cls: type,
    children: Callable[[Any], list[tuple[str, Any]]],
    rebuild: Callable[[Any, list[Any]], Any],
) -> None:
    """Makes ``cls`` and its subclasses containers: scatter and gather look inside them.

    Args:
        cls: the type.
        children: ``children(obj)`` lists pairs of a path element for error messages (``[0]``, ``["key"]``, ``.field``)
            and a value.
        rebuild: ``rebuild(obj, values)`` makes a new object like ``obj`` with ``values``, in the same order. It must
            not change ``obj``.
    """
    _containers[cls] = Container(children, rebuild)


def register_batch(
    cls: type,
    *,
    size: Callable[[Any], int],
    split: Callable[[Any, Sequence[int]], Sequence[Any]],
    merge: Callable[[Sequence[Any]], Any],
    to: Callable[[Any, torch.device], Any] | None = None,
) -> None:
    """Makes ``cls`` and its subclasses batches: scatter splits them, gather joins them.

    Args:
        cls: the type, for example a graph batch.
        size: ``size(batch)`` is the number of samples; it must be that of the tensors in the same call.
        split: ``split(batch, sizes)`` gives one batch for each size, in order.
        merge: ``merge(batches)`` joins batches that are on one device.
        to: ``to(batch, device)`` moves a batch, and records gradients if batches have them; default
            ``batch.to(device)``.
    """
    _batches[cls] = Batch(size, split, to or (lambda batch, device: batch.to(device)), merge)


def batch_of(obj: Any) -> Batch | None:
    """How to split ``obj``; ``None`` if its type is not registered as a batch."""
    return next((_batches[cls] for cls in type(obj).__mro__ if cls in _batches), None)


def container_of(obj: Any) -> Container | None:
    """How to walk ``obj``; ``None`` if it is a leaf."""
    cls = type(obj)
    if cls in PLAIN_LEAVES or issubclass(cls, (Tensor, Samples, PerReplica)) or batch_of(obj) is not None:
        return None
    for base in cls.__mro__:
        if base in _containers:
            return _containers[base]
    if cls in _BUILT_IN:
        return _BUILT_IN[cls]
    if cls in pytree.SUPPORTED_NODES:
        return _PYTREE
    if pytree.is_namedtuple_class(cls):
        return _NAMEDTUPLE
    for family, container in _FAMILIES:
        if isinstance(obj, family):
            return container
    return _DATACLASS if dataclasses.is_dataclass(obj) and not isinstance(obj, type) else None


def is_written_to(obj: Any) -> bool:
    """True if a model's forward writes to objects of this type, so that replicas cannot share them."""
    cls = type(obj)
    return cls not in PLAIN_LEAVES and any(
        f"{base.__module__}.{base.__qualname__}" in _WRITTEN_TO for base in cls.__mro__
    )


def path_of_key(key: object) -> str:
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


def _sequence_children(obj: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"[{index}]", value) for index, value in enumerate(obj)]


def _mapping_children(obj: Any) -> list[tuple[str, Any]]:
    return [(path_of_key(key), value) for key, value in obj.items()]


def _rebuild_mapping(obj: Any, values: list[Any]) -> Any:
    # A copy keeps what a subclass adds: a default factory, attributes.
    new = copy.copy(obj)
    if getattr(obj, "__dict__", None) is obj:  # a dict whose items are its attributes
        new.__dict__ = new
    for key, value in zip(obj, values, strict=True):
        new[key] = value
    if dataclasses.is_dataclass(obj):
        for item in dataclasses.fields(obj):
            if item.name in new:
                object.__setattr__(new, item.name, new[item.name])
    return new


def _rebuild_sequence(obj: Any, values: list[Any]) -> Any:
    new = copy.copy(obj)
    new.clear()
    new.extend(values)
    return new


def _rebuild_tuple(obj: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    try:
        return type(obj)(values)
    except TypeError as error:
        raise TypeError(
            f"cannot build another {type(obj).__qualname__} from its elements; "
            "register how with dataparallel.batch_types.register_container"
        ) from error


def _namedtuple_children(obj: Any) -> list[tuple[str, Any]]:
    return [(f".{name}", value) for name, value in zip(obj._fields, obj, strict=True)]


def _rebuild_namedtuple(obj: Any, values: list[Any]) -> Any:
    new = type(obj)._make(values)
    if hasattr(obj, "__dict__"):
        new.__dict__.update(obj.__dict__)
    return new


def _dataclass_children(obj: Any) -> list[tuple[str, Any]]:
    # A field without a value (init=False, never set) is left out.
    return [(f".{f.name}", getattr(obj, f.name)) for f in dataclasses.fields(obj) if hasattr(obj, f.name)]


def _rebuild_dataclass(obj: Any, values: list[Any]) -> Any:
    new = copy.copy(obj)
    for name in list(getattr(new, "__dict__", ())):
        # Values that were cached for the old fields are computed again.
        if isinstance(getattr(type(obj), name, None), functools.cached_property):
            del vars(new)[name]
    for (path, _), value in zip(_dataclass_children(obj), values, strict=True):
        # By object's setter, because that of a frozen dataclass raises.
        object.__setattr__(new, path[1:], value)
    return new


def _pytree_children(obj: Any) -> list[tuple[str, Any]]:
    node = pytree.SUPPORTED_NODES[type(obj)]
    if node.flatten_with_keys_fn is not None:
        pairs, _ = node.flatten_with_keys_fn(obj)
        return [(path_of_key(key.key) if isinstance(key, pytree.MappingKey) else str(key), x) for key, x in pairs]
    values, context = node.flatten_fn(obj)
    if isinstance(context, (list, tuple)) and len(context) == len(values):
        return [(path_of_key(key), value) for key, value in zip(context, values, strict=True)]
    return _sequence_children(values)


def _rebuild_pytree(obj: Any, values: list[Any]) -> Any:
    node = pytree.SUPPORTED_NODES[type(obj)]
    return node.unflatten_fn(values, node.flatten_fn(obj)[1])


PLAIN_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, torch.Size, str, bytes, int, float, bool, type(None)})
# By name, because other libraries define them. Two replicas that append to one cache compute garbage; on one device
# there is not even an error.
_WRITTEN_TO = frozenset({"transformers.cache_utils.Cache"})
_BUILT_IN: dict[type, Container] = {
    tuple: Container(_sequence_children, lambda obj, values: tuple(values)),
    list: Container(_sequence_children, lambda obj, values: values),
    dict: Container(_mapping_children, lambda obj, values: dict(zip(obj, values, strict=True))),
}
_NAMEDTUPLE = Container(_namedtuple_children, _rebuild_namedtuple)
_DATACLASS = Container(_dataclass_children, _rebuild_dataclass)
_PYTREE = Container(_pytree_children, _rebuild_pytree)
_FAMILIES: tuple[tuple[Any, Container], ...] = (
    ((dict, UserDict), Container(_mapping_children, _rebuild_mapping)),
    ((list, deque), Container(_sequence_children, _rebuild_sequence)),
    (tuple, Container(_sequence_children, _rebuild_tuple)),
)


def _split_packed(packed: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    return [
        pack_padded_sequence(part, part_lengths, True, enforce_sorted=packed.sorted_indices is None)
        for part, part_lengths in zip(padded.split(list(sizes)), lengths.split(list(sizes)), strict=True)
    ]


def _merge_packed(parts: Sequence[PackedSequence]) -> PackedSequence:
    padded, lengths = zip(*(pad_packed_sequence(part, batch_first=True) for part in parts), strict=True)
    longest = max(part.shape[1] for part in padded)
    even = [torch.nn.functional.pad(part, [0, 0] * (part.dim() - 2) + [0, longest - part.shape[1]]) for part in padded]
    all_lengths = torch.cat(lengths)
    in_order = all(part.sorted_indices is None for part in parts) and bool((all_lengths.diff() <= 0).all())
    return pack_padded_sequence(torch.cat(even), all_lengths, True, enforce_sorted=in_order)


register_batch(PackedSequence, size=lambda packed: int(packed.batch_sizes[0]), split=_split_packed, merge=_merge_packed)


# ---- walks -----------------------------------------------------------------------------------------------------------

_WHOLE = "_dataparallel_whole"


@_torch.not_traced
def whole(tensor: Tensor) -> Tensor:
    """Marks a tensor (a mask, a table), so that every replica gets the whole tensor instead of a chunk.

    Returns another tensor on the same memory and in the same graph. A sparse tensor that needs gradients is copied. The
    argument itself is not marked. Results of operators are not marked, so mark last:
    ``model(x, mask=dataparallel.whole(mask))``. A module that is not wrapped ignores the mark.

    Raises:
        TypeError: ``tensor`` is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"whole() marks a tensor; got {type(tensor).__name__}: mark each tensor in it. All other values are handed "
            "on whole anyway"
        )
    marked = alias(tensor, 0)
    if (tensor.requires_grad and torch.is_grad_enabled()) or _torch.is_in_dual_level():
        has_views = tensor.layout in (torch.strided, torch.jagged)  # a sparse tensor has no views
        marked = same_kind(Tensor.view_as(tensor, tensor) if has_views else Tensor.clone(tensor), tensor)
    mark_whole(marked)
    return marked


def is_whole(tensor: Tensor) -> bool:
    """True if every replica gets the whole tensor: it is marked, or has no dimension to split."""
    return tensor.dim() == 0 or hasattr(tensor, _WHOLE)


def mark_whole(tensor: Tensor) -> None:
    setattr(tensor, _WHOLE, True)


class Arguments(tuple[Any, ...]):
    """Positional and keyword arguments of one call, walked together so that their batch sizes are compared."""

    __slots__ = ()


def children_of(obj: Any, path: str) -> list[tuple[str, Any]] | None:
    """Returns the paths and values of a container's children; ``None`` for a leaf."""
    if type(obj) is Arguments:
        args, kwargs = obj
        return [("args", args), ("kwargs", kwargs)]
    container = container_of(obj)
    return None if container is None else [(path + key, value) for key, value in container.children(obj)]


def leaves(obj: Any, path: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields path and value of each leaf (all that is no container), in order. ``above``: ids of containers around."""
    children = children_of(obj, path)
    if children is None:
        yield path, obj
        return
    if id(obj) in above:
        raise ValueError(f"{path} contains itself; a structure to scatter or gather must be a tree")
    for child_path, child in children:
        yield from leaves(child, child_path, (*above, id(obj)))


def with_leaves(obj: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of the structure with ``change(leaf)`` in place of each leaf, or ``obj`` if no leaf changes."""
    container = container_of(obj)
    if container is None:
        return change(obj)
    old = [value for _, value in container.children(obj)]
    new = [with_leaves(value, change) for value in old]
    return obj if all(map(is_, new, old)) else container.rebuild(obj, new)


def tensors_in(obj: Any) -> Iterator[Tensor]:
    """Yields the tensors of a nested structure, in order. Of the batch types it looks only into `Samples`."""
    for _, leaf in leaves(obj, ""):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Samples):
            yield from tensors_in(list(leaf))


def number_of_replicas(
    paths_and_leaves: Sequence[tuple[str, Any]], batch_size: int | None, chunk_sizes: Sequence[int] | None, slots: int
) -> int:
    """Returns how many replicas get arguments with the given `leaves`. Without a batch ``chunk_sizes`` is ``None``."""
    expected: tuple[str, int] | None = None  # the reason for the number, and the number
    if chunk_sizes is not None:
        expected = f"a batch of {batch_size} on {slots} slots is for {len(chunk_sizes)}", len(chunk_sizes)
    for path, leaf in paths_and_leaves:
        if not isinstance(leaf, PerReplica):
            continue
        if not leaf:
            raise ValueError(f"{path} is an empty PerReplica; it needs one entry for each replica")
        if expected is None and len(leaf) > slots:
            expected = "there is only 1 slot" if slots == 1 else f"there are only {slots} slots", slots
        if expected is not None and len(leaf) != expected[1]:
            raise ValueError(
                f"{path} has entries for {len(leaf)} replicas, but {expected[0]}; pass a PerReplica to calls with as "
                "many replicas as the one that returned it"
            )
        expected = f"{path} has entries for {len(leaf)}", len(leaf)
    replicas = slots if expected is None else expected[1]
    for path, leaf in paths_and_leaves:
        if replicas > 1 and is_written_to(leaf):
            raise ValueError(
                f"{path} is one {type(leaf).__name__}, to which {replicas} replicas would write at the same time; let "
                "each have its own: pass what an earlier call returned in its place, a dataparallel.PerReplica, or "
                "make one with an entry for each replica. In `generate` of a module that is replicated, call "
                "register_forward_method(model, 'generate') first"
            )
    return replicas


def number_of_samples(obj: Any, dim: int) -> int:
    """Returns the batch size of the first tensor or batch in a structure; 1 if there is none."""
    for _, leaf in leaves(obj, ""):
        if isinstance(leaf, Tensor):
            if not is_whole(leaf):
                return leaf.shape[dim]
        elif isinstance(leaf, Samples):
            return len(leaf)
        elif (batch := batch_of(leaf)) is not None:
            return batch.size(leaf)
    return 1


def arguments_of_one(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call without slots, with each `PerReplica` replaced by its only entry."""
    # The compiler cannot trace the walk, so a `PerReplica` stays in the arguments.
    if torch.compiler.is_dynamo_compiling():
        return inputs, kwargs
    try:
        found = [*leaves(Arguments((inputs, kwargs)), "")]
    except ValueError:  # a structure contains itself, which nobody has to split here
        return inputs, kwargs
    if not any(isinstance(leaf, PerReplica) for _, leaf in found):
        return inputs, kwargs
    number_of_replicas(found, None, None, 1)  # raises the error
    return with_leaves(inputs, _first_entry), with_leaves(kwargs, _first_entry)


def _first_entry(leaf: Any) -> Any:
    return leaf[0] if isinstance(leaf, PerReplica) else leaf


def entries_of(container: Any) -> dict[Any, Any] | None:
    """Returns what code can write into a container, by key, position or field; ``None`` if it is of another kind."""
    if isinstance(container, (dict, UserDict)):
        return dict(container.items())
    if isinstance(container, (list, deque)):
        return dict(enumerate(container))
    if dataclasses.is_dataclass(container):
        names = (field.name for field in dataclasses.fields(container))
        return {name: getattr(container, name) for name in names if hasattr(container, name)}
    return None


@dataclass(eq=False)
class Written:
    """An entry that replicas have written: its value in each of them, and ``joined``, which the caller gets."""

    container: Any
    key: Any
    values: list[Any]
    joined: Any = None

    def hand_back(self, value: Any) -> None:
        self.joined = value
        if isinstance(self.container, (list, deque)) and self.key >= len(self.container):
            self.container.append(value)
        elif isinstance(self.container, (list, deque, dict, UserDict)):
            self.container[self.key] = value
        else:
            object.__setattr__(self.container, self.key, value)  # as `_rebuild_dataclass` does


class CopiedContainer(NamedTuple):
    """A container among the arguments, its copies for the replicas, and what was in them before."""

    original: Any
    copies: list[Any]
    before: list[dict[Any, Any]]

    @classmethod
    def noted(cls, original: Any, copies: list[Any]) -> list[CopiedContainer]:
        before = [entries for copy in copies if (entries := entries_of(copy)) is not None]
        return [cls(original, copies, before)] if before else []

    def written(self) -> list[Written]:
        """Returns the entries that some replica has added or replaced. What all have removed is removed here too."""
        after = [entries_of(copy) or {} for copy in self.copies]
        keys = {
            key: None
            for before, entries in zip(self.before, after, strict=True)
            for key, value in entries.items()
            if key not in before or before[key] is not value
        }
        for key in reversed([key for key in self.before[0] if not any(key in entries for entries in after)]):
            if isinstance(self.original, (list, deque, dict, UserDict)):
                del self.original[key]
        return [Written(self.original, key, [entries.get(key) for entries in after]) for key in keys]


def written_into(copied: Iterable[CopiedContainer]) -> list[Written]:
    return [written for container in copied for written in container.written()]
