"""Gradients that wait on slots are added once; if the user throws a ``.grad`` away, they are dropped."""

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from persistent import (
    Branched,
    assert_same,
    build,
    gradients,
    kept_on_slots,
    loss,
    numbers,
    tensors_of,
    with_persistent_replicas,
)
from torch import Tensor, nn

from dataparallel import DataParallel, comm
from dataparallel.comm.streams.current import streams_set
from dataparallel.forms.persistent_tensors import PersistentTensors
from dataparallel.replicas.kept_replicas import KeptReplicas

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.fixture
def wrapped(net: Branched, slots: list) -> DataParallel:
    return with_persistent_replicas(net, slots)


def batches(root: torch.device, slots: list) -> list[Tensor]:
    return [numbers(root, 2 * len(slots) + step, seed=step) for step in range(3)]


def sums_are(wrapped: DataParallel, are_on: bool) -> None:
    tensors_of(wrapped).sums.are_on = are_on


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.parametrize(
    "synchronised", [(True,) * 3, (False, False, True), (False, True, False, True), (True, False, True)]
)
def test_accumulated_gradients_are_those_of_one_device(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device, synchronised: tuple
) -> None:
    for _ in range(3):  # in the first round the order of gradients is learnt
        net.zero_grad()
        twin.zero_grad()
        for step, are_on in enumerate(synchronised):
            x = numbers(root, 2 * len(slots) + step, seed=step)
            sums_are(wrapped, are_on)
            loss(wrapped(x)).backward()
            loss(twin(x)).backward()
        assert kept_on_slots(wrapped) == 0
        assert_same(gradients(net), gradients(twin))


