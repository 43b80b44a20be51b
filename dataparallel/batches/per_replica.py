"""`PerReplica`: one value for each replica, for values that cannot be split or joined.

``scatter_gather`` makes it; that and ``structures`` take it apart. Users may make one too.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class PerReplica(list[T]):
    """A list with one entry for each replica of a call, in slot order.

    A call returns one in place of values that differ between replicas and are neither tensors nor containers: a cache
    of keys and values, a state, a string. Pass it to a later call, anywhere in the arguments, and each replica gets its
    own entry:

    .. code-block:: python

        output = model(ids, use_cache=True)
        output = model(next_ids, past_key_values=output.past_key_values, use_cache=True)

    The later call raises ``ValueError`` if it has another number of replicas than there are entries. Replicas get the
    entries themselves, no copies. Entries that are tensors or containers of tensors are moved to the replica's device.
    Tensors inside other objects stay where they are, so use the same slots in the same order.

    You may make one to give each replica its own object: ``PerReplica([State(), State()])`` for a batch that is split
    into two chunks. With one replica, or without slots, a call returns values as the module returned them, and takes a
    `PerReplica` with a single entry. In all other respects it is a list: it is equal to a list of the same entries, and
    can be pickled if they can. Slices and sums are plain lists.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"PerReplica({super().__repr__()})"
