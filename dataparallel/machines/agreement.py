"""What the ranks of a queue of rounds say to each other: small values over gloo, in host memory.

Before the first item of a round each rank says what comes, as a number made of its text. Backends pair collectives by
their order, and gloo ends the process if two of a pair differ in size: so nothing is sent before all say the same.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch.futures import Future

from dataparallel.machines.errors import MachinesDiffer, PeerFailed

if TYPE_CHECKING:
    from dataparallel.machines.group import Group

_SHORT, _OF_LENGTH = 1024, 8  # bytes of the first message, and of the length in it

Steps = Generator[Future[Any], None, Any]
"""Waits for each future that it yields, and returns a result. The thread that drives it decides how it waits."""

Described: TypeAlias = dict[str, dict[str, str]]
"""For each entry its properties. An entry that is one value has it under the name ``""``."""

MOST = 20
"""How many differences a message lists."""


class Control:
    """The connections of one queue, which nothing else uses. All ranks make the same calls in the same order.

    They are no process group of torch. So they exist for a group that has only NCCL, need no device, and answer while a
    collective of the group is under way. Making them blocks until all ranks have come.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.size = group.size
        store = distributed.distributed_c10d.PrefixStore(f"dataparallel/{name}", group.store)
        timeout = timedelta(seconds=group.timeout)
        self._gloo: Any = distributed.ProcessGroupGloo(store, group.rank, group.size, timeout)

    def maximum(self, values: Tensor) -> Steps:
        """The largest values that any rank has, in place; on the CPU, of one size on all ranks."""
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX
        yield self._gloo.allreduce([values], options).get_future()
        return values

    def all(self, value: Any) -> Steps:
        """What each rank gives, in their order; anything that can be pickled. One message, if it is short on all."""
        data = pickle.dumps(value)
        first = len(data).to_bytes(_OF_LENGTH, "little") + data
        rows = yield from self._rows(first[:_SHORT], _SHORT)
        lengths = [_OF_LENGTH + int.from_bytes(row[:_OF_LENGTH], "little") for row in rows]
        if max(lengths) > _SHORT:
            rest = yield from self._rows(first[_SHORT:], max(lengths) - _SHORT)
            rows = [row + more for row, more in zip(rows, rest, strict=True)]
        return [pickle.loads(row[_OF_LENGTH:length]) for row, length in zip(rows, lengths, strict=True)]

    def _rows(self, data: bytes, size: int) -> Steps:
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        yield self._gloo.allgather([rows], [own]).get_future()
        return [row.numpy().tobytes() for row in rows]


def agree(group: Group, control: Control, kind: str, contents: str, failed: str | None) -> Steps:
    """Returns if all ranks do the same next, else raises `MachinesDiffer`, or `PeerFailed` if a rank has ``failed``."""
    number = zlib.crc32(f"{kind}\n{contents}".encode())
    said = yield from control.maximum(torch.tensor([number, -number, failed is not None]))
    largest, smallest, has_failed = said.tolist()
    if has_failed:
        yield from _raise_failures(group, control, failed)
    if largest != -smallest:
        raise MachinesDiffer(_differences(group, (yield from control.all((kind, contents)))))


def exchange_used(group: Group, control: Control, used: Sequence[bool], failed: str | None) -> Steps:
    """For each entry, whether any rank has used it. Raises `PeerFailed` if a rank has ``failed``."""
    said = yield from control.maximum(torch.tensor([*used, failed is not None], dtype=torch.uint8))
    *anywhere, has_failed = said.tolist()
    if has_failed:
        yield from _raise_failures(group, control, failed)
    return [bool(entry) for entry in anywhere]


def failures(group: Group, said: Sequence[str | None]) -> PeerFailed | None:
    """The error for what each rank has said about a failure of its own; ``None`` if none has failed."""
    texts = [f"{group.names([rank])} failed{text}" for rank, text in enumerate(said) if text is not None]
    if not texts:
        return None
    error = PeerFailed(
        f"{'; '.join(texts)}. What was exchanged is dropped on every rank, and the group can still be used"
    )
    error.by_all = len(texts) == len(said)
    return error


def _raise_failures(group: Group, control: Control, failed: str | None) -> Steps:
    said = yield from control.all(None if failed is None else f" {failed}")
    error = failures(group, said)
    assert error is not None
    raise error


def _differences(group: Group, said: list[tuple[str, str]]) -> str:
    kinds = {kind: [rank for rank, each in enumerate(said) if each[0] == kind] for kind, _ in said}
    if len(kinds) > 1:
        found = [f"{kind!r} begins on {group.names(ranks)}" for kind, ranks in kinds.items()]
    else:
        found = differences([contents for _, contents in said], group.ranks)
    return (
        f"the ranks differ in what they do next ({said[0][0]!r}), so nothing has been sent: {'; '.join(found)}. All "
        "ranks have to run the same calls on the same model"
    )


# ---- how descriptions differ -----------------------------------------------------------------------------------------


def as_text(description: Mapping[str, Any]) -> str:
    """A description as lines, one for each entry: one value, or a mapping from the names of properties to values."""
    lines = []
    for name, value in description.items():
        if isinstance(value, Mapping):
            lines.append("\t".join([_line(name), *(_line(word) for pair in value.items() for word in pair)]))
        else:
            lines.append(f"{_line(name)}: {_line(value)}")
    return "\n".join(lines)


def differences(texts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """What is not the same in all texts, the order of entries included: at most `MOST` parts of a sentence.

    The texts are those of `as_text`, one for each rank. Other lines are entries too: ``name: value``, or just a name.
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
