"""What simulating devices costs a test suite: compiling once, operators beside those of the CPU, clocks, timelines.

Each result is compared with that of the CPU. The time of compiling is measured in a process of its own, into an empty
folder. On a stand-in for CUDA the same is measured of its devices, except for compiling, which comes before torch.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.nn import functional as F

from child_processes import environment
from nogpu.cuda import is_stand_in
from places import Places
from reporting import Report, quartiles, ratios
from shapes import GPT, SHAPES

CAPTION = """\
device/cpu is the time on a device that is simulated, or of a stand-in, with its clocks off, over the time on the CPU.
clocks on/off is the time there with clocks over that without, and recorded/not that with clocks inside timeline() over
that outside. Each is the median over rounds that time all four, with the middle half of the rounds. Large results can
take less time than on the CPU, because the two get their memory in different ways."""

ROUNDS = 41
SHORT_ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One piece of work."""

    work: str
    cpu_microseconds: float
    device_over_cpu: float
    device_over_cpu_low: float
    device_over_cpu_high: float
    clocks_on_over_off: float
    clocks_on_over_off_low: float
    clocks_on_over_off_high: float
    recorded_over_not: float
    recorded_over_not_low: float
    recorded_over_not_high: float

    def cells(self) -> dict[str, str]:
        return {
            "work": self.work,
            "on the cpu, µs": f"{self.cpu_microseconds:,.1f}",
            "device/cpu": f"{self.device_over_cpu:.2f}",
            "its middle half": f"{self.device_over_cpu_low:.2f} to {self.device_over_cpu_high:.2f}",
            "clocks on/off": f"{self.clocks_on_over_off:.2f}",
            "their middle half": f"{self.clocks_on_over_off_low:.2f} to {self.clocks_on_over_off_high:.2f}",
            "recorded/not": f"{self.recorded_over_not:.2f}",
            "middle half of that": f"{self.recorded_over_not_low:.2f} to {self.recorded_over_not_high:.2f}",
        }


def numbers(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def addition(device: torch.device, size: int) -> Callable[[], Tensor]:
    x = numbers(size, device=device)
    return lambda: x + x


def product(device: torch.device, size: int) -> Callable[[], Tensor]:
    x = numbers(size, size, device=device)
    return lambda: x @ x


def training(device: torch.device) -> Callable[[], Tensor]:
    """A step of a training. Each call makes the next step and returns its loss."""
    shape = next(shape for shape in SHAPES if shape.make is GPT)
    model, tokens = shape.model().to(device), shape.batch(16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@dataclass(frozen=True)
class Work:
    """What is timed on a device. `repeats` of it take some milliseconds, which is long enough for the timer."""

    name: str
    on: Callable[[torch.device], Callable[[], Tensor]]
    repeats: int


WORK = [
    Work("addition of 16 elements", lambda device: addition(device, 16), 2000),
    Work("addition of 1,000,000 elements", lambda device: addition(device, 1_000_000), 20),
    Work("matrix product, 64 x 64", lambda device: product(device, 64), 500),
    Work("matrix product, 512 x 512", lambda device: product(device, 512), 2),
    Work("training step of a GPT of width 24", training, 1),
]


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("stand_in" if is_stand_in() else "simulation", CAPTION))
    return reports[-1]


@pytest.fixture(autouse=True)
def simulated(places: Places) -> None:
    if places.simulator is None:
        pytest.skip(places.why_not_simulated)


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.name)
def test_operators(work: Work, benchmark: BenchmarkFixture, report: Report, places: Places, short: bool) -> None:
    """A round is the same work on the CPU, without clocks, with clocks, and with clocks while it is recorded.

    The order changes. The time of a recording is that of the work inside the block.

    What was computed is the same each time, training steps included.
    """
    cpu, other, simulator = torch.device("cpu"), places.apart[0], places.simulator
    places_in_turn = [(cpu, True, False), (other, False, False), (other, True, False), (other, True, True)]
    calls = [work.on(device) for device, *_ in places_in_turn]
    seconds: list[list[float]] = [[], [], [], []]
    results: list[Tensor] = [torch.empty(0)] * 4

    def one_round() -> None:
        order = range(4) if len(seconds[0]) % 2 else reversed(range(4))
        for k in order:
            _, clocks, recorded = places_in_turn[k]
            with simulator.clocks(clocks), simulator.timeline() if recorded else nullcontext():
                start = time.perf_counter()
                for _ in range(work.repeats):
                    results[k] = calls[k]()
                seconds[k].append((time.perf_counter() - start) / work.repeats)
        for result in results[1:]:
            torch.testing.assert_close(result.cpu(), results[0])

    one_round()  # the first calls of operators find their kernels
    for times in seconds:
        times.clear()
    benchmark.pedantic(one_round, rounds=SHORT_ROUNDS if short else ROUNDS)
    if benchmark.enabled:
        on_cpu, without_clocks, with_clocks, recorded = seconds
        slower, watched = quartiles(ratios(without_clocks, on_cpu)), quartiles(ratios(with_clocks, without_clocks))
        noted = quartiles(ratios(recorded, with_clocks))
        report.rows.append(
            Row(
                work=work.name,
                cpu_microseconds=1e6 * statistics.median(on_cpu),
                device_over_cpu=slower.middle,
                device_over_cpu_low=slower.low,
                device_over_cpu_high=slower.high,
                clocks_on_over_off=watched.middle,
                clocks_on_over_off_low=watched.low,
                clocks_on_over_off_high=watched.high,
                recorded_over_not=noted.middle,
                recorded_over_not_low=noted.low,
                recorded_over_not_high=noted.high,
            )
        )


FIRST_USE = """
import time
import torch
start = time.perf_counter()
from nogpu import simulate
device = simulate(2)[1]
seconds = time.perf_counter() - start
print(seconds, torch.full((3,), 2.0, device=device).sum().item())
"""


@pytest.fixture
def first_use(tmp_path: Path) -> Iterator[Callable[[], float]]:
    """A function that simulates in a process of its own and returns the seconds, without those of ``import torch``."""

    def run() -> float:
        output = subprocess.run(
            [sys.executable, "-c", FIRST_USE],
            env=environment(TORCH_EXTENSIONS_DIR=str(tmp_path)),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        seconds, total = map(float, output.split())
        assert total == 6
        return seconds

    return run


def test_compilation(
    first_use: Callable[[], float], tmp_path: Path, benchmark: BenchmarkFixture, report: Report, short: bool
) -> None:
    """The first process compiles, the second finds what the first has compiled."""
    if short or is_stand_in():
        pytest.skip("compiling takes about a minute" if short else "a stand-in is compiled before torch is imported")
    compiling = benchmark.pedantic(first_use, rounds=1)
    built = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    loading = first_use()
    assert len(built) == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")} == built
    report.notes.append(
        f"The first use on a machine, which compiles, took {math.ceil(compiling)} s, "
        f'the next one in another process {loading:.2f} s ("import torch" apart).'
    )
