"""A communication hook on a module that is replicated over machines: what each rank is given, and what may go wrong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from over_machines import assert_close, batch_of, build, gradients, loss_of, mean_over_ranks, over_machines
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.futures import Future

from dataparallel.gradients import machine_sums
from dataparallel.gradients.comm_hooks import GradBucket
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed
from machine_ranks import on_machines, on_mortal_machines

BOTH = pytest.mark.parametrize("slots", [2, 1])


def done(tensor: torch.Tensor) -> Future:
    future: Future = Future()
    future.set_result(tensor)
    return future


def step(model: Any, rank: int, number: int, device: torch.device) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss_of(model(batch_of(rank, number).to(device))).backward()
    return gradients(model)


def on_one_device(number: int, ranks: int = 2) -> list[torch.Tensor | None]:
    """The gradients of what all ranks do in a step, averaged."""
    model = build(torch.device("cpu"))
    mean_over_ranks(model, [loss_of(model(batch_of(rank, number))) for rank in range(ranks)])
    return gradients(model)


# ---- what it is given ------------------------------------------------------------------------------------------------


def averaged(rank: int, devices: list[torch.device], ranks: int = 2) -> None:
    """In steps in which both ranks, one rank and none take the branch, and nobody uses a layer.

    A hook finds what it sends in host memory. What the host has waited for, any stream may read.
    """
    sums, number_of_calls = [], itertools.count()
    stage = machine_sums.stage
    machine_sums.stage = lambda machines, flat: sums.append(flat) or stage(machines, flat)

    def hook(state: Any, bucket: GradBucket) -> Future:
        flat = sums[next(number_of_calls)]
        with nullcontext() if flat.device.type == "cpu" else torch.Stream(flat.device):
            flat * 1
        return allreduce_hook(state, bucket)

    model = over_machines(build(devices[0]), devices)
    model.register_comm_hook(None, hook)
    for number in range(4):
        assert_close(step(model, rank, number, devices[0]), on_one_device(number, ranks))
    if devices[0].type != "cpu":
        torch.accelerator.synchronize(devices[0])


@BOTH
@pytest.mark.parametrize("level", ["OFF", pytest.param("DETAIL", marks=pytest.mark.devices("cpu"))])
def test_gradients_are_those_of_one_device(slots: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is ``None`` where no rank has used the parameter, although its zeros have travelled.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch meets all ranks before each collective of the hook's group.
    """
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    on_machines(averaged, slots=slots)


def local(rank: int, devices: list[torch.device], average: bool) -> None:
    """The hook sends nothing: each rank keeps its own sum, whatever ``average`` is."""
    model = over_machines(build(devices[0]), devices, average=average)
    kinds, orders = set(), []

    def hook(state: Any, bucket: GradBucket) -> Future:
        kinds.add(bucket.buffer().device.type)
        orders.append((bucket.index(), bucket.is_last(), [each.shape for each in bucket.parameters()]))
        return done(bucket.buffer())

    model.register_comm_hook(None, hook)
    for number in (0, 3):
        orders.clear()
        found = step(model, rank, number, devices[0])
        alone = build(torch.device("cpu"))
        loss_of(alone(batch_of(rank, number))).backward()
        assert_close(found, gradients(alone))
        assert [index for index, _, _ in orders] == [*range(len(orders))]
        assert [last for _, last, _ in orders] == [False] * (len(orders) - 1) + [True]
    assert kinds == {"cpu"}, "gloo sends what is in host memory"
    said: list[Any] = [None, None]
    dist.all_gather_object(said, orders)
    assert said[0] == said[1]


@BOTH
@pytest.mark.parametrize("average", [True, False])
def test_a_bucket_is_the_sum_over_the_slots_in_host_memory(slots: int, average: bool) -> None:
    on_machines(local, average, slots=slots)


def without_sync(rank: int, devices: list[torch.device]) -> None:
    model = over_machines(build(devices[0]), devices)
    calls = []

    def noted(state: Any, bucket: GradBucket) -> Any:
        calls.append(bucket.index())
        return allreduce_hook(state, bucket)

    model.register_comm_hook(dist.group.WORLD, noted)
    step(model, rank, 0, devices[0])
    model.zero_grad()
    calls.clear()
    with model.no_sync():
        loss_of(model(batch_of(rank, 3).to(devices[0]))).backward()
    assert calls == []
    loss_of(model(batch_of(rank, 4).to(devices[0]))).backward()
    assert calls
    twin = build(torch.device("cpu"))
    for number in (3, 4):
        mean_over_ranks(twin, [loss_of(twin(batch_of(each, number))) for each in range(2)])
    assert_close(gradients(model), gradients(twin))


@BOTH
def test_after_no_sync_it_gets_the_sum_of_all_backwards(slots: int) -> None:
    on_machines(without_sync, slots=slots)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def gone(bucket: GradBucket, result: Any) -> Any:
    raise KeyError("gone")


