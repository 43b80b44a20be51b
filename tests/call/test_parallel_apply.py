"""Running each replica on its device: arguments, order, replicas that run at the same time, randomness.

Errors are in ``test_parallel_apply_errors``.
"""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, parallel_apply
from probe import Call

TIMEOUT = 20.0


def echo(*args: Any, **kwargs: Any) -> tuple:
    return args, kwargs


@pytest.mark.parametrize("serial", [False, True])
def test_inputs_are_a_tuple_a_list_or_one_argument(serial: bool, slots: list, root: torch.device) -> None:
    t = torch.ones(1, device=root)
    outputs = parallel_apply([Call(echo)] * 3, [(t, 1), [t, 2], {"key": t}], devices=slots, serial=serial)
    assert outputs == [((t, 1), {}), ((t, 2), {}), (({"key": t},), {})]
    kwargs = [{"a": 1}, {}, {"b": t}]
    outputs = parallel_apply([Call(echo)] * 3, [()] * 3, kwargs, slots, serial=serial)
    assert outputs == [((), {"a": 1}), ((), {}), ((), {"b": t})]


def test_the_device_is_that_of_the_first_tensor(root: torch.device) -> None:
    t = torch.ones(1, device=root)
    inputs = [("no tensor", {"x": [t]}), (t,)]
    assert parallel_apply([Call(echo)] * 2, inputs, devices=[root, None]) == [(inputs[0], {}), (inputs[1], {})]
    assert parallel_apply([Call(echo)] * 2, inputs) == [(inputs[0], {}), (inputs[1], {})]
    assert parallel_apply([Call(echo)] * 2, [()] * 2, [{"x": t}] * 2) == [((), {"x": t})] * 2


def current_and_arguments(*args: Any) -> tuple:
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None, args


def test_without_a_device_and_a_tensor_it_is_the_current_device(slots: list, root: torch.device) -> None:
    current = slots[-1]
    with nullcontext() if root.type == "cpu" else torch.accelerator.device_index(current.index):
        for devices in (None, [None, None]):
            assert parallel_apply([Call(echo)] * 2, (None, None), devices=devices) == [((None,), {})] * 2
            found = parallel_apply([Call(current_and_arguments)] * 2, [("a",), ("b",)], devices=devices)
            index = None if root.type == "cpu" else current.index
            assert found == [(index, ("a",)), (index, ("b",))]


def test_devices_that_are_no_list_are_refused() -> None:
    with pytest.raises(TypeError, match="'cpu': expected a list of devices"):
        parallel_apply([Call(echo)] * 3, [()] * 3, devices="cpu")


def test_lengths_have_to_agree(slots: list) -> None:
    modules = [Call(echo)] * 3
    with pytest.raises(ValueError, match="got 3 modules but 2 inputs"):
        parallel_apply(modules, [(), ()], devices=slots)
    with pytest.raises(ValueError, match="got 3 modules but 1 kwargs_tup"):
        parallel_apply(modules, [()] * 3, [{}], slots)
    with pytest.raises(ValueError, match="got 3 modules but 2 devices"):
        parallel_apply(modules, [()] * 3, None, slots[:2])
    with pytest.raises(ValueError, match="at least one module"):
        parallel_apply([], [])


@pytest.mark.parametrize("variable", [None, "", "0", "1"])
@pytest.mark.parametrize("argument", [None, True, False])
def test_serial_runs_in_the_calling_thread_in_slot_order(
    argument: bool | None, variable: str | None, slots: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATAPARALLEL_SERIAL", raising=False)
    if variable is not None:
        monkeypatch.setenv("DATAPARALLEL_SERIAL", variable)
    order: list[tuple[int, bool]] = []
    here = threading.get_ident()
    modules = [Call(lambda slot=slot: order.append((slot, threading.get_ident() == here))).eval() for slot in range(3)]
    with torch.no_grad():  # otherwise slots that share a generator would run one after the other
        parallel_apply(modules, [()] * 3, devices=slots, serial=argument)
    serial = argument if argument is not None else variable == "1"
    assert sorted(order) == [(slot, serial) for slot in range(3)]
    if serial:
        assert order == sorted(order)


class Together:
    """Tells if all replicas can run at the same time: each waits for the others for ``seconds``."""

    def __init__(self, replicas: int, seconds: float) -> None:
        self.barrier = threading.Barrier(replicas)
        self.seconds = seconds
        self.order: list[int] = []

    def run(self, slots: list, training: bool = False, **options: Any) -> bool:
        modules = [Call(lambda slot=slot: self.inside(slot)).train(training) for slot in range(len(slots))]
        return all(parallel_apply(modules, [()] * len(slots), devices=slots, **options))

    def inside(self, slot: int) -> bool:
        self.order.append(slot)
        try:
            self.barrier.wait(self.seconds)
        except threading.BrokenBarrierError:
            return False
        return True


def sharing(slots: list) -> list:
    """Slots with one generator."""
    return [slots[0]] * 3


@pytest.mark.parametrize("training", [False, True])
def test_replicas_that_share_a_generator_run_one_after_the_other(training: bool, slots: list) -> None:
    """While recording, and in training mode without recording too."""
    together = Together(3, seconds=0.2)
    with torch.set_grad_enabled(not training):
        assert not together.run(sharing(slots), training=training)
    assert together.order == [0, 1, 2]


def test_replicas_that_run_one_after_the_other_do_so_in_the_calling_thread(slots: list) -> None:
    threads: list[int] = []
    modules = [Call(lambda: threads.append(threading.get_ident())) for _ in range(3)]
    parallel_apply(modules, [()] * 3, devices=sharing(slots))
    parallel_apply(modules, [()] * 3, devices=slots, workers=1)
    assert threads == [threading.get_ident()] * 6


def test_they_run_together_where_nothing_is_recorded_or_drawn(slots: list) -> None:
    with torch.no_grad():
        assert Together(3, TIMEOUT).run(sharing(slots))
    with torch.inference_mode():
        assert Together(3, TIMEOUT).run(sharing(slots))


def test_they_run_together_where_workers_are_asked_for(slots: list) -> None:
    assert Together(3, TIMEOUT).run(sharing(slots), workers=3)


def test_workers_is_how_many_run_at_the_same_time(slots: list) -> None:
    with torch.no_grad():
        assert not Together(3, seconds=0.2).run(sharing(slots), workers=2)
        together = Together(2, TIMEOUT)
        assert together.run([slots[0]] * 4, workers=2)


@pytest.mark.slots(8)
def test_seeded_forwards_are_reproducible(slots: list, root: torch.device) -> None:
    """Recomputations draw what forwards have drawn: ``test_training_parity``."""
    module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4), nn.Dropout(0.5)).to(root)
    x = torch.randn(17, 8, device=root)

    def forward(serial: bool) -> Tensor:
        torch.manual_seed(1)
        return DataParallel(module, slots, serial=serial)(x).detach()

    first = forward(True)
    assert all(torch.equal(forward(False), first) for _ in range(20))
