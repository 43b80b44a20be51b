"""A model of the ports of devices: in how many steps the copies of a call are over, if each copy takes one step.

A device sends one copy at a time and receives one. A copy starts after the work that the current streams of both its
devices have been given, as torch orders it, and they wait for it. Everything else takes no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataparallel.comm.streams import current


class Ports(TorchDispatchMode):
    """Inside, copies are counted; `steps` is when the last one is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.free: dict[Any, int] = defaultdict(int)
        self.copies: list[tuple[int, int, int]] = []  # sender, receiver, the step before which it starts
        ports = self

        class Stream(torch.Stream):
            def wait_stream(self, other: torch.Stream) -> None:
                ports.free[key(self)] = max(ports.free[key(self)], ports.free[key(other)])
                super().wait_stream(other)

        def noted(stream: torch.Stream) -> torch.Stream:
            return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

        current_streams, kept_stream = current.current_streams, current.kept_stream

        def currents(devices: Iterable[torch.device]) -> Mapping[torch.device, torch.Stream]:
            return {device: noted(stream) for device, stream in current_streams(devices).items()}

        monkeypatch.setattr(current, "current_streams", currents)
        monkeypatch.setattr(current, "kept_stream", lambda *which: noted(kept_stream(*which)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            target, source = args[0].device, args[1].device
            needed = [
                key(torch.accelerator.current_stream(source)),
                key(torch.accelerator.current_stream(target)),
                ("out", source),
                ("in", target),
            ]
            start = max(self.free[each] for each in needed)
            self.copies.append((source.index, target.index, start))
            self.free.update(dict.fromkeys(needed, start + 1))
        return func(*args, **(kwargs or {}))

    @property
    def steps(self) -> int:
        return max(start for *_, start in self.copies) + 1


def key(stream: torch.Stream) -> tuple[torch.device, int]:
    return stream.device, stream.stream_id
