"""Plain copies that stand in for the copies of ``torch.nn.parallel`` on devices that are not CUDA's.

Scatter, replicate and gather of ``torch.nn.parallel`` call three primitives of ``torch._C``. Builds for the CPU do not
have them, and builds for CUDA refuse to run them on other devices. `StandIns` puts plain copies in their place while a
context is open. The stand-ins do what the primitives do: one flat copy for each chunk of tensors and device, the first
slot gets the tensors themselves, and no two tensors share a version counter. They count the seconds spent in them, so
that a comparison can be made without these seconds. On CUDA devices nothing is replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from pairs import Call


class StandIns:
    """The stand-ins for devices of one type, and the seconds that they have taken.

    The seconds of all threads are added up. ``torch.nn.parallel`` calls one stand-in at a time.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._seconds = 0.0
        self._lock = threading.Lock()

    @property
    def needed(self) -> bool:
        """Whether torch has no primitives for these devices."""
        return self.device_type != "cuda"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts them into ``torch._C``, for the whole process, and takes them out at the end."""
        if not self.needed:
            yield
            return
        names = {
            "_broadcast_coalesced": self._broadcast_coalesced,
            "_scatter": self._scatter,
            "_gather": self._gather,
        }
        before = {name: getattr(torch._C, name) for name in names if hasattr(torch._C, name)}
        try:
            for name, function in names.items():
                setattr(torch._C, name, self._counted(function))
            yield
        finally:
            for name in names:
                if name in before:
                    setattr(torch._C, name, before[name])
                elif hasattr(torch._C, name):
                    delattr(torch._C, name)

    def count(self, call: Call) -> tuple[Call, list[float]]:
        """``call`` with a list that gets, for each time it is called, the seconds spent in the stand-ins."""
        seconds: list[float] = []

        def counted() -> None:
            self.take_seconds()
            call()
            seconds.append(self.take_seconds())

        return counted, seconds

    def take_seconds(self) -> float:
        """The seconds spent in the stand-ins since this was called last."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds = time.perf_counter() - start
                with self._lock:
                    self._seconds += seconds

        return count

    def _broadcast_coalesced(self, tensors: Sequence[Tensor], devices: Sequence[int], size: int) -> list[list[Tensor]]:
        others = [torch.device(self.device_type, index) for index in devices[1:]]
        outputs: list[list[Tensor]] = [[] for _ in others]
        types = set()
        for chunk in _take_tensors(tensors, size):
            types.add(chunk[0].dtype)
            flat = _flatten_dense_tensors(chunk)
            for device, output in zip(others, outputs, strict=True):
                output += [tensor.data for tensor in _unflatten_dense_tensors(flat.to(device), chunk)]
        if len(types) > 1:
            outputs = [list(_reorder_tensors_as(output, tensors)) for output in outputs]
        return [list(tensors), *outputs]

    def _scatter(
        self, tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any
    ) -> list[Tensor]:
        chunks = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
        copies = []
        for slot, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
            with nullcontext() if streams is None else streams[slot]:
                copies.append(chunk.to(torch.device(self.device_type, index), non_blocking=True))
        return copies

    def _gather(self, tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
        if destination is None:
            destination = torch.accelerator.current_device_index()
        device = torch.device("cpu") if destination == -1 else torch.device(self.device_type, destination)
        sizes = [tensor.shape[dim] for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(sizes)
        output = torch.empty(shape, dtype=tensors[0].dtype, device=device)
        for part, tensor in zip(output.split(sizes, dim), tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        return output
