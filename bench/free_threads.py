"""A script for processes that run launch-bound models on two CPU slots, in whatever Python starts it.

``python free_threads.py`` is a single process. It has two slots by each of the library's forms, two plain threads
without the library, and one thread alone with half of the batch. ``python free_threads.py RANK FILE`` is one of two
processes of ``DistributedDataParallel``, which find each other through FILE, each with half of the batch.

Commands and answers are those of `contender.obey`. A command is the text of a `Task`. It is answered with the seconds
of a call: the mean of several calls in a row, by the clock of the process, so that telling it what to do takes no part
in it. The first command of a task makes its model, checks outputs and gradients, and lets the library choose how many
replicas run at a time.

The model has no random draws. So training is timed with ``workers=2`` too, which lets slots that share a random
generator run at the same time. Needs nothing but torch and the library: `free_slots` starts it in other Pythons.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from contender import obey
from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from freed_memory import keep_freed_memory
from gradients import assert_same_gradients, gradients_of
from launch_bound import batch, layers_in_a_row
from sharded_blocks import full_gradients
from stages import mean_square

SLOTS = 2
DEVICES = ["cpu"] * SLOTS
CALLS = 5
"""In a row, for one answer."""
SETTLE = 40
"""Calls in which the library chooses how many replicas run at a time."""

COLLECT_AFTER = 100_000
"""New objects, instead of 2,000. A collection of a free-threaded Python looks at all objects of the process, for 15 ms
here, and the objects of a step alone would cause several."""

INFERENCE, TRAINING = "inference", "training"
ALONE, THREADS = "one thread alone, half of the batch", "two plain threads"
WRAPPER, FROZEN, REPLICATE, SHARD = "DataParallel", "DataParallel, frozen", "replicate", "fully_shard"
DDP = "two processes, DDP"
WITH_WORKERS = ", workers=2"
ABOUT = "python"
"""The command that is answered with what this Python is."""

Call = Callable[[], object]


class Task(NamedTuple):
    """What is timed: one kind of ``work`` with a model of so many ``layers``, by one ``way``."""

    way: str
    work: str
    layers: int

    def __str__(self) -> str:
        return "|".join(map(str, self))

    @classmethod
    def of(cls, text: str) -> Task:
        way, work, layers = text.split("|")
        return cls(way, work, int(layers))


def ways(work: str) -> list[str]:
    """The ways of one process, in the order of the table."""
    forms = [WRAPPER, FROZEN, REPLICATE, SHARD] if work == INFERENCE else [WRAPPER, REPLICATE, SHARD]
    with_workers = [] if work == INFERENCE else [form + WITH_WORKERS for form in forms]
    return [ALONE, THREADS, *forms, *with_workers]


class TwoThreads:
    """A copy of the model and half of the batch for the caller and for one other thread: the floor for two slots."""

    def __init__(self, model: nn.Module, inputs: Tensor, layers: int) -> None:
        self.models = [model, layers_in_a_row(layers)]
        self._halves = inputs.chunk(SLOTS)
        self._other = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def infer(self) -> Tensor:
        other = self._other.submit(self._infer, 1)
        return torch.cat([self._infer(0), other.result()])

    def train(self) -> Tensor:
        other = self._other.submit(self._train, 1)
        return torch.cat([self._train(0), other.result()])

    def _infer(self, slot: int) -> Tensor:
        with torch.no_grad():
            return self.models[slot](self._halves[slot])

    def _train(self, slot: int) -> Tensor:
        output = step(self.models[slot], self._halves[slot])
        return output.detach()

    def gradients(self) -> list[Tensor]:
        """Means over both."""
        return [torch.stack(pair).mean(0) for pair in zip(*map(gradients_of, self.models), strict=True)]


def step(network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Forward, loss and backward. The gradients stay until the next step's `clear`."""
    output = network(inputs)
    mean_square(output).backward()
    return output


