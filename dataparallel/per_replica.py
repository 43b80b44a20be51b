"""`PerReplica`: one value for each replica, for values that cannot be split or joined.

``scatter_gather`` makes it and takes it apart; this room only says what it is.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["PerReplica"]

T = TypeVar("T")


class PerReplica(list[T]):
    """A list with one entry for each replica of a call, in slot order.

    It is what a call returns where its replicas returned values that are neither tensors nor containers and differ: a
    cache of keys and values, a state, a string. Passed to a later call, at any place of its arguments, it gives each
    replica its own entry:

    .. code-block:: python

        output = model(ids, use_cache=True)
        output = model(next_ids, past_key_values=output.past_key_values, use_cache=True)

    The later call must have as many replicas as there are entries, or it raises ``ValueError``. Replicas get the
    entries themselves, no copies. Tensors and containers of tensors that you put in yourself are moved to the replica's
    device; whatever else holds tensors keeps them where they are, so use the same slots in the same order.

    You may make one, to give each replica an object of its own: ``PerReplica([State(), State()])`` for a batch that is
    split into two chunks. With one replica, or without slots, values come back as the module returned them and no
    `PerReplica` is made; one with a single entry is taken there too. In all other respects it is a list: it is equal to
    a list of the same entries and can be pickled if they can; slices and sums are plain lists.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"PerReplica({super().__repr__()})"
