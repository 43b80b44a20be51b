"""Tests that run on slots, on threads as ranks, or in processes: `unittest` bases, and what the pytest fixtures call.

`SlotTest`, `ThreadTest` and `ProcessTest` are in ``cases``; ``slots``, ``threads`` and ``processes`` run a function in
each place; `Rank` tells it where it is. ``comms`` has `with_comms` and what a test needs, ``reports`` the error of a
failed run. ``threaded_group`` is torch's process group for threads. Processes are forked by ``server``, which ``start``
starts; what they do, and how they find the test, is in ``child``. The library does not import this package, and
importing it imports nothing of ``torch.distributed``.
"""

from dataparallel.testing.ranks.cases import ProcessTest, SlotTest, ThreadTest, run_subtests
from dataparallel.testing.ranks.comms import skip_unless_devices, skip_unless_distributed, with_comms
from dataparallel.testing.ranks.processes import on_processes
from dataparallel.testing.ranks.rank import Rank
from dataparallel.testing.ranks.reports import RanksFailed
from dataparallel.testing.ranks.slots import on_slots
from dataparallel.testing.ranks.threads import on_threads

__all__ = [
    "ProcessTest",
    "Rank",
    "RanksFailed",
    "SlotTest",
    "ThreadTest",
    "on_processes",
    "on_slots",
    "on_threads",
    "run_subtests",
    "skip_unless_devices",
    "skip_unless_distributed",
    "with_comms",
]
