"""How the descriptions of several ranks differ, in sentences that name what differs and where.

A description says what a rank is about to do: its parameters, its slots, its settings. Its text has a line for each
entry, so that ranks can compare a number made of it first. This file knows no process group and sends nothing:
``start`` makes the text, and ``agreement`` calls `differences` where texts differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["MOST", "as_text", "differences", "of_ranks"]

Described: TypeAlias = dict[str, dict[str, str]]
"""For each entry its properties. An entry that is one value has it under the name ``""``."""

MOST = 20
"""How many differences a message lists."""


def as_text(description: Mapping[str, Any]) -> str:
    """The description as lines. An entry is one value, or a mapping from the names of properties to values."""
    lines = []
    for name, value in description.items():
        if isinstance(value, Mapping):
            lines.append("\t".join([_line(name), *(_line(word) for pair in value.items() for word in pair)]))
        else:
            lines.append(f"{_line(name)}: {_line(value)}")
    return "\n".join(lines)


def differences(texts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """What is not the same in all texts, the order of entries included; empty if they are equal.

    Args:
        texts: one for each rank, of `as_text`. Other lines are entries too: ``name: value``, or just a name.
        ranks: the numbers of the ranks.

    Returns:
        At most `MOST` parts of a sentence. The last one says how many more there are.
    """
    if all(text == texts[0] for text in texts):
        return []
    descriptions = [_read(text) for text in texts]
    names = [*dict.fromkeys(name for description in descriptions for name in description)]
    found = [*_lacking(names, descriptions, ranks)]
    for name in names:
        found += _properties(name, [description.get(name) for description in descriptions], ranks)
    found = found or _orders(descriptions, ranks) or ["the order of properties"]
    if len(found) > MOST:
        found[MOST - 1 :] = [f"and {len(found) - MOST + 1} more differences"]
    return found


def _line(value: object) -> str:
    """The value's text, without what ends words and lines."""
    return " ".join(str(value).split())


def _read(text: str) -> Described:
    described: Described = {}
    for number, line in enumerate(text.split("\n")):
        name, *words = line.split("\t")
        if words:
            properties = dict(zip(words[::2], [*words[1::2], ""], strict=False))
        else:
            name, colon, value = name.partition(": ")
            properties = {"": value} if colon else {}
        if name in described:
            name = f"{name} (line {number})"
        described[name] = properties
    return described


def _lacking(names: Sequence[str], descriptions: Sequence[Described], ranks: Sequence[int]) -> list[str]:
    """Entries that some ranks have and others lack. Those that the same ranks lack make one part."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        lacking = tuple(rank for rank, description in zip(ranks, descriptions, strict=True) if name not in description)
        if lacking:
            by_ranks.setdefault(lacking, []).append(name)
    parts = []
    for lacking, absent in by_ranks.items():
        having = [rank for rank in ranks if rank not in lacking]
        if len(having) < len(lacking):
            parts.append(f"only {of_ranks(having)} {_verb(having, 'have')} {_listed(absent)}")
        else:
            parts.append(f"{of_ranks(lacking)} {_verb(lacking, 'lack')} {_listed(absent)}")
    return parts


def _properties(name: str, values: Sequence[Mapping[str, str] | None], ranks: Sequence[int]) -> list[str]:
    """How one entry differs among the ranks that have it."""
    there = [(rank, value) for rank, value in zip(ranks, values, strict=True) if value is not None]
    parts = []
    for key in dict.fromkeys(key for _, value in there for key in value):
        by_value: dict[str | None, list[int]] = {}
        for rank, value in there:
            by_value.setdefault(value.get(key), []).append(rank)
        if len(by_value) > 1:
            first, *others = by_value.items()
            words = [_valued(first[0], key, first[1]), *(_valued(text, "", where) for text, where in others)]
            parts.append(f"{name}: {', '.join(words)}")
    return parts


def _valued(value: str | None, key: str, ranks: Sequence[int]) -> str:
    named = "not said" if value is None else value or "''"
    return f"{key} {named} on {of_ranks(ranks)}" if key else f"{named} on {of_ranks(ranks)}"


def _orders(descriptions: Sequence[Described], ranks: Sequence[int]) -> list[str]:
    """Where entries that are on all ranks come in different orders: the first place where they do."""
    for place, names in enumerate(zip(*descriptions, strict=True)):
        by_name: dict[str, list[int]] = {}
        for rank, name in zip(ranks, names, strict=True):
            by_name.setdefault(name, []).append(rank)
        if len(by_name) > 1:
            words = ", ".join(f"{name} on {of_ranks(where)}" for name, where in by_name.items())
            return [f"the order: number {place} is {words}"]
    return []


def of_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0-5, 7 and 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    if words == [str(runs[0][0])]:
        return f"rank {words[0]}"
    *most, last = words
    return f"ranks {', '.join(most)} and {last}" if most else f"ranks {last}"


def _verb(ranks: Sequence[int], many: str) -> str:
    return many if len(ranks) > 1 else {"have": "has", "lack": "lacks"}[many]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {more} more" if more > 0 else "")
