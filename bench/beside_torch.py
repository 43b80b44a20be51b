"""The work that the library and ``torch.nn.parallel`` both do, on the same module, batch and devices.

Replicating, inference and a training step without its optimizer are callables to be timed. Checks show that both do
all of the work: every tensor of every replica is there, and outputs and gradients are those of one device. This module
compares and judges no times. That is done by `beside_torch_report.py` and `test_beside_torch.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel
from gradients import assert_same_gradients, take_gradients
from pairs import Call, Comparison, load, take_turns
from ready_replicas import ReadyReplicas
from shapes import Shape
from stages import mean_square
from torch_pipeline import StandIns

SAMPLES_PER_DEVICE = 2
THREADS_OF_READY_ONES = (1, 2)
SETTLE, SHORT_SETTLE = 32, 2
"""Calls in which the library chooses how many replicas run at a time."""


@dataclass(frozen=True)
class Timed:
    """The seconds of one piece of work by several ways, which took turns.

    ``stand_ins`` is the part of ``theirs`` that was spent in plain copies. ``in_a_row`` is the same work on one device,
    chunk after chunk, and ``ready`` that of `ReadyReplicas` by the number of threads. All three may be empty.
    """

    ours: list[float]
    theirs: list[float]
    stand_ins: list[float]
    in_a_row: list[float] = field(default_factory=list)
    ready: dict[int, list[float]] = field(default_factory=dict)
    load_before: float = 0.0
    load_after: float = 0.0

    def beside_torch(self) -> Comparison:
        """The ratio is torch's time over ours."""
        return self._comparison(self.ours, self.theirs)

    def beside_torch_less_copies(self) -> Comparison:
        """The ratio is torch's time without its copies between devices over ours with all copies."""
        rest = [whole - copies for whole, copies in zip(self.theirs, self.stand_ins, strict=True)]
        return self._comparison(self.ours, rest)

    def over_in_a_row(self) -> Comparison:
        """The ratio is our time over that of the chunks in a row."""
        return self._comparison(self.in_a_row, self.ours)

    def torch_over_in_a_row(self) -> Comparison:
        return self._comparison(self.in_a_row, self.theirs)

    def torch_over_ready(self, threads: int) -> Comparison:
        """The ratio is torch's time over that of ready replicas."""
        return self._comparison(self.ready[threads], self.theirs)

    def fastest_ready(self) -> list[float]:
        """The times of ready replicas with the number of threads that is faster."""
        return min(self.ready.values(), key=statistics.median)

    def over_ready(self) -> Comparison:
        """The ratio is our time over that of ready replicas."""
        return self._comparison(self.fastest_ready(), self.ours)

    def _comparison(self, ours: list[float], theirs: list[float]) -> Comparison:
        return Comparison(ours, theirs, self.load_before, self.load_after)