def test_until_then_the_source_has_slot_0s(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    x = numbers(root, 2 * len(slots))
    sums_are(wrapped, False)
    loss(wrapped(x)).backward()
    loss(twin(x[:2])).backward()
    assert kept_on_slots(wrapped) > 0
    for ours, theirs in zip(gradients(net), gradients(twin), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=0, atol=1e-9)


def test_a_parameter_that_slot_0_does_not_use(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    """If only other slots have a gradient, the source's ``.grad`` is zeros: ``None`` would make the kept ones void."""
    x = numbers(root, 2 * len(slots), positive=True)
    y = x.clone()
    y[2:, 0] *= -1
    sums_are(wrapped, False)
    for call, module in ((wrapped, net), (twin, twin)):
        loss(call(y)).backward()
        assert module.branch.weight.grad is not None
        sums_are(wrapped, True)
        loss(call(x)).backward()
    assert_same(gradients(net), gradients(twin))


@pytest.mark.parametrize("are_on", [False, True])
def test_gradients_thrown_away_between_a_forward_and_its_backward(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device, are_on: bool
) -> None:
    one, two, three = batches(root, slots)
    loss(wrapped(one)).backward()
    sums_are(wrapped, False)
    loss(wrapped(one)).backward()
    for call, module in ((wrapped, net), (twin, twin)):
        value = loss(call(two))
        module.zero_grad()
        sums_are(wrapped, are_on)
        value.backward()
        sums_are(wrapped, True)
        loss(call(three)).backward()
    assert_same(gradients(net), gradients(twin))


@pytest.mark.devices("sim", "cuda")
def test_on_streams_of_the_callers(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    devices = [*dict.fromkeys(torch.device(slot) for slot in slots)]
    streams = {device: torch.Stream(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(torch.accelerator.current_stream(device))
    with streams_set(streams):
        for are_on, x in zip((True, False, False, True) * 2, batches(root, slots) * 3, strict=False):
            sums_are(wrapped, are_on)
            loss(wrapped(x)).backward()
            loss(twin(x)).backward()
        assert_same(gradients(net), gradients(twin))
    for device in devices:
        torch.accelerator.synchronize(device)


def test_nothing_is_sent_until_then(
    wrapped: DataParallel, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = numbers(root, 2 * len(slots))
    for _ in range(2):
        loss(wrapped(x)).backward()
    sums_are(wrapped, False)
    value = loss(wrapped(x))
    for name in ("reduce_add_coalesced", "reduce_add", "add_flat"):
        monkeypatch.setattr(comm, name, None)
    value.backward()


DISCARDS: dict[str, Callable[[Branched], object]] = {
    "zero_grad": lambda net: net.zero_grad(),
    "zero_grad to zeros": lambda net: net.zero_grad(set_to_none=False),
    "grad = None": lambda net: [setattr(parameter, "grad", None) for parameter in net.parameters()],
    "an optimizer's": lambda net: torch.optim.SGD(net.parameters(), lr=1).zero_grad(),
    "an optimizer's to zeros": lambda net: torch.optim.SGD(net.parameters(), lr=1).zero_grad(set_to_none=False),
    "zeros, one by one": lambda net: [p.grad.zero_() for p in net.parameters() if p.grad is not None],
    "other tensors": lambda net: [setattr(p, "grad", torch.zeros_like(p)) for p in net.parameters()],
}


@pytest.mark.parametrize("name", DISCARDS)
@pytest.mark.parametrize("learnt", [False, True])
def test_what_the_user_throws_away_is_gone(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device, name: str, learnt: bool
) -> None:
    one, two, three = batches(root, slots)
    if learnt:
        for _ in range(2):
            loss(wrapped(one)).backward()
            net.zero_grad()
    sums_are(wrapped, False)
    loss(wrapped(one)).backward()
    loss(twin(one)).backward()
    for module in (net, twin):
        DISCARDS[name](module)
    loss(wrapped(two)).backward()
    sums_are(wrapped, True)
    loss(wrapped(three)).backward()
    loss(twin(two)).backward()
    loss(twin(three)).backward()
    assert_same(gradients(net), gradients(twin))


def test_what_is_thrown_away_is_freed_at_the_next_forward(
    wrapped: DataParallel, net: Branched, slots: list, root: torch.device
) -> None:
    x = numbers(root, 2 * len(slots))
    for _ in range(2):
        loss(wrapped(x)).backward()
    sums_are(wrapped, False)
    loss(wrapped(x)).backward()
    assert kept_on_slots(wrapped) > 0
    net.zero_grad()
    with torch.no_grad():
        wrapped(x)
    assert kept_on_slots(wrapped) == 0


def test_another_backward_may_add_to_the_source_in_between(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    one, two, _ = batches(root, slots)
    sums_are(wrapped, False)
    for call, module in ((wrapped, net), (twin, twin)):
        loss(call(one)).backward()
        sum(parameter.square().sum() for parameter in module.parameters()).backward()
        sums_are(wrapped, True)
        loss(call(two)).backward()
    assert_same(gradients(net), gradients(twin))


def test_what_a_summed_pass_does_not_reach_is_summed_too(slots: list, root: torch.device) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = build(root), build(root)

        def forward(self, x: Tensor, take_left: bool) -> Tensor:
            return self.left(x) if take_left else self.right(x)

    net, twin = Two(), Two()
    wrapped = with_persistent_replicas(net, slots)
    x = numbers(root, 2 * len(slots))
    for _ in range(2):
        for call, module in ((wrapped, net), (twin, twin)):
            module.zero_grad()
            sums_are(wrapped, False)
            loss(call(x, True)).backward()
            sums_are(wrapped, True)
            loss(call(x, False)).backward()
        assert kept_on_slots(wrapped) == 0
        assert_same(gradients(net), gradients(twin))


def test_questions_for_gradients_neither_keep_nor_take_any(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    one, two, three = batches(root, slots)
    loss(wrapped(one)).backward()
    for _ in range(2):
        net.zero_grad()
        twin.zero_grad()
        sums_are(wrapped, False)
        loss(wrapped(one)).backward()
        loss(twin(one)).backward()
        for are_on in (False, True):
            sums_are(wrapped, are_on)
            found = torch.autograd.grad(loss(wrapped(two)), list(net.parameters()))
            assert_same([*found], [*torch.autograd.grad(loss(twin(two)), list(twin.parameters()))])
            assert kept_on_slots(wrapped) > 0
        loss(wrapped(three)).backward()
        loss(twin(three)).backward()
        assert_same(gradients(net), gradients(twin))


def test_a_changed_module_loses_nothing(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    """Its tensors are made anew. Before that, waiting gradients are added to the source's."""
    one, two, _ = batches(root, slots)
    sums_are(wrapped, False)
    for call, module in ((wrapped, net), (twin, twin)):
        loss(call(one)).backward()
        module.last.requires_grad_(False)
        loss(call(two)).backward()
        sums_are(wrapped, True)
        loss(call(two)).backward()
    assert_same(gradients(net), gradients(twin))


def test_hooks_see_the_complete_sum(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    seen: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    for name, module in (("ours", net), ("theirs", twin)):
        module.second.weight.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
    one, two, _ = batches(root, slots)
    for are_on, x in ((False, one), (True, two)):
        sums_are(wrapped, are_on)
        loss(wrapped(x)).backward()
        loss(twin(x)).backward()
    assert [len(each) for each in seen.values()] == [2, 2]
    torch.testing.assert_close(seen["ours"][1], seen["theirs"][1], rtol=0, atol=1e-9)


def test_an_optimizer_in_backward(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    for module in (net, twin):
        for parameter in module.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.01)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for x in batches(root, slots) * 2:
        loss(wrapped(x)).backward()
        loss(twin(x)).backward()
    assert_same([*net.parameters()], [*twin.parameters()])


def test_a_step_that_a_scaler_skips_leaks_nothing(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device
) -> None:
    """An infinity, found after an accumulated and a summed pass."""
    one, two, three = batches(root, slots)
    for step in range(4):
        for call, module in ((wrapped, net), (twin, twin)):
            module.zero_grad()
            sums_are(wrapped, False)
            loss(call(one)).backward()
            sums_are(wrapped, True)
            value = loss(call(two))
            (value * float("inf") if step % 2 else value).backward()
            if all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None):
                torch.optim.SGD(module.parameters(), lr=0.01).step()
    for module in (net, twin):
        module.zero_grad()
    loss(wrapped(three)).backward()
    loss(twin(three)).backward()
    assert_same(gradients(net), gradients(twin))


def test_what_is_dropped_is_freed_without_a_collection(slots: list, root: torch.device) -> None:
    net = build(root)
    wrapped = with_persistent_replicas(net, slots)
    for are_on in (True, True, False):
        sums_are(wrapped, are_on)
        loss(wrapped(numbers(root, 2 * len(slots)))).backward()
    parameter, bucket = weakref.ref(net.first.weight), weakref.ref(tensors_of(wrapped).sums.buckets[0])
    gc.disable()
    try:
        del net, wrapped
        until = time.monotonic() + 5  # a thread of the engine may be late to drop a graph
        while (parameter() is not None or bucket() is not None) and time.monotonic() < until:
            time.sleep(0.01)
        assert (parameter(), bucket()) == (None, None)
    finally:
        gc.enable()


def test_gradients_that_were_added_on_a_slot_which_has_none_in_the_pass_that_sums(
    slots: list, root: torch.device
) -> None:
    """The sum waits for the addition, although it has nothing else to wait for on that slot."""

    class Sometimes(nn.Module):
        """Uses its layer for two samples or more. To look at their values, the host would wait for the slot."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)  # two parameters in a bucket, which the slot's device puts in one buffer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if len(x) > 1 else x * 1

    net, twin = Sometimes().double().to(root), Sometimes().double().to(root)
    wrapped = DataParallel(net, slots, workers=1)  # to measure the number of permits, the host would wait
    wrapped._kept = KeptReplicas(PersistentTensors([*map(torch.device, slots)], 2**20, 2**20, True))
    x = numbers(root, 2 * len(slots))[:, :4].contiguous()
    for are_on, samples in ((True, len(x)), (False, len(x)), (False, len(x)), (True, len(x) - 1)):
        sums_are(wrapped, are_on)
        wrapped(x[:samples]).square().sum().backward()
        sum(twin(chunk).square().sum() for chunk in x[:samples].chunk(len(slots))).backward()
    assert_same(gradients(net), gradients(twin))
