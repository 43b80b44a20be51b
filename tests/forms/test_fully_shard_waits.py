"""Each wait and each event of a sharded model is needed: without it the clocks find a race, or memory freed too early.

Kernels that read peers gather and sum, or copies where a situation says so. ``tests/left_out.py`` leaves a guard out.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from loops import wait_for_the_engine
from torch import Tensor, nn

from clocked import check_clocks
from dataparallel import comm
from dataparallel.comm.streams.current import current_streams, streams_joined, streams_set
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.sharded.units.backward import UnitGradients
from left_out import guards_in, left_out
from nogpu.pytest import settle

pytestmark = [pytest.mark.devices("sim", "stand-in"), pytest.mark.slots(4)]

WIDTH = 64


class Block(nn.Sequential):
    """A linear layer and its activation. ``hides``: it returns nothing, so that no gather of outputs orders streams."""

    hides = False

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor | None:
        y = super().forward(x)
        return None if self.hides else y


class Net(nn.Sequential):
    """Three blocks and a head.

    ``hides``: as of a block; the output of each slot is in ``kept`` alone. ``left``: has an entry for each slot whose
    backward may still come to the first block; the last one fails there.
    """

    hides = False

    def __init__(self, slots: Sequence[torch.device], **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(*(Block() for _ in range(3)), nn.Linear(WIDTH, 8))
        self.kept: dict[torch.device, Tensor] = {}
        self.left: list[int] = []
        self.to(slots[0])
        for block in [*self][:-1]:
            fully_shard(block, devices=slots, **options)
        fully_shard(self, devices=slots, **options)

    def forward(self, x: Tensor) -> Tensor | None:
        first = self[0](x)
        if self.left:
            first.register_hook(self.take_one)
        y = super().forward(first)
        self.kept[y.device] = y
        return None if self.hides else y

    def take_one(self, gradient: Tensor) -> None:
        self.left.pop()
        if not self.left:
            raise ValueError("planted")


def batch(slots: Sequence[torch.device], samples: int = 8) -> Tensor:
    x = torch.ones(samples, WIDTH, device=slots[0])
    for slot in slots:  # what has been made so far is ready for any stream
        torch.accelerator.synchronize(slot)
    return x


def other_streams(slots: Sequence[torch.device]) -> dict[torch.device, torch.Stream]:
    return {slot: torch.Stream(slot) for slot in slots}


@torch.no_grad()
def halve(net: nn.Module) -> None:
    """Writes all parameters."""
    for parameter in net.parameters():
        parameter.mul_(0.5)


def training(slots: list, **options: Any) -> None:
    net = Net(slots, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = batch(slots)
    for _ in range(2):
        for _ in range(2):  # the second one adds to gradients
            net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def training_in_twos(slots: list) -> None:
    training(slots, reshard_after_forward=2)


def training_in_bfloat16(slots: list) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training(slots, mp_policy=policy, reshard_after_forward=False)


def inference(slots: list) -> None:
    net, x = Net(slots), batch(slots)
    net.hides = True
    with torch.no_grad():
        for _ in range(2):
            net(x)
            halve(net)


def halve_aside(net: Net, slots: list) -> None:
    """Halves the parameters on other streams, and gives the next call the events after that."""
    side = other_streams(slots)
    for slot, stream in current_streams(slots).items():
        side[slot].wait_stream(stream)
    with streams_set(side):
        halve(net)
    net.set_post_optim_event([stream.record_event() for stream in side.values()])


def an_event_after_the_optimizer(slots: list) -> None:
    """The optimizer steps on streams that nothing else orders before the next call."""
    net, x = Net(slots), batch(slots)
    for _ in range(2):
        net(x).square().mean().backward()
        halve_aside(net, slots)


def an_event_after_other_shards(slots: list) -> None:
    """Before the next call shards are packed, which have been written on such streams."""
    net, x = Net(slots), batch(slots)
    net(x)
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    halve_aside(net, slots)
    net(x)


def streams_that_change(slots: list) -> None:
    net, x = Net(slots), batch(slots)
    for _ in range(2):
        loss = net(x).square().mean()
        with streams_joined(other_streams(slots)):
            loss.backward()
            halve(net)


def a_graph_older_than_its_pass(slots: list) -> None:
    net, x = Net(slots), batch(slots)
    loss = net(x).square().mean()
    with streams_joined(other_streams(slots)):
        later = net(x).square().mean()
        (loss + later).backward()


def gradients_that_wait_on_other_streams(slots: list) -> None:
    """The sums of all slots, and of one, read gradients in memory of streams of another forward."""
    net, x = Net(slots), batch(slots)
    net(x).square().mean().backward()
    for samples in (len(x), 1):
        with streams_joined(other_streams(slots)):
            loss = net(x).square().mean()
        with net.no_sync():
            loss.backward()
        del loss
        net(x[:samples]).square().mean().backward()


def a_change_after_steps_on_other_streams(slots: list) -> None:
    """Shards are packed anew, and the former ones lie in memory of streams that no later step has used.

    So do sums of gradients of the first block, which is called twice.
    """
    net, x = Net(slots), batch(slots)
    for needs in (True, False, False, True):
        net[0][0].weight.requires_grad_(needs)
        with streams_joined(other_streams(slots)):
            net(x).square().mean().backward()
        net.zero_grad()


def an_optimizer_in_a_hook(slots: list) -> None:
    net, x = Net(slots), batch(slots)
    net[1][0].weight.register_post_accumulate_grad_hook(lambda parameter: halve(net))
    for _ in range(2):
        net(x).square().mean().backward()


def fewer_slots(slots: list) -> None:
    """The last owners get no samples, and still sum. Their gradients are written between forward and backward."""
    net, x = Net(slots), batch(slots)
    net(x).square().mean().backward()
    loss = net(x[:2]).square().mean()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.grad.mul_(2)
    loss.backward()


def a_loss_of_one_slot(slots: list) -> None:
    """Its backward is after the forward of no other slot, whose piece it gathers."""
    net, x = Net(slots, reshard_after_forward=2), batch(slots)
    net.hides = True
    net(x)
    net.kept[torch.device(slots[2])].sum().backward()


def unshard_and_reshard(slots: list) -> None:
    net = Net(slots)
    batch(slots)
    halve(net)
    for waits in (False, True):
        net[0].unshard(async_op=not waits)
        net[0].reshard()
        halve(net)
    net[0].unshard()
    halve(net)


def unshard_in_vain(slots: list) -> None:
    """`reshard` frees what is not there yet, and orders later writes to the shards right after that."""
    net = Net(slots)
    batch(slots)
    net[0].unshard(async_op=True)
    fully_shard.state(net[0]).unit.free()
    check_clocks()
    net[0].reshard()


def use_on_other_streams(slots: list) -> None:
    """Nothing else orders these streams after those that filled the parameters, and before those that free them."""
    net = Net(slots)[0]
    net.hides = True
    net.unshard()
    side = other_streams(slots)
    with streams_set(side), torch.no_grad():
        net(torch.ones(8, WIDTH, device=slots[0]))
    net.reshard()
    check_clocks()
    for slot, stream in current_streams(slots).items():  # before shards are dropped
        stream.wait_stream(side[slot])


def a_sum_that_fails(slots: list) -> None:
    """After some owners of one unit have summed."""
    net, x = Net(slots), batch(slots)
    net(x).square().mean().backward()
    ends, number = UnitGradients._end_sum, [0]

    def end(self: UnitGradients, *args: Any) -> None:
        ends(self, *args)
        number[0] += 1
        if number[0] == 3:
            raise ValueError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitGradients, "_end_sum", end)
        fail(net, x, slots)


def a_model_that_fails(slots: list) -> None:
    net, x = Net(slots), batch(slots)
    net(x).square().mean().backward()
    net.left += range(len(slots))
    fail(net, x, slots)


def fail(net: Net, x: Tensor, slots: list) -> None:
    """Runs a backward that fails, and goes on."""
    with contextlib.suppress(ValueError):
        net(x).square().mean().backward()
    wait_for_the_engine(slots)
    net.zero_grad()
    halve(net)
    net(x)


BY_KERNELS: dict[str, tuple[Callable[[list], None], str]] = {
    "backward.py:WaitingSums.received:record_stream:1": (gradients_that_wait_on_other_streams, "freed too early: "),
    "backward.py:UnitGradients._delivery:Event:1": (training, "race: sum_float32 reads"),
    "backward.py:UnitGradients.deliver:record_stream:1": (a_change_after_steps_on_other_streams, "freed too early: "),
    "backward.py:UnitGradients.deliver:release_deliveries:1": (training, "freed too early: .*sum_float32, which reads"),
    "backward.py:UnitGradients.deliver:streams_joined:1": (a_graph_older_than_its_pass, "race: sum_float32 reads"),
    "backward.py:UnitGradients.add_up:Event:1": (a_sum_that_fails, "freed too early: "),
    "backward.py:UnitGradients.add_up:wait_for:1": (training, "race: sum_float32 reads"),
    "backward.py:UnitGradients.add_up:wait_for:2": (a_sum_that_fails, "freed too early: "),
    "unit.py:OwnedShards.pack:record_stream:1": (a_change_after_steps_on_other_streams, "freed too early: "),
    "unit.py:TreeStreams.note_casts:Event:1": (training_in_bfloat16, "race: copy_many reads"),
    "gather.py:PullSource._copying:make_wait:1": (training_in_bfloat16, "race: "),
    "gather.py:PullSource._let_go:wait_for:1": (training_in_bfloat16, "freed too early: .*copy_many, which reads"),
    "tree.py:Unit.start_unshard:Event:1": (unshard_and_reshard, "race: copy_many reads"),
    "unit.py:TreeStreams.make_owners_wait:Event:1": (inference, "race: .*copy_many, which reads"),
    "gather.py:SourceOfPieces.keep:Event:1": (a_loss_of_one_slot, "race: copy_many reads"),
    "gather.py:SourceOfPieces.end_pull:make_wait:1": (training_in_twos, "freed too early: .*copy_many"),
    "gather.py:SlotUnit._allocate_for_kernels:make_wait:1": (training, "race: copy_many writes"),
    "gather.py:SlotUnit._fill:wait_for:1": (training, "race: .*copy_many, which writes"),
    "gather.py:SlotUnit._order_computing_streams:make_wait:1": (use_on_other_streams, "race: .*copy_many"),
    "gather.py:SlotUnit._pull:wait_for:1": (training_in_bfloat16, "race: copy_many reads"),
    "gather.py:SlotUnit._pull_all:Event:1": (training_in_bfloat16, "freed too early: .*copy_many"),
    "gather.py:SlotUnit._pull_all:wait_for:1": (training, "race: copy_many reads"),
    "gather.py:SlotUnit._pull_all:Event:2": (training, "race: .*copy_many, which writes"),
    "gather.py:SlotUnit.free:Event:1": (use_on_other_streams, "freed too early: "),
    "gather.py:SlotUnit.free:wait_for:1": (use_on_other_streams, "freed too early: "),
    "gather.py:SlotUnit.free:wait_for:2": (unshard_in_vain, "freed too early: .*copy_many, which writes"),
    "backward.py:BackwardPass._make_computing_wait:wait_for:1": (training, "sum_float32|_foreach_add_"),
    "backward.py:BackwardPass.drop:_make_computing_wait:1": (a_model_that_fails, "freed too early: "),
    "backward.py:BackwardPass.make_callers_wait:Event:1": (streams_that_change, "race: "),
    "backward.py:BackwardPass.make_callers_wait:wait_for:1": (streams_that_change, "race: "),
    "backward.py:BackwardPass.note_sums:Event:1": (training, "sum_float32|_foreach_add_"),
    "backward.py:BackwardPass.release_deliveries:make_wait:1": (
        training,
        "freed too early: .*sum_float32, which reads",
    ),
    "backward.py:BackwardPass.wait_for_sums:_make_computing_wait:1": (training, "sum_float32|_foreach_add_"),
    "unit.py:TreeStreams.make_owners_wait:wait_for:1": (inference, "race: .*copy_many, which reads"),
    "tree.py:Tree._wait_for_optimizer:wait_for:1": (an_event_after_other_shards, "race: "),
    "tree.py:Tree.take_post_optim_event:GivenEvents:1": (an_event_after_the_optimizer, "race: copy_many reads"),
    "meeting of calls": (training, "race: copy_many reads"),
    "meeting of casts": (training_in_bfloat16, "copy_many"),
    "meeting of pulls": (inference, "race: .*copy_many, which reads"),
    "meeting of deliveries": (training, "race: sum_float32 reads"),
    "meeting of sums": (training, "sum_float32|_foreach_add_"),
}
"""For each guard a situation that needs it, and what the clocks say without it."""

BY_COPIES: dict[str, tuple[Callable[[list], None], str]] = {
    "backward.py:UnitGradients._delivery:Event:1": (fewer_slots, "race: "),
    "gather.py:SlotUnit._fill:Event:1": (training, "freed too early: "),
    "gather.py:SlotUnit._fill:wait_for:2": (training, "freed too early: "),
    "gather.py:SlotUnit._pull:make_wait:1": (training_in_bfloat16, "race: "),
    "gather.py:SlotUnit._pull_all:wait_for:1": (training, "race: "),
}
"""Guards of copies alone, and some that are theirs too."""

ELSEWHERE = {
    "tree.py:RootCall.gather_for_backward:make_wait:1",  # an order of launches: it costs time, and no value
    "backward.py:UnitGradients._empty_delivery:release_deliveries:1",  # as for an owner that has delivered
    "backward.py:BackwardPass.wait_for_sums:synchronize:1",  # the host adds: tests/sharded/units/test_backward.py
    "unit.py:wait_for:make_wait:1",  # each use of it is a guard
    *(f"unit.py:TreeStreams.meet:{call}:1" for call in ("wait_for", "Event")),  # each purpose is one
}

GUARDS = {name: guard for name, guard in guards_in("sharded/units").items() if "OverMachines" not in name}


HELD = {
    "gather.py:SourceOfPieces.end_pull:make_wait:1",
    "backward.py:UnitGradients.deliver:release_deliveries:1",
    "gather.py:SlotUnit._fill:Event:1",
    "gather.py:SlotUnit._fill:wait_for:2",
    "backward.py:BackwardPass.drop:_make_computing_wait:1",
    "backward.py:BackwardPass.release_deliveries:make_wait:1",
}
"""Guards of memory alone, which on CUDA is held until the host knows that peers are done (``comm.streams.held``)."""


def expect_without(name: str, situation: Callable[[list], None], found: str, slots: list) -> None:
    if torch.device(slots[0]).type == "cuda" and name in HELD:
        pytest.skip("the memory is held")
    guard, purpose = GUARDS.get(name), None
    if guard is None:
        guard, purpose = GUARDS["unit.py:TreeStreams.meet:wait_for:1"], name.removeprefix("meeting of ")

    def run() -> None:
        situation(slots)
        gc.collect()
        settle()

    with left_out(guard, purpose), pytest.raises(RuntimeError, match=found):
        run()
    gc.collect()
    for slot in slots:
        torch.accelerator.synchronize(slot)
    with contextlib.suppress(RuntimeError):  # what else has been found
        settle()


@pytest.fixture
def peer_slots(slots: list) -> list:
    if (reason := why_no_tables(slots)) is not None:
        pytest.skip(reason)
    return slots


def test_every_guard_has_a_situation() -> None:
    meetings = {name for name in BY_KERNELS if name.startswith("meeting")}
    assert {*BY_KERNELS, *BY_COPIES} - meetings | ELSEWHERE == {*GUARDS}


@pytest.mark.parametrize("name", BY_KERNELS)
def test_kernels_need_each_wait(name: str, peer_slots: list) -> None:
    expect_without(name, *BY_KERNELS[name], peer_slots)


@pytest.mark.parametrize("name", BY_COPIES)
def test_copies_need_each_wait(name: str, slots: list) -> None:
    situation, found = BY_COPIES[name]
    with comm.using(transport="copy"):
        expect_without(name, situation, found, slots)


@pytest.mark.parametrize("transport", [None, "copy"])
@pytest.mark.parametrize("situation", {situation: None for situation, _ in (BY_KERNELS | BY_COPIES).values()})
def test_with_all_waits_nothing_is_found(situation: Callable[[list], None], transport: str | None, slots: list) -> None:
    with comm.using(transport=transport) if transport else contextlib.nullcontext():
        situation(slots)
    check_clocks()
