"""`leaves` and `with_leaves` walk nested arguments, `whole` marks tensors, `number_of_replicas` counts replicas.

``batch_types`` says which types are containers. ``scatter`` and ``gather`` move the tensors. `CopiedContainer` is one
that ``scatter`` has copied: `Written` is an entry that ``forward`` writes there, which ``gather`` hands back.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.batches.batch_types import PerReplica, batch_of, container_of, is_written_to
from dataparallel.comm.kinds import alias, same_kind
from dataparallel.samples import Samples

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
            f"whole() marks a tensor; got {type(tensor).__name__}: everything else is handed on whole anyway"
        )
    marked = alias(tensor, 0)
    if tensor.requires_grad and torch.is_grad_enabled():
        has_views = tensor.layout in (torch.strided, torch.jagged)  # a sparse tensor has no views
        marked = same_kind(Tensor.view_as(tensor, tensor) if has_views else Tensor.clone(tensor), tensor)
    mark_whole(marked)
    return marked


def is_whole(tensor: Tensor) -> bool:
    """True if every replica gets the whole tensor: it is marked, or has no dimension to split."""
    return tensor.dim() == 0 or hasattr(tensor, _WHOLE)


def mark_whole(tensor: Tensor) -> None:
    setattr(tensor, _WHOLE, True)


class ByReference:
    """An object, or an empty container, that all replicas get as it is: torch's rule for what it does not split."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Arguments(tuple[Any, ...]):
    """Positional and keyword arguments of one call, walked together so that their batch sizes are compared."""

    __slots__ = ()


def children_of(obj: Any, path: str) -> list[tuple[str, Any]] | None:
    """Returns the paths and values of a container's children; ``None`` for a leaf."""
    if type(obj) is Arguments:
        args, kwargs = obj
        return [("args", args), ("kwargs", kwargs)]
    if isinstance(obj, (Tensor, Samples)) or batch_of(obj) is not None:
        return None
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
    container = None if isinstance(obj, (Tensor, Samples)) or batch_of(obj) is not None else container_of(obj)
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
    arguments = Arguments((inputs, kwargs))
    if not _has_per_replica(arguments, ()):
        return inputs, kwargs
    number_of_replicas([*leaves(arguments, "")], None, None, 1)  # raises the error
    return with_leaves(inputs, _first_entry), with_leaves(kwargs, _first_entry)


def _first_entry(leaf: Any) -> Any:
    return leaf[0] if isinstance(leaf, PerReplica) else leaf


def _has_per_replica(obj: Any, above: tuple[int, ...]) -> bool:
    """True if the structure contains a `PerReplica`. Without slots a structure may contain itself, so this may too."""
    if isinstance(obj, PerReplica):
        return True
    children = None if id(obj) in above else children_of(obj, "")
    return children is not None and any(_has_per_replica(child, (*above, id(obj))) for _, child in children)


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
            object.__setattr__(self.container, self.key, value)  # as `batch_types` builds dataclasses


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