class Prepared:
    """The call of one task. ``network`` is what it calls, and ``close`` ends it."""

    def __init__(self, task: Task) -> None:
        self.task, self.model, self.inputs = task, layers_in_a_row(task.layers), batch(SLOTS)
        self.close = ExitStack()
        workers = SLOTS if task.way.endswith(WITH_WORKERS) else None
        way = task.way.removesuffix(WITH_WORKERS)
        self.threads = TwoThreads(self.model, self.inputs, task.layers) if way == THREADS else None
        self.network: nn.Module = self.model
        if way in (WRAPPER, FROZEN):
            self.network = DataParallel(self.model, DEVICES, workers=workers)
        elif way == REPLICATE:
            replicate(self.model, devices=DEVICES, workers=workers)
        elif way == SHARD:
            fully_shard(self.model, devices=DEVICES, workers=workers)
        elif way == ALONE:
            self.inputs = self.inputs.chunk(SLOTS)[0]
        self.model.train(task.work == TRAINING)
        if way == FROZEN:
            self.close.enter_context(self.network.options.frozen())

    def call(self) -> Tensor:
        if self.task.work == INFERENCE:
            if self.threads is not None:
                return self.threads.infer()
            with torch.no_grad():
                return self.network(self.inputs)
        return step(self.network, self.inputs) if self.threads is None else self.threads.train()

    def clear(self) -> None:
        """Drops the gradients, as an optimizer's ``zero_grad`` does: outside the timing, the same for all ways."""
        for model in [self.model] if self.threads is None else self.threads.models:
            model.zero_grad()

    def check(self) -> None:
        """Raises `AssertionError` unless output and gradients are those of the model by itself."""
        plain = layers_in_a_row(self.task.layers)
        expected = step(plain, self.inputs).detach()
        self.clear()
        torch.testing.assert_close(self.call().detach(), expected)
        if self.task.work == TRAINING:
            assert_same_gradients(self.gradients(), gradients_of(plain))

    def gradients(self) -> list[Tensor]:
        if self.threads is not None:
            return self.threads.gradients()
        return full_gradients(self.model) if SHARD in self.task.way else gradients_of(self.model)


def seconds_of(call: Call, clear: Call, calls: int = CALLS) -> float:
    """The mean of several calls in a row. Gradients are dropped between them, outside the timing."""
    gc.collect()
    taken = 0.0
    for _ in range(calls):
        clear()
        start = time.perf_counter()
        call()
        taken += time.perf_counter() - start
    return taken / calls


class Tasks(dict[str, Callable[[], object]]):
    """The commands. A task is prepared when it is asked for first."""

    def __init__(self, prepare: Callable[[Task], Callable[[], object]]) -> None:
        super().__init__({ABOUT: about})
        self._prepare = prepare

    def __missing__(self, command: str) -> Callable[[], object]:
        self[command] = self._prepare(Task.of(command))
        return self[command]


def about() -> dict[str, object]:
    """What this Python is."""
    ask = getattr(sys, "_is_gil_enabled", None)
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "lock": True if ask is None else bool(ask()),
        "torch": torch.__version__,
    }


def prepared(task: Task) -> Callable[[], float]:
    """A task of the single process."""
    work = Prepared(task)
    work.check()
    for _ in range(SETTLE):
        work.clear()
        work.call()
    work.check()
    gc.freeze()
    return lambda: seconds_of(work.call, work.clear)


def prepared_in_rank(rank: int) -> Callable[[Task], Callable[[], float]]:
    """Tasks of one of two processes. Inference needs nothing of the other."""

    def prepare(task: Task) -> Callable[[], float]:
        model = layers_in_a_row(task.layers)
        whole = batch(SLOTS)
        inputs = whole.chunk(SLOTS)[rank].contiguous()
        if task.work == INFERENCE:
            model.eval()

            def call() -> Tensor:
                with torch.no_grad():
                    return model(inputs)
        else:
            network = nn.parallel.DistributedDataParallel(model)
            plain = layers_in_a_row(task.layers)
            step(plain, whole)
            step(network, inputs)
            assert_same_gradients(gradients_of(model), gradients_of(plain))

            def call() -> Tensor:
                return step(network, inputs)

        seconds_of(call, model.zero_grad)
        gc.freeze()
        return lambda: seconds_of(call, model.zero_grad)

    return prepare


def main(rank: str | None = None, file: str = "") -> None:
    torch.set_num_threads(1)  # before anything that runs a backward
    keep_freed_memory()
    gc.set_threshold(COLLECT_AFTER)
    if rank is None:
        obey(Tasks(prepared))
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=int(rank), world_size=SLOTS, timeout=timedelta(minutes=2)
    )
    obey(Tasks(prepared_in_rank(int(rank))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
