"""`KeptBuffers`: copies of the buffers of a fully sharded tree whose replicas launch graphs. See `UnitTensors`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.comm.streams.current import current_streams
from dataparallel.forms.kept_tensors import kinds_of
from dataparallel.replicas.kept_values import CurrentValues


class KeptBuffers:
    """Copies that stay where they are, and get new values at each call. The first slot has the source's own tensors."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._slots: list[torch.device] = []

    def on_slots(self, sources: list[Tensor], slots: list[torch.device], cap_bytes: int) -> list[list[Tensor]]:
        """Returns copies for each of ``slots``, which are new if the sources, the thread or the streams are others."""
        with torch.inference_mode(False):
            if self._may_use_again(sources, slots):
                self._values.refresh()
            else:
                self._make(sources, slots, cap_bytes)
        return self._by_slot[: len(slots)]

    def _may_use_again(self, sources: Sequence[Tensor], slots: list[torch.device]) -> bool:
        return (
            self._slots[: len(slots)] == slots
            and len(sources) == len(self._sources)
            and all(map(is_, sources, self._sources))
            and kinds_of(sources) == self._kinds
            and current_streams(slots).items() <= self._streams.items()
            and threading.get_ident() == self._thread
        )

    def _make(self, sources: list[Tensor], slots: list[torch.device], cap_bytes: int) -> None:
        self._sources, self._slots = sources, slots
        self._kinds, self._streams, self._thread = kinds_of(sources), current_streams(slots), threading.get_ident()
        self._by_slot = comm.broadcast_coalesced(sources, slots, cap_bytes, own_storage=True)
        self._values = CurrentValues(sources, slots, self._by_slot)
        self._values.send_at_each_forward([*range(len(sources))], cap_bytes, True)
        self._values.note_versions()
