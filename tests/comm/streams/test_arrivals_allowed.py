"""Copies of parameters are late only where nothing but lookups in replicas can meet them.

Clocks tell a race: a write to the source that no event orders after the copy that reads it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import DataParallel, comm
from dataparallel.comm.buckets import plan_buckets
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.comm.transport import FlatBroadcast
from dataparallel.replicas.build import ParameterRegistry
from nogpu.pytest import settle

pytestmark = [
    pytest.mark.devices("sim", "stand-in"),
    pytest.mark.apart,
    pytest.mark.usefixtures("no_compiler"),
]

WIDTH = 8


def slots() -> list[torch.device]:
    """Three slots. A function, because there is no such device where this file is collected for CPU slots."""
    return [torch.device(index) for index in range(3)]


@pytest.fixture(autouse=True)
def all_is_done_afterwards() -> Iterator[None]:
    yield
    settle()


@pytest.fixture
def x() -> Tensor:
    return torch.ones(6, WIDTH, device=slots()[0])


class Half(nn.Module):
    """Its forward leaves the last layer out, so only the end of the call waits for that layer's copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def in_single_buckets(model: nn.Module, cls: type[DataParallel] = DataParallel, **options: Any) -> DataParallel:
    """A wrapper in which each parameter is a bucket."""
    return cls(model, slots(), bucket_cap_mb=1e-9, **options)


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


class HalvesBeforeGather(DataParallel):
    def gather(self, outputs: Any, output_device: Any) -> Any:
        halve(self.module)
        return super().gather(outputs, output_device)


class HalvesAfterParallelApply(DataParallel):
    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        halve(self.module)
        return outputs


class HalvesAfterReplicate(DataParallel):
    def replicate(self, module: Any, device_ids: Any) -> Any:
        replicas = super().replicate(module, device_ids)
        halve(module)
        return replicas


class StepsInside(DataParallel):
    """Computes the gradients and steps an optimizer in the stage ``parallel_apply``."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        sum(output.sum().to(slots()[0]) for output in outputs).backward()
        torch.optim.SGD(self.module.parameters(), lr=0.1).step()
        return [output.detach() for output in outputs]


HALVING = [HalvesBeforeGather, HalvesAfterParallelApply, HalvesAfterReplicate]


@pytest.mark.parametrize(
    ("cls", "grad"), [*((cls, grad) for cls in HALVING for grad in (True, False)), (StepsInside, True)]
)
def test_a_stage_of_a_subclass_may_write_to_the_source(grad: bool, cls: type[DataParallel], x: Tensor) -> None:
    call = in_single_buckets(Half().to(slots()[0]), cls)
    for parameter in call.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            call(x)


def test_a_forward_on_a_single_slot_may_replicate_and_write(x: Tensor) -> None:
    """Its replicas end with no call of the library, so their copies are ordered on the computing streams."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Half()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                replicas = dp.replicate(self.inner, slots(), bucket_cap_mb=1e-9)
                outputs = dp.parallel_apply(replicas, dp.scatter(x, slots()), devices=slots())
                halve(self.inner)
                return dp.gather(outputs, slots()[0])

    call = DataParallel(Outer().to(slots()[0]), slots()[:1])
    for _ in range(3):
        call(x)


def test_a_source_may_get_other_memory_while_its_copies_travel() -> None:
    """What gets the former memory next must not meet the copy that reads it."""
    source = torch.ones(WIDTH, WIDTH, device=slots()[0])
    copies = [torch.empty(WIDTH * WIDTH, device=device) for device in slots()[1:]]
    arrivals = Arrivals(slots())
    (planned,), _ = plan_buckets([source], 1)
    send = partial(comm.broadcast, out=copies)
    arrivals.launch([FlatBroadcast(planned.indices, planned, [source], send, copies)], set())
    source.data = torch.empty(WIDTH, WIDTH, device=slots()[0])
    torch.zeros(WIDTH, WIDTH, device=slots()[0])
    arrivals.wait_for_copies()
    assert [copy.sum().item() for copy in copies] == [WIDTH * WIDTH] * 2


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_two_tensors_on_one_storage_may_be_written_by_either_name(form: Callable, kind: str, x: Tensor) -> None:
    """A replica writes to a tensor that is not the last layer's weight, but has the same memory."""

    class Shares(Half):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.other.mul_(0.5)
            return super().forward(x)

    model = Shares().to(slots()[0])
    other = model.last.weight.data[1:]
    if kind == "buffer":
        model.register_buffer("other", other)
    else:
        model.register_parameter("other", nn.Parameter(other))
    call = form(model, slots())
    for _ in range(3):
        with torch.no_grad():
            call(x)


def test_an_attribute_may_begin_to_refer_to_a_parameter(form: Callable, x: Tensor) -> None:
    class Reads(Half):
        held: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.held is not None:
                x = x + self.held[0].detach()
            return self.last(super().forward(x))

    model = Reads().to(slots()[0])
    call = form(model, slots())
    for _ in range(3):
        call(x).sum().backward()
    model.held = [model.last.bias]
    for _ in range(3):
        call(x).sum().backward()


@pytest.mark.parametrize(("value", "expected"), [("0", dict), ("off", dict), ("1", ParameterRegistry)])
def test_a_variable_turns_late_copies_off(
    value: str, expected: type, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPARALLEL_LATE_COPIES", value)
    found: set[type] = set()

    class Looked(Half):
        def forward(self, x: Tensor) -> Tensor:
            found.add(type(self.last._parameters))
            return super().forward(x)

    in_single_buckets(Looked().to(slots()[0]))(x)
    assert found == {expected}
