"""`FixedMemory` gives the full parameters of a unit the same addresses each time: captured graphs read them there.

A unit is full for a short time only, so units of one size take turns in one region of memory. Units that are full at
the same time have regions of their own. `FixedAddresses` is what a capture knows of this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dataparallel import _torch

if TYPE_CHECKING:
    from dataparallel.sharded.units.slot_unit import SlotUnit


class Region:
    """Memory for units of one size on one slot, in a pool of its own: what is freed there is what comes next.

    Attributes:
        sizes: of the memory for each dtype, in bytes.
        holder: the unit that has its parameters there.
    """

    def __init__(self, device: torch.device, sizes: list[int]) -> None:
        self.sizes, self._device = sizes, device
        self.holder: SlotUnit | None = None
        with torch.cuda.device(device):
            self._pool: Any = torch.cuda.MemPool()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Inside the block the allocations of this thread come from the region."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield


class FixedMemory:
    """The regions of one slot. Any thread may use it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._regions: list[Region] = []

    @contextmanager
    def lent_to(self, unit: SlotUnit) -> Iterator[None]:
        """Inside the block the unit allocates its parameters. It is the holder of a region until it frees them.

        The region is that of the last time, unless another unit is there. Then it is another one, for the next times
        too, unless a capture reads the first one.
        """
        with self._lock:
            region = unit.home
            if region is None or region.holder is not None:
                region = self._free_region(unit.sizes)
            region.holder, unit.region = unit, region
            if unit.home is None or not unit.is_captured:
                unit.home = region
        with region.allocating():
            yield

    def _free_region(self, sizes: list[int]) -> Region:
        for region in self._regions:
            if region.holder is None and region.sizes == sizes:
                return region
        self._regions.append(Region(self._device, sizes))
        return self._regions[-1]


class FixedAddresses:
    """The addresses of a unit's full parameters when a graph was captured. From then on its region is the unit's home.

    Attributes:
        tensors: the parameters.
    """

    def __init__(self, unit: SlotUnit) -> None:
        assert unit.region is not None  # units of a tree with graphs have one while they are full
        self.tensors = unit.parameters
        self._unit, self._region = unit, unit.region
        self._addresses = self._current()
        self._stream = _torch.current_stream_at(unit.device.index)
        unit.home, unit.is_captured = unit.region, True

    def _current(self) -> list[int]:
        return [flat.data_ptr() for flat in self._unit.flats]

    def are_valid(self) -> bool:
        """True if the parameters come there again. Memory belongs to a stream: on another one it is other memory."""
        is_same_stream = _torch.current_stream_at(self._unit.device.index) == self._stream
        return is_same_stream and self._unit.home is self._region

    def are_current(self) -> bool:
        """True if the parameters are there now."""
        return self._current() == self._addresses

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside the block the parameters are there: a backward reads them where its forward did.

        They may be elsewhere, because another unit is there. What it has there is put back at the end. All of this is
        launched on the current stream, which is the one that computes with both units.

        Raises:
            RuntimeError: a forward uses the other unit just now.
        """
        if not self._unit.is_full or self.are_current():
            yield
            return
        with ExitStack() as stack, torch.no_grad():
            holder = self._region.holder
            while holder is not None:
                stack.enter_context(holder.not_running())
                if self._region.holder is holder:
                    break
                holder = self._region.holder  # another thread has freed it meanwhile
            if holder is None:
                with self._region.allocating():
                    memory = [torch.empty_like(flat) for flat in self._unit.flats]
            else:
                memory = holder.flats
                for flat in memory:
                    stack.callback(flat.copy_, flat.clone())
            if [flat.data_ptr() for flat in memory] != self._addresses:
                raise RuntimeError(
                    f"the parameters of the unit {self._unit.unit.name!r} have left the memory in which a captured "
                    "backward reads them. Run forward and backward on one stream, or leave graphs=True out"
                )
            for target, flat in zip(memory, self._unit.flats, strict=True):
                target.copy_(flat)
            yield
