"""`agree` compares what the ranks of a queue of rounds do next, over a `ControlChannel`: gloo, in host memory.

Backends pair collectives by their order, and gloo ends the process if two of a pair differ in size. So before an item
ranks compare a checksum of its text, and send nothing else before all checksums are equal.
"""

from __future__ import annotations

import os
import pickle
import socket
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch.futures import Future

from dataparallel.machines.errors import MachinesDiffer, PeerFailed

if TYPE_CHECKING:
    from dataparallel.machines.group import MachineGroup

_FIRST_BYTES, _LENGTH_BYTES = 1024, 8  # of the first message, and of the length at its beginning

Steps = Generator[Future[Any], None, Any]
"""An exchange between ranks. It yields each future that it needs, and the thread that runs it waits in its own way."""

Description: TypeAlias = dict[str, dict[str, str]]
"""For each entry its properties. An entry that is a single value has one property with the name ``""``."""

MOST = 20
"""How many differences a message lists."""


@contextmanager
def connecting() -> Iterator[None]:
    """Where gloo cannot connect the ranks, the error says so if other hosts cannot reach the name of this one."""
    try:
        yield
    except RuntimeError as error:
        host, address = socket.gethostname(), ""
        with suppress(OSError):
            address = socket.gethostbyname(host)
        if os.environ.get("GLOO_SOCKET_IFNAME") or (address and not address.startswith("127.")):
            raise
        raise RuntimeError(
            f"{error}. gloo offers the others the address of this host's name, and {host!r} is "
            f"{address or 'unknown'}, which no other host can reach: if the machines are several hosts, set the "
            "environment variable GLOO_SOCKET_IFNAME to the network interface that connects them, on each"
        ) from error


