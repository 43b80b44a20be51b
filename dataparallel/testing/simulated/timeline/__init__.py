"""Timelines: what recorded launches would do on the devices of a machine that is described, not at hand.

``launches`` is the data, ``machine`` and ``wiring`` say what a machine is, and ``schedule`` computes when each launch
would run. All of this is prediction: nothing here measures time.
"""

from __future__ import annotations

from dataparallel.testing.simulated.timeline.launches import HOST, Launch, Recording, StreamName
from dataparallel.testing.simulated.timeline.machine import Host, Machine, Path, Wiring

__all__ = ["HOST", "Host", "Launch", "Machine", "Path", "Recording", "StreamName", "Wiring"]
