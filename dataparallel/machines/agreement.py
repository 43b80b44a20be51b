"""What the ranks say to each other before each item of a round, and at its end.

Before the first item each rank says what comes, as a number made of its text. Backends pair collectives by their order,
and gloo ends the process if two of a pair differ in size. So nothing of a round is sent before all ranks have said the
same. Where they differ, or one has failed, they exchange the texts, and every rank raises the same error.

At the end each rank says what it has used, and whether it has failed. ``line`` calls this file, from the launcher's
thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from dataparallel.machines.backend import Group
from dataparallel.machines.control import Control, Steps
from dataparallel.machines.differences import differences
from dataparallel.machines.errors import MachinesDiffer, PeerFailed

__all__ = ["agree", "exchange_used", "failures", "in_words"]


def agree(group: Group, control: Control, kind: str, contents: str, failed: str | None) -> Steps:
    """Returns if all ranks do the same next.

    Args:
        group: the machines.
        control: of the line.
        kind: of the round, a word that messages use.
        contents: what has to be equal on all ranks.
        failed: why this rank cannot take part; the other arguments do not count then.

    Raises:
        PeerFailed: a rank cannot take part.
        MachinesDiffer: ranks do different things.
    """
    number = zlib.crc32(f"{kind}\n{contents}".encode())
    said = yield from control.maximum(torch.tensor([number, -number, failed is not None]))
    largest, smallest, has_failed = said.tolist()
    if has_failed:
        yield from _raise_failures(group, control, failed)
    if largest != -smallest:
        raise MachinesDiffer(_differences(group, (yield from control.all((kind, contents)))))


def exchange_used(group: Group, control: Control, used: Sequence[bool], failed: str | None) -> Steps:
    """For each entry, whether any rank has used it. There are as many entries on every rank.

    Raises:
        PeerFailed: a rank has failed.
    """
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


def in_words(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _raise_failures(group: Group, control: Control, failed: str | None) -> Steps:
    said = yield from control.all(None if failed is None else f" {failed}")
    error = failures(group, said)
    assert error is not None
    raise error


def _differences(group: Group, said: list[tuple[str, str]]) -> str:
    """Which kinds of rounds the ranks begin, or where the texts of one kind differ."""
    kinds = {kind: [rank for rank, each in enumerate(said) if each[0] == kind] for kind, _ in said}
    if len(kinds) > 1:
        found = [f"{kind!r} begins on {group.names(ranks)}" for kind, ranks in kinds.items()]
    else:
        found = differences([contents for _, contents in said], group.ranks)
    return (
        f"the ranks differ in what they do next ({said[0][0]!r}), so nothing has been sent: {'; '.join(found)}. All "
        "ranks have to run the same calls on the same model"
    )
