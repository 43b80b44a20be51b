"""From predictions for a Python with a lock and without one to the rows of a table. Does not know how they are made."""

from __future__ import annotations

from dataclasses import dataclass

from launch_bound import SAMPLES_PER_SLOT, WIDTH

INFERENCE, TRAINING = "inference", "training"
CORES = 64
"""Of the host: more than threads that run Python."""

CAPTION = f"""\
Predictions: nothing here was measured on such devices. Calls were recorded on simulated devices that skip kernels, and
scheduled on 8 x A100, once with a host whose Python has a lock, and once with one whose Python has none. The recording
is the same, and a launch takes a thread as long. With the lock one thread at a time spends a part of this time; without
it, up to {CORES} threads issue beside each other. What a free-threaded Python takes more for each line is not in it.

model
    "operators" are linear layers of width {WIDTH} in a row, each with an activation, and {SAMPLES_PER_SLOT} samples for
    each device. Their training is forward, loss and backward. Other models are of real size, with SGD.
launches, by Python
    In a call, on all devices, and those that no thread of a backward pass makes: only these need the lock.
lock, no lock, ms
    What one more call takes, where the host may run ahead of the devices.
lock/no lock
    How many times as fast the call is without the lock.
measured
    The same if each launch costs the host what Python took between two launches on the machine that recorded, all of it
    under the lock, scaled by the factor that makes it fit the host for the module alone. The threads that recorded
    shared a lock, so this is too much rather than too little for a Python without one.
free host, ms
    One more call if launching cost nothing.
alone, ms
    The module alone with the samples of one device, with the lock. No call on more devices can be much faster."""


@dataclass(frozen=True)
class PredictedRow:
    """One way to do one kind of work with one model. Times are milliseconds."""

    model: str
    work: str
    way: str
    devices: int
    machine: str
    launches: int
    python_launches: int
    lock: float
    no_lock: float
    measured_lock: float
    measured_no_lock: float
    free_host: float
    alone: float

    @property
    def gain(self) -> float:
        """How many times as fast a call is without the lock."""
        return self.lock / self.no_lock

    @property
    def measured_gain(self) -> float:
        return self.measured_lock / self.measured_no_lock

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "model": self.model,
            "work": self.work,
            "way": self.way,
            "devices": str(self.devices),
            "launches": f"{self.launches:,}",
            "by Python": f"{self.python_launches:,}",
            "lock, ms": f"{self.lock:.2f}",
            "no lock, ms": f"{self.no_lock:.2f}",
            "lock/no lock": f"{self.gain:.2f}",
            "measured:\nlock, ms": f"{self.measured_lock:.2f}",
            "\nno lock, ms": f"{self.measured_no_lock:.2f}",
            "\nlock/no lock": f"{self.measured_gain:.2f}",
            "free host, ms": f"{self.free_host:.2f}",
            "alone, ms": f"{self.alone:.2f}",
        }
