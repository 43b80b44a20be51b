"""What the ranks say to each other at the beginning and at the end of a round.

At the beginning each rank says what comes, as a number made of its text. Backends pair collectives by their order, and
gloo ends the process if two of a pair differ in size. So nothing of a round is sent before all ranks have said the
same. Where they differ, or one has failed, they exchange the texts, and every rank raises the same error.

At the end each rank says what it has used, and whether it has failed. ``launcher`` calls this file, from its thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from dataparallel.machines.backend import Group
from dataparallel.machines.collectives import all_gather_objects, all_reduce
from dataparallel.machines.differences import differences
from dataparallel.machines.errors import MachinesDiffer, PeerFailed
from dataparallel.machines.waiting import Check

__all__ = ["agree", "exchange_used", "in_words"]


def agree(group: Group, kind: str, contents: str, failed: str | None, check: Check) -> None:
    """Returns if all ranks begin the same round.

    Args:
        group: the machines.
        kind: of the round, a word that messages use.
        contents: what has to be equal on all ranks.
        failed: why this rank cannot take part; the other arguments do not count then.
        check: see ``waiting``.

    Raises:
        PeerFailed: a rank cannot take part.
        MachinesDiffer: ranks begin different rounds.
    """
    number = zlib.crc32(f"{kind}\n{contents}".encode())
    said = torch.tensor([number, -number, failed is not None], device=group.small_device)
    largest, smallest, has_failed = all_reduce(group, said, "max").wait(check).tolist()
    if has_failed:
        _raise_failures(group, failed, check)
    if largest != -smallest:
        raise MachinesDiffer(_differences(group, all_gather_objects(group, (kind, contents), check)))


def exchange_used(group: Group, used: Sequence[bool], failed: str | None, check: Check) -> list[bool]:
    """For each entry, whether any rank has used it. There are as many entries on every rank.

    Raises:
        PeerFailed: a rank has failed.
    """
    said = torch.tensor([*used, failed is not None], dtype=torch.uint8, device=group.small_device)
    *anywhere, has_failed = all_reduce(group, said, "max").wait(check).tolist()
    if has_failed:
        _raise_failures(group, failed, check)
    return [bool(entry) for entry in anywhere]


def in_words(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _raise_failures(group: Group, failed: str | None, check: Check) -> None:
    said = all_gather_objects(group, failed, check)
    texts = [f"{group.names([rank])} failed {text}" for rank, text in enumerate(said) if text is not None]
    error = PeerFailed(
        f"{'; '.join(texts)}. What was exchanged is dropped on every rank, and the group can still be used"
    )
    error.by_all = len(texts) == len(said)
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
