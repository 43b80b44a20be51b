"""`CopiedContainer` is a dict, list or dataclass that ``scatter`` has copied for the replicas of a call.

What ``forward`` writes into its copy would be lost: `Written` is such an entry, which ``gather`` joins and hands back.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


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
        """Writes the entry into the caller's container."""
        self.joined = value
        if isinstance(self.container, (list, deque)):
            if self.key < len(self.container):
                self.container[self.key] = value
            else:
                self.container.append(value)
        elif isinstance(self.container, (dict, UserDict)):
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
        """Returns a list with it; an empty one for a container of another kind."""
        before = [entries for copy in copies if (entries := entries_of(copy)) is not None]
        return [cls(original, copies, before)] if before else []

    def written(self) -> list[Written]:
        """Returns the entries that some replica has added or replaced. Entries that it lacks are ``None`` there.

        Entries that all replicas have removed are removed from the caller's container.
        """
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
    """Returns all entries that replicas have written into ``copied``."""
    return [written for container in copied for written in container.written()]
