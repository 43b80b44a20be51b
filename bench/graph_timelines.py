"""What captured graphs would bring on 8 x A100 and 8 x H100: predictions, from recordings on a stand-in for CUDA.

The devices skip kernels (``cuda.skipped_work``), so that models of real size can be recorded. All replicas run at a
time, as in `timelines`.

The references have a process, and so a host, for each device. `process_timelines` makes them of one recording, that of
the module alone as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.comm import kernels
from dataparallel.comm.kernels import DeviceTable
from dataparallel.comm.tables import Table
from dataparallel.composable import fully_shard
from nogpu import cuda
from nogpu.timeline import Machine
from nogpu.timeline.presets import A100, H100
from process_timelines import Alone, changed, one_graph
from recorded import Recorded, record, second_step
from shapes import GPT, GPT2_SMALL, GPT_768, RESNET50, RESNET50_4, RealShape
from timelines import ALONE, REPLICATE, SHARDED, SLOWER, TORCH, UNITS_AUTO, WARM_UP, WRAPPER, Steps
from torch_pipeline import StandIns

INFERENCE, TRAINING = "inference", "training"
ALL_REDUCED = "DDP, 8 processes"
FSDP2 = "FSDP2, 8 processes"
BY_PROCESSES = (ALL_REDUCED, FSDP2)
SETTLE = 8
"""Calls with graphs before the recorded ones: two and one in each thread run as they are, and the next one captures."""

TOKENS = 128
GPT_256 = RealShape(
    "GPT of width 256, 128 tokens",
    lambda: GPT(256, 12, 4, TOKENS),
    (TOKENS,),
    torch.long,
    (TOKENS,),
    1,
    9_543_168,
)

FITTING = ((GPT2_SMALL, TRAINING), (RESNET50, TRAINING))
"""Larger steps: of these there is the sharded optimizer only."""

TASKS = (
    (GPT_256, TRAINING),
    (RESNET50_4, TRAINING),
    (GPT_768, TRAINING),
    (GPT_256, INFERENCE),
    (RESNET50_4, INFERENCE),
    (GPT2_SMALL, TRAINING),
    (RESNET50, TRAINING),
)
BY_TABLES = (UNITS_AUTO,)
"""The sharded optimizer: ways whose kernels read peers."""
CASES = (
    (TORCH, False),
    *itertools.product((WRAPPER, REPLICATE), (False, True)),
    (SHARDED, False),
    (UNITS_AUTO, False),
    (UNITS_AUTO, True),
)
"""The ways in one process, without graphs and with them."""


class PlainCopies(StandIns):
    """Plain copies in the place of NCCL's collectives, whose time timelines do not know."""

    @property
    def needed(self) -> bool:
        """True: also on CUDA devices."""
        return True


@contextmanager
def without_nccl() -> Iterator[None]:
    """Inside, ``torch.nn.DataParallel`` copies and adds by itself, as `timelines` records it."""
    before = torch.cuda.nccl.is_available
    torch.cuda.nccl.is_available = lambda tensors: False
    try:
        with PlainCopies("cuda").installed():
            yield
    finally:
        torch.cuda.nccl.is_available = before


def check_copies(devices: Sequence[torch.device]) -> None:
    """A small step on all devices, whose kernels run: the library checks peers, and kernels that read them, once."""
    for form in (DataParallel, lambda module, devices: fully_shard(module, devices=devices) and module):
        network = form(nn.Linear(4, 4).to(devices[0]), devices)
        network(torch.ones(len(devices), 4, device=devices[0])).sum().backward()


@contextmanager
def described_tables() -> Iterator[None]:
    """Inside, it is said what the kernels of tables read and write: a kernel that is skipped cannot tell."""
    make, launch = DeviceTable.__init__, DeviceTable.launch
    rows: WeakKeyDictionary[DeviceTable, Table] = WeakKeyDictionary()
    kernels._table_of.cache_clear()  # tables that were made outside

    def made(self: DeviceTable, table: Table, *args: Any) -> None:
        make(self, table, *args)
        rows[self] = table

    def launched(self: DeviceTable, tensors: Sequence[Any], shifts: Any = None) -> None:
        table = rows[self]
        targets = [tensors[number] for number in dict.fromkeys(row.target.tensor for row in table)]
        reads: list[torch.Tensor] = [*tensors[: -len(targets)]]
        if len(table[0].terms) > 1:
            reads = [
                tensors[place.tensor].view(-1)[:numel]
                for _, terms, numel in table
                for place in terms
                if tensors[place.tensor] is not None
            ]
        with cuda.described_kernels(reads, targets):
            launch(self, tensors, shifts)

    with mock.patch.multiple(DeviceTable, __init__=made, launch=launched):
        yield


