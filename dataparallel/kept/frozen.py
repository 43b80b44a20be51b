"""Replicas that stay as they are while a ``frozen`` block is open: each set is leased to one call at a time.

A lease says when a call is over, whoever holds its replicas then. Only ``kept.replicas`` uses this room.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from dataparallel.comm.settings import are_slots_isolated
from dataparallel.streams.current import current_streams

__all__ = ["FrozenSet"]


class _Lease(list[Any]):
    """Replicas that belong to whoever has this list, until it is gone."""

    __slots__ = ("__weakref__",)


class FrozenSet:
    """Replicas that stay as they are, for one call at a time."""

    def __init__(self, network: nn.Module, slots: list[torch.device], replicas: list[Any]) -> None:
        self.replicas = replicas
        self._network, self._slots = network, slots
        # Nothing orders other streams after the copies, or before their memory is used again.
        self._streams = current_streams(slots)
        self._isolated = are_slots_isolated()
        self._leased: weakref.ref[_Lease] | None = None

    def serves(self, network: nn.Module, slots: list[torch.device]) -> bool:
        """Whether a call of ``network`` on ``slots``, on the current streams, may use it."""
        return (
            network is self._network
            and self._slots[: len(slots)] == slots
            and self._isolated == are_slots_isolated()
            and current_streams(slots).items() <= self._streams.items()
        )

    def is_part_of(self, other: FrozenSet) -> bool:
        """Whether ``other`` serves every call that this one serves."""
        return (
            self._network is other._network
            and other._slots[: len(self._slots)] == self._slots
            and self._isolated == other._isolated
            and self._streams.items() <= other._streams.items()
        )

    def is_free(self) -> bool:
        """Whether no call has it."""
        return self._leased is None or self._leased() is None

    def lease(self, count: int) -> _Lease:
        """The first ``count`` replicas. They are leased until the returned list is gone."""
        lease = _Lease(self.replicas[:count])
        self._leased = weakref.ref(lease)
        return lease