class ControlChannel:
    """The gloo connections of one queue. All ranks call its methods in the same order. The constructor waits for them.

    The connections belong to no process group of torch. So a group that has only NCCL has them too, they need no
    device, and they answer while a collective of the group is under way.
    """

    def __init__(self, group: MachineGroup, name: str) -> None:
        self.size = group.size
        store = distributed.distributed_c10d.PrefixStore(f"dataparallel/{name}", group.store)
        timeout = timedelta(seconds=group.timeout)
        with connecting():
            self._gloo: Any = distributed.ProcessGroupGloo(store, group.rank, group.size, timeout)

    def all_reduce_max(self, values: Tensor) -> Steps:
        """All-reduces a CPU tensor by its maximum, in place. It has one size on all ranks."""
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX
        yield self._gloo.allreduce([values], options).get_future()
        return values

    def all_gather_object(self, value: Any) -> Steps:
        """Gathers an object that can be pickled from each rank. A second message is sent if one of them is long."""
        pickled = pickle.dumps(value)
        data = len(pickled).to_bytes(_LENGTH_BYTES, "little") + pickled
        rows = yield from self._all_gather(data[:_FIRST_BYTES], _FIRST_BYTES)
        lengths = [_LENGTH_BYTES + int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        if max(lengths) > _FIRST_BYTES:
            rests = yield from self._all_gather(data[_FIRST_BYTES:], max(lengths) - _FIRST_BYTES)
            rows = [row + rest for row, rest in zip(rows, rests, strict=True)]
        return [pickle.loads(row[_LENGTH_BYTES:length]) for row, length in zip(rows, lengths, strict=True)]

    def _all_gather(self, data: bytes, size: int) -> Steps:
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        yield self._gloo.allgather([rows], [own]).get_future()
        return [row.numpy().tobytes() for row in rows]


def agree(group: MachineGroup, control: ControlChannel, kind: str, contents: str, failed: str | None) -> Steps:
    """Raises `PeerFailed` if a rank has ``failed``, and `MachinesDiffer` if ranks do different things next."""
    checksum = zlib.crc32(f"{kind}\n{contents}".encode())
    maxima = yield from control.all_reduce_max(torch.tensor([checksum, -checksum, failed is not None]))
    largest, negated_smallest, has_failed = maxima.tolist()
    if has_failed:
        yield from _raise_failures(group, control, failed)
    if largest != -negated_smallest:
        raise MachinesDiffer(_differences(group, (yield from control.all_gather_object((kind, contents)))))


def exchange_used(group: MachineGroup, control: ControlChannel, used: Sequence[bool], failed: str | None) -> Steps:
    """True for each entry of ``used`` that is true on any rank. Raises `PeerFailed` if a rank has ``failed``."""
    maxima = yield from control.all_reduce_max(torch.tensor([*used, failed is not None], dtype=torch.uint8))
    *used_anywhere, has_failed = maxima.tolist()
    if has_failed:
        yield from _raise_failures(group, control, failed)
    return [bool(entry) for entry in used_anywhere]


def error_of_failures(group: MachineGroup, failures: Sequence[str | None]) -> PeerFailed | None:
    """The error made of the failures of all ranks, ``None`` for a rank that has not failed; ``None`` if no rank has."""
    texts = [f"{group.names([rank])} failed{text}" for rank, text in enumerate(failures) if text is not None]
    if not texts:
        return None
    error = PeerFailed(
        f"{'; '.join(texts)}. What was exchanged is dropped on every rank, and the group can still be used"
    )
    error.by_all = len(texts) == len(failures)
    return error


def _raise_failures(group: MachineGroup, control: ControlChannel, failed: str | None) -> Steps:
    failures = yield from control.all_gather_object(None if failed is None else f" {failed}")
    error = error_of_failures(group, failures)
    assert error is not None
    raise error


def _differences(group: MachineGroup, items: list[tuple[str, str]]) -> str:
    """The message of `MachinesDiffer`. ``items``: for each rank the kind and the contents that it has for `agree`."""
    kinds = {kind: [rank for rank, item in enumerate(items) if item[0] == kind] for kind, _ in items}
    if len(kinds) > 1:
        parts = [f"{kind!r} begins on {group.names(ranks)}" for kind, ranks in kinds.items()]
    else:
        parts = differences([contents for _, contents in items], group.ranks)
    return (
        f"the ranks differ in what they do next ({items[0][0]!r}), so nothing has been sent: {'; '.join(parts)}. All "
        "ranks have to run the same calls on the same model"
    )


# ---- how descriptions differ -----------------------------------------------------------------------------------------


def as_text(description: Mapping[str, Any]) -> str:
    """A description as lines, one for each entry. An entry is a single value or a mapping of properties to values."""
    lines = []
    for name, value in description.items():
        if isinstance(value, Mapping):
            lines.append("\t".join([_line(name), *(_line(word) for pair in value.items() for word in pair)]))
        else:
            lines.append(f"{_line(name)}: {_line(value)}")
    return "\n".join(lines)


def differences(texts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """How the texts of all ranks differ, in entries or in their order: at most `MOST` parts of a sentence.

    `as_text` makes such texts. Any other line is an entry too: ``name: value``, or just a name.
    """
    if all(text == texts[0] for text in texts):
        return []
    descriptions = [_parse(text) for text in texts]
    names = [*dict.fromkeys(name for description in descriptions for name in description)]
    parts = [*_missing_entries(names, descriptions, ranks)]
    for name in names:
        parts += _different_properties(name, [description.get(name) for description in descriptions], ranks)
    parts = parts or _different_order(descriptions, ranks) or ["the order of properties"]
    if len(parts) > MOST:
        parts[MOST - 1 :] = [f"and {len(parts) - MOST + 1} more differences"]
    return parts


def _line(value: object) -> str:
    """The value's text on one line, without tabs."""
    return " ".join(str(value).split())


def _parse(text: str) -> Description:
    description: Description = {}
    for number, line in enumerate(text.split("\n")):
        name, *words = line.split("\t")
        if words:
            properties = dict(zip(words[::2], [*words[1::2], ""], strict=False))
        else:
            name, colon, value = name.partition(": ")
            properties = {"": value} if colon else {}
        if name in description:
            name = f"{name} (line {number})"
        description[name] = properties
    return description


def _missing_entries(names: Sequence[str], descriptions: Sequence[Description], ranks: Sequence[int]) -> list[str]:
    """Names the entries that some ranks have and others lack. Entries that the same ranks lack make one part."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        lacking = tuple(rank for rank, description in zip(ranks, descriptions, strict=True) if name not in description)
        if lacking:
            by_ranks.setdefault(lacking, []).append(name)
    parts = []
    for lacking, missing in by_ranks.items():
        having = [rank for rank in ranks if rank not in lacking]
        if len(having) < len(lacking):
            parts.append(f"only {of_ranks(having)} {_verb(having, 'have')} {_listed(missing)}")
        else:
            parts.append(f"{of_ranks(lacking)} {_verb(lacking, 'lack')} {_listed(missing)}")
    return parts


def _different_properties(name: str, entries: Sequence[Mapping[str, str] | None], ranks: Sequence[int]) -> list[str]:
    """How the properties of one entry differ among the ranks that have the entry."""
    present = [(rank, entry) for rank, entry in zip(ranks, entries, strict=True) if entry is not None]
    parts = []
    for key in dict.fromkeys(key for _, entry in present for key in entry):
        by_value: dict[str | None, list[int]] = {}
        for rank, entry in present:
            by_value.setdefault(entry.get(key), []).append(rank)
        if len(by_value) > 1:
            # Only the first value is written with the name of the property.
            named = zip([key, *[""] * len(by_value)], by_value.items(), strict=False)
            parts.append(f"{name}: {', '.join(_value_on_ranks(value, label, on) for label, (value, on) in named)}")
    return parts


def _value_on_ranks(value: str | None, key: str, ranks: Sequence[int]) -> str:
    text = "not said" if value is None else value or "''"
    return f"{key} {text} on {of_ranks(ranks)}" if key else f"{text} on {of_ranks(ranks)}"


def _different_order(descriptions: Sequence[Description], ranks: Sequence[int]) -> list[str]:
    """The first place where entries that all ranks have come in different orders."""
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