def recorded(way: str, graphs: bool, shape: RealShape, work: str, devices: Sequence[torch.device]) -> Recorded:
    """Two steps in a row, after others. Events have not passed when the host asks, as if it ran ahead."""
    with ExitStack() as stack:
        stack.enter_context(cuda.clocks(False))
        stack.enter_context(cuda.skipped_work())
        stack.enter_context(cuda.late_queries())
        stack.enter_context(described_tables())
        if way == TORCH:
            stack.enter_context(without_nccl())
        steps = Steps(way, shape, devices, graphs, trains=work == TRAINING)
        for _ in range(SETTLE if graphs else WARM_UP):
            steps.run()
        return record(steps.run, cuda)


def recorded_alone(shape: RealShape, work: str, device: torch.device) -> Alone:
    """Steps of the module alone as it is."""
    with cuda.clocks(False), cuda.skipped_work():
        steps = Steps(ALONE, shape, [device], trains=work == TRAINING)
        for _ in range(WARM_UP):
            steps.run()
        if work != TRAINING:
            return Alone(record(steps.run, cuda), [], [])
        return Alone.recorded(steps.network, steps.run, cuda)


def step_of(
    task: tuple[RealShape, str],
    way: str,
    graphs: bool,
    devices: int,
    found: Recorded,
    alone: Recorded,
    machine: Machine,
) -> dict[str, Any]:
    """Milliseconds, and calls for each device. Python's time is that of the machine's host, as for the module alone."""
    shape, work = task
    processes = devices if way in BY_PROCESSES else 1  # each of them has recorded what one device does
    factor = alone.cost_of_launches(machine) / alone.python_seconds()
    return {
        "model": shape.name,
        "work": work,
        "way": way,
        "graphs": graphs,
        "devices": devices,
        "machine": machine.name,
        "step": second_step(found, machine),
        "free_host": second_step(found, machine.with_free_host()),
        "python": 1e3 * factor * found.python_seconds(),
        "launches": processes * len(found.one.launches),
        "calls": processes * found.one.calls / devices,
        "graph_calls": processes * sum(launch.graph == launch.index for launch in found.one.launches) / devices,
    }


def predicted(shape: RealShape, work: str, devices: Sequence[torch.device]) -> list[dict[str, Any]]:
    """All ways to do the work: the module alone, a process for each device, and one process.

    On machines other than 8 x A100 the one process has the sharded optimizer only.
    """
    check_copies(devices)
    count, task = len(devices), (shape, work)
    alone = recorded_alone(shape, work, devices[0])
    cases = [case for case in CASES if case[0] == UNITS_AUTO or task not in FITTING]
    if work != TRAINING:
        cases = [case for case in cases if case[0] not in BY_TABLES]
    found = {case: recorded(*case, shape, work, devices) for case in cases}
    rows = []
    for machine in (A100, H100):
        of = partial(step_of, task, alone=alone.steps, machine=machine)
        rows += [of(ALONE, False, 1, alone.steps), of(ALONE, True, 1, changed(alone.steps, one_graph))]
        if work == TRAINING:
            summed = alone.by_ddp(machine, count)
            rows.append(of(ALL_REDUCED, False, count, summed))
            rows.append(of(ALL_REDUCED, True, count, changed(summed, one_graph)))
            rows.append(of(FSDP2, False, count, alone.by_fsdp2(machine, count)))
        for (way, graphs), recording in found.items():
            if machine == A100 or way in BY_TABLES:
                rows.append(of(way, graphs, count, recording))
            if way in BY_TABLES:
                slower = step_of(task, way, graphs, count, recording, alone.steps, machine.with_(peer_kernels=0.7))
                rows.append({**slower, "way": way + SLOWER})
    return rows
