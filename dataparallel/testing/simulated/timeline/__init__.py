"""Timelines: every launch of a program on simulated devices, with what it reads, writes and waits for.

``launches`` is the data and ``recording`` records it; ``torch.sim.timeline`` is its entry. ``flops`` counts the
floating-point operations of a launch. Nothing here measures the time of a device.
"""

from __future__ import annotations

from dataparallel.testing.simulated.timeline.launches import HOST, Launch, Recording, StreamName
from dataparallel.testing.simulated.timeline.recording import Timeline, timeline

__all__ = ["HOST", "Launch", "Recording", "StreamName", "Timeline", "timeline"]
