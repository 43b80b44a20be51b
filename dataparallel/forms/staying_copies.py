"""`StayingCopies`: the tensors of a `DataParallel` whose replicas launch graphs. They stay where they are."""

from __future__ import annotations

from typing import Any

from dataparallel.forms.persistent_tensors import PersistentTensors


class StayingCopies(PersistentTensors):
    """The tensors of one wrapper. A copy of it, and an unpickled one, is empty."""

    def __reduce__(self) -> Any:
        return type(self), (self._slots, self._first_bytes, self._cap_bytes, self._broadcast_buffers)
