"""Sets of replicas that stay as they are while a ``frozen`` block is open. Each set is leased to one call at a time.

The lease ends with the call, even if somebody holds one of its replicas longer. Only ``kept.replicas`` uses this room.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from dataparallel.streams.current import current_streams

__all__ = ["FrozenSet"]


class _Lease(list[Any]):
    """Replicas of one call: other calls use them only after this list is deleted."""

    __slots__ = ("__weakref__",)


class FrozenSet:
    """A set of replicas that stay as they are, for one call at a time."""

    def __init__(self, network: nn.Module, slots: list[torch.device], replicas: list[Any]) -> None:
        self.replicas = replicas
        self._network, self._slots = network, slots
        # Nothing orders other streams after these copies were made, nor before their memory is used again.
        self._streams = current_streams(slots)
        self._leased: weakref.ref[_Lease] | None = None

    def serves(self, network: nn.Module, slots: list[torch.device]) -> bool:
        """True if a call of ``network`` on ``slots`` and on the current streams may use the set."""
        return (
            network is self._network
            and self._slots[: len(slots)] == slots
            and current_streams(slots).items() <= self._streams.items()
        )

    def is_part_of(self, other: FrozenSet) -> bool:
        """True if ``other`` serves every call that this set serves."""
        return (
            self._network is other._network
            and other._slots[: len(self._slots)] == self._slots
            and self._streams.items() <= other._streams.items()
        )

    def is_free(self) -> bool:
        """True if no call has leased it."""
        return self._leased is None or self._leased() is None

    def lease(self, count: int) -> _Lease:
        """The first ``count`` replicas. The set is leased until the returned list is deleted."""
        lease = _Lease(self.replicas[:count])
        self._leased = weakref.ref(lease)
        return lease
