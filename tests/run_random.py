"""Runs random programs on a stand-in, correct ones and ones that lack a wait: a process of `test_random_programs`.

Arguments: the first seed, how many, and "late" for a schedule as late as possible. It writes one JSON object: false
alarms, wrong values, and how many of the programs without a wait that they need were found, each with its seed. Of a
late schedule it also writes how many of those show wrong values where no clock looks.
"""

import json
import sys
import threading
import time
from contextlib import nullcontext, suppress

from nogpu import cuda

cuda.stand_in(3)

import torch  # noqa: E402

from at_once import in_threads  # noqa: E402
from random_programs import (  # noqa: E402
    DEVICES,
    STREAMS,
    VIEWS,
    Program,
    generate,
    is_ordered,
    with_one_wait_left_out,
)


def part(tensor, view):
    if view in ("columns", "others"):
        square = tensor.view(6, 6)
        return square[:, :3] if view == "columns" else square[:, 3:]
    return tensor[VIEWS[view]]


def flat(tensor):
    return tensor.reshape(-1)


class Machine:
    """Does the steps of a program: on CUDA devices, or one after the other on the CPU."""

    def __init__(self, serial, late=False):
        self.serial = serial
        self.late = late  # no query says that work is done before the thread knows
        self.buffers = {}
        self.events = {}
        self.temporaries = threading.local()
        self.seen = {}
        if not serial:
            self.streams = {
                (device, number): torch.cuda.Stream(device) if number else torch.cuda.default_stream(device)
                for device in range(DEVICES)
                for number in range(STREAMS)
            }

    def device(self, step):
        return "cpu" if self.serial else f"cuda:{step.stream[0]}"

    def run(self, program: Program):
        for phase in program.phases:
            if self.serial or not phase.in_threads:
                for lane in phase.lanes:
                    self.lane(lane)
                continue
            in_threads(len(phase.lanes), lambda index, _, lanes=phase.lanes: self.lane(lanes[index]))

    def lane(self, steps):
        for step in steps:
            getattr(self, step.kind)(step)

    def launch(self, step):
        if self.serial:
            getattr(self, step.op)(step)
            return
        # The first names the current device, and the second is current on its own.
        with torch.cuda.stream(self.streams[step.other]), torch.cuda.stream(self.streams[step.stream]):
            getattr(self, step.op)(step)

    def host(self, step):
        getattr(self, {"new": "new_pinned"}.get(step.op, step.op))(step)

    # Launches.

    def new(self, step):
        self.buffers[step.buffer] = torch.full((36,), float(step.number), dtype=torch.float64, device=self.device(step))

    def source(self, step):
        return part(self.buffers[step.reads[0][0]], step.reads[0][1])

    def target(self, step):
        return part(self.buffers[step.writes[0][0]], step.writes[0][1])

    def update(self, step):
        self.target(step).mul_(3).add_(step.number).remainder_(97)

    def combine(self, step):
        target, source = self.target(step), self.source(step)
        target.copy_((flat(source) * 2 + step.number).remainder(97).view(target.shape))

    def scatter(self, step):
        """A gather and a scatter, as an embedding does."""
        if self.serial:
            order = torch.arange(17, -1, -1)
        else:
            order = torch.arange(17, -1, -1, device=self.device(step))
        target = self.target(step)
        target.copy_(flat(target).index_select(0, order).view(target.shape))

    def copy(self, step):
        self.target(step).copy_(self.source(step), non_blocking=True)

    def make(self, step):
        self.temporaries.made = (flat(self.source(step)) * 5 + step.number).remainder(97)

    def take(self, step):
        made, target = self.temporaries.made, self.target(step)
        target.copy_(made.view(target.shape))
        if not self.serial and step.other != step.stream:
            made.record_stream(self.streams[step.stream])
        self.temporaries.made = None

    def backward(self, step):
        weight = self.target(step).clone().requires_grad_()
        (weight * weight).sum().backward()
        self.target(step).copy_((weight.grad + step.number).remainder(97))

    def free(self, step):
        buffer = self.buffers.pop(step.buffer)
        for stream in step.streams if not self.serial else ():
            buffer.record_stream(self.streams[stream])

    # The host.

    def new_pinned(self, step):
        self.buffers[step.buffer] = torch.full(
            (36,), float(step.number), dtype=torch.float64, pin_memory=not self.serial
        )

    def read(self, step):
        self.seen[step] = part(self.buffers[step.reads[0][0]], step.reads[0][1]).tolist()

    def write(self, step):
        self.target(step).fill_(step.number)

    # What orders.

    def barrier(self, step):
        pass

    def record(self, step):
        if not self.serial:
            self.events[step.event] = self.streams[step.stream].record_event()

    def wait_stream(self, step):
        if not self.serial:
            self.streams[step.stream].wait_stream(self.streams[step.other])

    def wait_event(self, step):
        if not self.serial:
            self.streams[step.stream].wait_event(self.events[step.event])

    def synchronize_stream(self, step):
        if not self.serial:
            self.streams[step.other].synchronize()

    def synchronize_event(self, step):
        if self.serial:
            return
        event = self.events[step.event]
        if step.event % 2 or self.late:
            event.synchronize()
        else:
            while not event.query():
                time.sleep(0.001)

    def synchronize_device(self, step):
        if not self.serial:
            torch.cuda.synchronize(step.device)


def settle():
    for device in range(DEVICES):
        torch.cuda.synchronize(device)


LATE = "late" in sys.argv[3:]


def schedule():
    return cuda.late_schedule() if LATE else nullcontext()


def raised(machine, program):
    """What the clocks say, or None. Everything is done afterwards."""
    try:
        with schedule(), cuda.late_queries() if machine.late else nullcontext():
            machine.run(program)
            cuda.check_clocks()
    except RuntimeError as error:
        return str(error)
    finally:
        settle()
    return None


def forget(machine):
    machine.buffers.clear()
    with suppress(RuntimeError):
        cuda.check_clocks()
    settle()


def differences(machine, serial):
    """The buffers, and what the host has read, that are not as on the CPU: each with both values."""
    found = []
    for number, expected in serial.buffers.items():
        if machine.buffers[number].tolist() != expected.tolist():
            found.append([f"buffer {number}", machine.buffers[number].tolist(), expected.tolist()])
    for step, expected in serial.seen.items():
        if machine.seen.get(step) != expected:
            found.append([str(step), machine.seen.get(step), expected])
    return found


def shows(program, serial):
    """True if the values are wrong where no clock looks."""
    machine = Machine(False)
    with cuda.clocks(False), schedule():
        machine.run(program)
        settle()
    differing = differences(machine, serial)
    forget(machine)
    return bool(differing)


def main():
    first, count = int(sys.argv[1]), int(sys.argv[2])
    false_alarms, wrong, missed, found, shown = [], [], [], 0, 0
    for seed in range(first, first + count):
        program = generate(seed)
        assert is_ordered(program), seed
        machine, serial = Machine(False, late=seed % 2 == 1), Machine(True)
        serial.run(program)
        if message := raised(machine, program):
            false_alarms.append([seed, message])
        elif differing := differences(machine, serial):
            wrong.append([seed, differing])
        forget(machine)
        less = with_one_wait_left_out(program, seed)
        if less is None:
            continue
        machine = Machine(False, late=seed % 2 == 1)
        if raised(machine, less):
            found += 1
        else:
            missed.append(seed)
        forget(machine)
        shown += LATE and shows(less, serial)
    result = {"false_alarms": false_alarms, "wrong": wrong, "missed": missed, "found": found, "shown": shown}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