class BesideTorch:
    """One module in two wrappers on ``devices``, with a batch of 2 samples for each device.

    Calls of torch's need ``stand_ins`` installed; `time` and the checks do that.
    """

    def __init__(self, shape: Shape, devices: Sequence[torch.device], dtype: torch.dtype = torch.float32) -> None:
        self.devices = list(devices)
        self.module = shape.model().to(self.devices[0], dtype)
        batch = shape.batch(SAMPLES_PER_DEVICE * len(self.devices)).to(self.devices[0])
        self.batch = batch.to(dtype) if batch.is_floating_point() else batch
        self.ours = DataParallel(self.module, device_ids=self.devices)
        self.theirs = nn.DataParallel(self.module, device_ids=[device.index for device in self.devices])
        self.stand_ins = StandIns(self.devices[0].type)
        self.held: Sequence[nn.Module] = ()

    # What is timed.

    def replicate(self) -> None:
        dataparallel.replicate(self.module, self.devices)

    def torch_replicate(self) -> None:
        nn.parallel.replicate(self.module, self.theirs.device_ids)

    def wrapper_replicate(self) -> None:
        self.held = self.ours.replicate(self.module, self.ours.device_ids)

    def torch_wrapper_replicate(self) -> None:
        self.held = self.theirs.replicate(self.module, self.theirs.device_ids)

    def end(self) -> None:
        """Drops the replicas, as at the end of a call."""
        self.held = ()

    def wrapper_replicate_and_end(self) -> None:
        self.wrapper_replicate()
        self.end()

    def torch_wrapper_replicate_and_end(self) -> None:
        self.torch_wrapper_replicate()
        self.end()

    def infer(self) -> None:
        self.ours(self.batch)

    def torch_infer(self) -> None:
        self.theirs(self.batch)

    def infer_in_a_row(self) -> None:
        """The chunks one after the other on the first device."""
        for chunk in self.batch.chunk(len(self.devices)):
            self.module(chunk)

    def train(self) -> None:
        mean_square(self.ours(self.batch)).backward()
        self.module.zero_grad()

    def torch_train(self) -> None:
        mean_square(self.theirs(self.batch)).backward()
        self.module.zero_grad()

    def train_in_a_row(self) -> None:
        """A step for each chunk on the first device, with gradients accumulated."""
        for chunk in self.batch.chunk(len(self.devices)):
            (mean_square(self.module(chunk)) / len(self.devices)).backward()
        self.module.zero_grad()

    def time(
        self,
        ours: Call,
        theirs: Call,
        pairs: int,
        settle: int,
        short: bool,
        in_a_row: Call | None = None,
        between: Call | None = None,
        ready: Mapping[int, Call] = MappingProxyType({}),
    ) -> Timed:
        """The calls take turns, after ``settle`` calls of ours, in which the library chooses its number of permits."""
        counted, shares = self.stand_ins.count(theirs)
        before = load()
        with self.stand_ins.installed():
            for _ in range(settle):
                ours()
                if between is not None:
                    between()
            others = [*([] if in_a_row is None else [in_a_row]), *ready.values()]
            mine, torchs, *rest = take_turns([ours, counted, *others], pairs, between=between, short=short)
        row = [] if in_a_row is None else rest.pop(0)
        by_threads = dict(zip(ready, rest, strict=True))
        copies = shares[-len(torchs) :] if self.stand_ins.needed else []
        return Timed(mine, torchs, copies, row, by_threads, before, load())

    def ready_replicas(self) -> dict[int, ReadyReplicas]:
        """The ready replicas, by the number of threads that run them."""
        return {
            threads: ReadyReplicas(self.module, self.batch, self.devices, threads) for threads in THREADS_OF_READY_ONES
        }

    # What is checked, outside of any timing.

    def check_replicas(self, sent: bool = True) -> None:
        """Raises `AssertionError` unless each tensor of each replica has the source's name, value, shape and dtype.

        Each has to be on the device of its replica. Unless ``sent`` is false (`frozen`), the check is repeated right
        after all values have been changed without autograd's knowledge, so that old replicas would be found.
        """
        ours: list[Callable[[], list[nn.Module]]] = [
            lambda: dataparallel.replicate(self.module, self.devices),
            lambda: self.ours.replicate(self.module, self.ours.device_ids),
        ]
        theirs: list[Callable[[], list[nn.Module]]] = [
            lambda: nn.parallel.replicate(self.module, self.theirs.device_ids),
            lambda: self.theirs.replicate(self.module, self.theirs.device_ids),
        ]
        with self.stand_ins.installed():
            for make in ours + theirs:
                check_tensors(self.module, make(), self.devices)
                if sent:
                    with changed(self.module):
                        check_tensors(self.module, make(), self.devices)

    def check_inference(self) -> None:
        """Raises `AssertionError` unless the outputs are those of one device."""
        expected = torch.cat([self.module(chunk) for chunk in self.batch.chunk(len(self.devices))])
        with self.stand_ins.installed():
            for wrapper in (self.ours, self.theirs):
                torch.testing.assert_close(wrapper(self.batch), expected)

    def check_training(self) -> None:
        """Raises `AssertionError` unless outputs and gradients are those of the chunks in a row on one device."""
        self.module.zero_grad()
        outputs = []
        for chunk in self.batch.chunk(len(self.devices)):
            outputs.append(self.module(chunk))
            (mean_square(outputs[-1]) / len(self.devices)).backward()
        expected = torch.cat(outputs).detach()
        gradients = take_gradients(self.module)
        with self.stand_ins.installed():
            for wrapper in (self.ours, self.theirs):
                output = wrapper(self.batch)
                mean_square(output).backward()
                torch.testing.assert_close(output.detach(), expected)
                assert_same_gradients(take_gradients(self.module), gradients)


def check_tensors(source: nn.Module, replicas: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raises `AssertionError` unless each replica holds an equal tensor on its device for each tensor of the source.

    Tensors are looked up in the modules' dictionaries. So a tensor that is made only when the attribute is read is not
    found.
    """
    assert len(replicas) == len(devices)
    wanted = {path: (module, values(module)) for path, module in source.named_modules()}
    for device, replica in zip(devices, replicas, strict=True):
        assert replica is not source
        found = dict(replica.named_modules())
        assert found.keys() == wanted.keys()
        for path, (module, expected) in wanted.items():
            assert type(found[path]) is type(module)
            for name, value in expected.items():
                tensor = stored(found[path], name)
                where = f"{path}.{name} on {device}"
                assert isinstance(tensor, Tensor), where
                assert tensor.device == device, where
                assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype), where
                assert torch.equal(tensor.detach().cpu(), value), where


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of the module's own parameters and buffers, without those of its children."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor.detach().cpu() for name, tensor in own.items() if tensor is not None}


def stored(module: nn.Module, name: str) -> object:
    """The entry of the module's dictionaries. Replicas of torch have their parameters among the attributes."""
    attributes = vars(module)
    for place in (attributes["_parameters"], attributes["_buffers"], attributes):
        if name in place:
            return place[name]
    raise AssertionError(f"no {name!r} in a replica's {type(module).__name__}")


@contextmanager
def changed(module: nn.Module) -> Iterator[None]:
    """Other values in every parameter and buffer, written through ``.data``, which moves no version counter."""
    tensors = [*module.parameters(), *module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.data.add_(1)
    try:
        yield
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.data.copy_(old)
