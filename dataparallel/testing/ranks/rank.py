"""`Rank`: what the function of a test is told about where it runs. Slots, threads and processes are told alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Place = Literal["slots", "threads", "processes"]

_seeding = threading.RLock()


@dataclass(frozen=True)
class Rank:
    """One of the ranks that run the function of a test.

    Attributes:
        number: this rank, from 0 on.
        count: how many ranks there are. On slots there is one call for all of them: ``number`` is 0 and ``count`` is 1.
        device: where this rank's tensors belong.
        devices: the devices of all slots; with threads and processes a list of ``device`` alone.
        place: "slots", "threads" or "processes".
    """

    number: int
    count: int
    device: torch.device
    devices: list[torch.device]
    place: Place

    def mesh(self, shape: Sequence[int] | None = None, names: Sequence[str] | None = None) -> DeviceMesh:
        """torch's mesh of all ranks; every rank has to call this, in the same order.

        Args:
            shape: the size of each dimension; all ranks in one dimension if None.
            names: the name of each dimension.

        Raises:
            RuntimeError: on slots, which are no ranks to torch.
        """
        if self.place == "slots":
            raise RuntimeError(
                "slots are devices of one process, and a DeviceMesh is for several ranks: run the test on threads or "
                "in processes, or use rank.devices"
            )
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(
            self.device.type,
            (self.count,) if shape is None else tuple(shape),
            mesh_dim_names=None if names is None else tuple(names),
        )

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Inside, random numbers are those of ``torch.manual_seed(seed)``, also where threads share the generators.

        With threads only one rank is inside at a time. So every rank builds the same model, but nothing inside may wait
        for another rank.
        """
        with _seeding:
            torch.manual_seed(seed)
            yield