WRONG: dict[str, Callable[[GradBucket, Any], Any]] = {
    "raises": gone,
    "returns no future": lambda bucket, future: bucket.buffer(),
    "has another size": lambda bucket, future: future.then(lambda each: each.value()[0][:-1]),
    "fails later": lambda bucket, future: future.then(lambda each: gone(bucket, each)),
}


def assert_over(model: Any, rank: int, device: torch.device) -> None:
    """The failure has ended the group, and no hook is called any more."""
    with pytest.raises(PeerFailed, match="Start all processes again, from a checkpoint"):
        step(model, rank, 3, device)
    assert all(each is None for each in gradients(model))


def wrong_on(rank: int, devices: list[torch.device], wrong: str, ranks: list[int]) -> None:
    """The second call in the second step sends what it has to send, and then something is wrong."""
    model = over_machines(build(devices[0]), devices)
    calls = -1

    def breaks(state: Any, bucket: GradBucket) -> Any:
        nonlocal calls
        calls += calls >= 0
        future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        if calls == 2 and rank in ranks:
            future.wait()
            return WRONG[wrong](bucket, future)
        return future

    model.register_comm_hook(None, breaks)
    step(model, rank, 0, devices[0])
    calls = 0
    model.zero_grad()
    kept = [torch.ones_like(each) for each in model.parameters()]
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        parameter.grad = grad
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"breaks.* for bucket 1 of ") as raised:
        loss_of(model(batch_of(rank, 3).to(devices[0]))).backward()
    assert isinstance(raised.value, PeerFailed) == (rank not in ranks)
    assert rank in ranks or f"rank {ranks[0]} failed" in str(raised.value)
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        assert parameter.grad is grad
        assert bool((grad == 1).all())
    assert calls == 2, "a bucket after the failure was called"
    assert_over(model, rank, devices[0])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_one_on_one_rank_changes_nothing_anywhere(wrong: str) -> None:
    on_machines(wrong_on, wrong, [1])


@pytest.mark.parametrize("wrong", ["raises", "has another size"])
def test_a_wrong_one_on_all_ranks_changes_nothing(wrong: str) -> None:
    on_machines(wrong_on, wrong, [0, 1], slots=1)


def raises_before_it_sends(rank: int, devices: list[torch.device]) -> None:
    model = over_machines(build(devices[0]), devices)
    model.register_comm_hook(None, allreduce_on_rank_0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"allreduce_on_rank_0.* bucket 0 of ") as raised:
        step(model, rank, 0, devices[0])
    took = time.monotonic() - began
    assert took < 15, "it has waited for the group's timeout"
    assert "KeyError: 'not here'" in str(raised.value)
    assert all(each is None for each in gradients(model))
    with pytest.raises(MachinesError, match="Start all processes again"):
        step(model, rank, 1, devices[0])


def allreduce_on_rank_0(state: Any, bucket: GradBucket) -> Any:
    if dist.get_rank() == 1:
        raise KeyError("not here")
    return allreduce_hook(dist.group.WORLD, bucket)


def test_one_that_raises_before_it_sends_leaves_nobody_waiting() -> None:
    """The other rank waits in its hook for what never comes."""
    ended = on_mortal_machines(raises_before_it_sends, group_timeout=20)
    assert [each.error for each in ended] == [None, None]


def different(rank: int, devices: list[torch.device], second: bool) -> None:
    model = over_machines(build(devices[0]), devices)
    if rank == 0:
        model.register_comm_hook(None, allreduce_hook)
    elif second:
        model.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(MachinesDiffer, match="allreduce_hook"):
        step(model, rank, 0, devices[0])
    assert all(each is None for each in gradients(model))


@pytest.mark.parametrize("second", [True, False])
def test_ranks_that_have_different_hooks_are_told(second: bool) -> None:
    on_machines(different, second, slots=1)


def backward_fails(rank: int, devices: list[torch.device]) -> None:
    model = over_machines(build(devices[0]), devices)
    model.register_comm_hook(None, allreduce_hook)
    step(model, rank, 0, devices[0])
    model.zero_grad()

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("stop")

    def fail_after(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = model.first.register_forward_hook(fail_after) if rank == 1 else None
    with pytest.raises((KeyError, PeerFailed)):
        loss_of(model(batch_of(rank, 3).to(devices[0]))).backward()
    if handle is not None:
        handle.remove()
    assert all(each is None for each in gradients(model))
    assert_over(model, rank, devices[0])


@BOTH
def test_a_backward_that_fails_on_one_rank_leaves_the_others_waiting_for_nothing(slots: int) -> None:
    """A hook of the other rank may still wait, in the group of the user, until this rank ends."""
    for ended in on_mortal_machines(backward_fails, slots=slots, group_timeout=20):
        assert ended.error is None
        assert ended.seconds < 15
