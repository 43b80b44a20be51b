"""`Recorded`: what a way of training launches in a step that begins with idle devices, and in two such steps in a row.

`record` makes it with a simulator's timeline. Predicts nothing but the time of a step; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nogpu.timeline import Machine, Recording, schedule


@dataclass(frozen=True)
class Recorded:
    """What one way does on some devices: a step that begins with idle devices, and two such steps in a row."""

    one: Recording
    two: Recording

    def python_seconds(self) -> float:
        """CPU seconds of the Python threads between the launches of a step, on the machine that recorded."""
        return sum(launch.host_seconds for launch in self.one.launches if not launch.in_backward)

    def cost_of_launches(self, machine: Machine) -> float:
        """Seconds that the machine's host takes for what Python threads launch in a step."""
        return sum(sum(machine.host.cost(launch)) for launch in self.one.launches if not launch.in_backward)


def second_step(recorded: Recorded, machine: Machine) -> float:
    """Milliseconds that a second step adds."""
    return 1e3 * (schedule(recorded.two, machine).time - schedule(recorded.one, machine).time)


def record(run: Callable[[], None], simulator: Any = None) -> Recorded:
    """What two calls of ``run`` launch, from idle devices. The first of them is the beginning of the recording.

    ``simulator`` has the timeline and the counts; ``torch.sim`` by default.
    """
    simulator = simulator or torch.sim
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    with simulator.timeline() as timeline:
        with simulator.counted() as counts:
            run()
        run()
    both = timeline.recording
    return Recorded(replace(both, launches=both.launches[: sum(counts.launches)]), both)
