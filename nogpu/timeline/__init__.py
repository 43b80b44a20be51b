"""Timelines: every launch of a program on simulated devices, and when each would run on a machine that is described.

``launches`` is the data and ``recording`` records it; ``torch.sim.timeline`` is its entry. ``machine`` and ``wiring``
say what a machine is, ``presets`` has published ones, and ``schedule`` computes and shows when each launch would run.
All of this is prediction: nothing here measures the time of a device.
"""

from __future__ import annotations

from nogpu.timeline.launches import HOST, Launch, Recording, StreamName
from nogpu.timeline.machine import Host, Machine, Path, Wiring
from nogpu.timeline.recording import Timeline
from nogpu.timeline.schedule import Schedule, schedule

__all__ = [
    "HOST",
    "Host",
    "Launch",
    "Machine",
    "Path",
    "Recording",
    "Schedule",
    "StreamName",
    "Timeline",
    "Wiring",
    "schedule",
]
