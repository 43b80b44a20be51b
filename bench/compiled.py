"""A model as compiled and as eager replicas, and on one device chunk after chunk: work to be timed, and its checks.

Inductor generates the code, with the defaults of ``torch.compile``. Nothing is timed here. That is done by
`test_compiled.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from beside_torch import SAMPLES_PER_DEVICE, SETTLE, SHORT_SETTLE
from dataparallel import DataParallel
from dataparallel.composable import replicate
from gradients import assert_same_gradients, mean_square, take_gradients
from pairs import Call
from shapes import InARow, Shape

COMPILED, REPLICATED, EAGER = "compiled replicas", "compiled composable.replicate", "eager replicas"
COMPILED_IN_A_ROW, IN_A_ROW = "compiled, in a row", "eager, in a row"
WAYS = (COMPILED, REPLICATED, EAGER, COMPILED_IN_A_ROW, IN_A_ROW)

LAUNCH = re.compile(r"^\s+(cpp_fused\w*\(|extern_kernels\.\w+\(|\w+ = torch\.ops\.\w+\.)", re.MULTILINE)
"""A line of Inductor's Python that launches something: a kernel that it has generated, or an operator."""


@dataclass(frozen=True)
class Called:
    """A module to call with the whole batch. Its parameters get the gradients."""

    call: nn.Module
    module: nn.Module

    def train(self, batch: Tensor) -> None:
        """A step without an optimizer, so that all steps are the same."""
        mean_square(self.call(batch)).backward()
        self.module.zero_grad()

    def infer(self, batch: Tensor) -> None:
        with torch.no_grad():
            self.call(batch)


class CompiledBesideEager:
    """Copies of one module, one for each of `WAYS`, and a batch of 2 samples for each of ``count`` CPU slots."""

    def __init__(self, shape: Shape, count: int, train: bool) -> None:
        slots = ["cpu"] * count
        self.count = count
        self.is_training = train
        self.batch = shape.batch(SAMPLES_PER_DEVICE * count)
        module = shape.model().train(train)
        replicated, wrapped, eager, compiled, alone = (copy.deepcopy(module) for _ in WAYS)
        in_place = replicate(replicated, devices=slots, compile=True)
        compiled.compile()
        self.contenders = {
            COMPILED: Called(DataParallel(wrapped, slots, compile=True), wrapped),
            REPLICATED: Called(in_place, in_place),
            EAGER: Called(DataParallel(eager, slots), eager),
            COMPILED_IN_A_ROW: Called(InARow(compiled, count), compiled),
            IN_A_ROW: Called(InARow(alone, count), alone),
        }

    def calls(self) -> dict[str, Call]:
        """What is timed, by its way."""
        return {way: self._work(contender) for way, contender in self.contenders.items()}

    def settle(self, short: bool) -> None:
        """Compiles, and lets the library choose how many replicas run at a time."""
        for call in self.calls().values():
            for _ in range(SHORT_SETTLE if short else SETTLE):
                call()

    def launches_after_fusion(self) -> int:
        """What the code of Inductor launches for one chunk: kernels that it has generated, and operators."""
        torch._dynamo.reset()
        module = copy.deepcopy(self.contenders[COMPILED_IN_A_ROW].module)
        module.compile()
        contender = Called(module, module)
        _, codes = run_and_get_code(self._work(contender, self.batch[:SAMPLES_PER_DEVICE]))
        torch._dynamo.reset()
        return sum(launches_in(code) for code in codes)

    def check(self) -> None:
        """Raises `AssertionError` unless all have the outputs and gradients of the chunks on one device."""
        first, *others = reversed(self.contenders.values())
        wanted, gradients = self._results(first)
        for contender in others:
            found, own = self._results(contender)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
            assert_same_gradients(own, gradients, rtol=1e-3, atol=1e-4)

    def _results(self, contender: Called) -> tuple[Tensor, list[Tensor]]:
        if not self.is_training:
            with torch.no_grad():
                return contender.call(self.batch), []
        output = contender.call(self.batch)
        mean_square(output).backward()
        return output.detach(), take_gradients(contender.module)

    def _work(self, contender: Called, batch: Tensor | None = None) -> Callable[[], None]:
        work = contender.train if self.is_training else contender.infer
        return lambda: work(self.batch if batch is None else batch)


def launches_in(code: str) -> int:
    """How often the function ``call`` of Inductor's code launches something."""
    return len(LAUNCH.findall(code[code.index("def call(") : code.index("runner = Runner")]))


def eager_launches(shape: Shape, train: bool, device: torch.device) -> int:
    """How many operators a simulated device runs for the chunk of a replica without the compiler."""
    module, batch = shape.model().train(train).to(device), shape.batch(SAMPLES_PER_DEVICE).to(device)
    contender = Called(module, module)
    work = contender.train if train else contender.infer
    work(batch)
    torch.sim.synchronize(device)
    with torch.sim.counted() as counts:
        work(batch)
    return sum(counts.launches)


def compilations() -> int:
    """How many graphs have been compiled so far in this process."""
    return int(counters["stats"]["unique_graphs"])


def given_up() -> dict[str, Any]:
    """What the compiler has counted of frames that run without it."""
    return {name: dict(counters[name]) for name in ("graph_break", "unimplemented") if counters[name]}
