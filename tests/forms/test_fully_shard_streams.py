"""A sharded model on any streams, its backward on others than its forward; launches and waits grow with the slots."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clocked
from clocked import check_clocks
from dataparallel import _torch, comm
from dataparallel.comm.streams.current import Event, streams_joined
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.sharded import ShardedTensor
from dataparallel.sharded.units import tree
from dataparallel.sharded.units.buffers import FullBuffer
from dataparallel.sharded.units.calls import RootCall

pytestmark = pytest.mark.devices("sim", "stand-in")


@pytest.mark.parametrize("steps_on_others", [1, 3])
@pytest.mark.parametrize("samples", [6, 1])
def test_steps_on_other_streams_than_the_first(slots, root, steps_on_others, samples):
    """The clocks raise if memory of one stream is used on another without an order, or goes back to the wrong one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(root)
    for layer in (model[0], model[2]):
        fully_shard(layer, devices=slots)
    fully_shard(model, devices=slots)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):  # the second one adds to gradients
            model(torch.randn(samples, 8, device=root)).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
        with streams_joined({device: torch.Stream(device) for device in slots}):
            for _ in range(steps_on_others):
                step()
            check_clocks()
    check_clocks()


@pytest.mark.parametrize("frees", [False, True])
def test_a_step_may_follow_unshard(slots, root, frees):
    """The clocks raise if the optimizer writes to shards that other slots still read."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(root)
    fully_shard(model[0], devices=slots)
    fully_shard(model, devices=slots)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(6, 64, device=root)).sum().backward()
    if frees:
        model[0].unshard(async_op=True)
        model[0].reshard()
    else:
        model[0].unshard()
    optimizer.step()
    check_clocks()


def test_gradients_that_wait_on_the_slots_belong_to_the_streams_of_the_step(slots, root):
    """Operators on sharded tensors run on the streams that operators with a graph have used, here other ones."""
    model = fully_shard(nn.Linear(64, 64).to(root), devices=slots)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with streams_joined({device: torch.Stream(device) for device in slots}):
        model.weight * 2
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(6, 64, device=root)).square().mean().backward()
        model(torch.randn(6, 64, device=root)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        check_clocks()


def step_in_hooks(model: nn.Module) -> None:
    """Each parameter gets an optimizer of its own, which steps and drops the gradient as soon as that is complete."""
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters() if p.requires_grad}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def halve(model: nn.Module) -> None:
    """Writes all parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def gather_the_first_in_vain(model: nn.Module) -> None:
    """In backward the parameters of the first layer are gathered ahead, and not used."""
    model[0].requires_grad_(False)
    model[1].set_modules_to_backward_prefetch([model[0]])


@pytest.mark.parametrize("width", [64, 256])
def test_a_hook_on_one_gradient_may_write_all_parameters(slots, root, width):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)]).to(root)
    for layer in model:
        fully_shard(layer, devices=slots)
    fully_shard(model, devices=slots)
    gather_the_first_in_vain(model)
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: halve(model))
    for _ in range(2):
        model(torch.randn(6, width, device=root)).square().mean().backward()
        check_clocks()


@pytest.mark.slots(2)
def test_after_a_call_that_failed_parameters_are_written_when_they_have_been_cast(slots, root, monkeypatch):
    """A device has no room for what it would receive: no pull says when the casts have read the shards."""

    def pull(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(256, 256).to(root), devices=slots, mp_policy=policy)
    monkeypatch.setattr(FullBuffer, "pull", pull)
    monkeypatch.setattr(FullBuffer, "pull_by", pull)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        model(torch.randn(6, 256, device=root))
    halve(model)
    check_clocks()


def test_gathers_ahead_in_backward_come_after_the_sums_that_were_launched(slots, root, monkeypatch):
    """The next delivery waits for these sums, and links serve copies in the order of their launches.

    Kernels that read peers share the links instead.
    """
    monkeypatch.setattr(tree, "_MAY_WAIT_BYTES", 0)  # no slot is more than a unit ahead: sums have been launched
    monkeypatch.setattr(tree, "_PATIENCE", 30.0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).to(root)
    for layer in model:
        fully_shard(layer, devices=slots)
    fully_shard(model, devices=slots)
    made: list[bool] = []
    begins, make_wait, of_thread = RootCall.gather_for_backward, Event.make_wait, threading.local()

    def noted(call: RootCall, slot_unit: Any, position: int, running: Any) -> None:
        before, of_thread.waits = running.sums.latest_sum, []
        begins(call, slot_unit, position, running)
        receiving = slot_unit.unit.streams.receiving[slot_unit.slot]
        sums = {event for event in (before, running.sums.latest_sum) if event is not None}
        made.append(any(event in sums and stream == receiving for event, stream in of_thread.waits))

    def noted_wait(event: Event, stream: torch.Stream) -> None:
        getattr(of_thread, "waits", []).append((event, stream))
        make_wait(event, stream)

    monkeypatch.setattr(RootCall, "gather_for_backward", noted)
    monkeypatch.setattr(Event, "make_wait", noted_wait)
    with comm.using(transport="copy"):
        model(torch.randn(6, 256, device=root)).sum().backward()
    assert any(made)


class TestBackwardOnOtherStreamsThanTheForward:
    """When it returns, the streams that were current where it was called are behind all that it has launched."""

    @pytest.fixture
    def model(self, slots, root) -> nn.Module:
        # The first layers get no gradients. In backward the last ones are gathered again beside small units.
        layers = [nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)]
        model = nn.Sequential(*layers).to(root)
        for layer in model:
            fully_shard(layer, devices=slots)
        return fully_shard(model, devices=slots)

    @pytest.fixture(params=["all devices", "the first device"])
    def others(self, request, slots) -> dict[torch.device, torch.Stream]:
        return {device: torch.Stream(device) for device in slots[: 1 if "first" in request.param else None]}

    @pytest.mark.parametrize("in_hooks", [False, True])
    @pytest.mark.parametrize("frozen", [False, True])
    def test_an_optimizer_may_step_on_them(self, model, others, in_hooks, frozen, root):
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        if in_hooks:
            step_in_hooks(model)
        for _ in range(3):
            loss = model(torch.randn(6, 64, device=root, requires_grad=frozen)).square().mean()
            with streams_joined(others):
                loss.backward()
                if not in_hooks:
                    optimizer.step()
                    optimizer.zero_grad()
            check_clocks()

    @pytest.mark.parametrize("in_hooks", [False, True])
    def test_with_passes_before_the_last(self, model, others, in_hooks, root):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if in_hooks:
            step_in_hooks(model)
        for _ in range(2):
            for is_last in (False, True):
                model.set_is_last_backward(is_last)
                loss = model(torch.randn(6, 64, device=root)).square().mean()
                with streams_joined(others):
                    loss.backward()
                    if is_last and not in_hooks:
                        optimizer.step()
                        optimizer.zero_grad()
            check_clocks()

    def test_parameters_may_be_written_after_a_pass_that_is_not_the_last(self, model, others, root):
        model.set_is_last_backward(False)
        gather_the_first_in_vain(model)
        for _ in range(2):
            loss = model(torch.randn(6, 64, device=root)).square().mean()
            with streams_joined(others):
                loss.backward()
                halve(model)
            check_clocks()

    def test_sums_that_wait_for_the_next_call(self, model, others, root):
        """The call is on other streams than the forward before it, and than its backward."""
        model.set_is_last_backward(False)
        loss = model(torch.randn(6, 64, device=root)).square().mean()
        with streams_joined(others):
            loss.backward()
        with streams_joined({device: torch.Stream(device) for device in others}), torch.no_grad():
            model(torch.randn(6, 64, device=root))
            for parameter in model.parameters():
                parameter.grad.mul_(2)
            check_clocks()

    def test_gradients_of_inputs_alone(self, model, others, root):
        """Parameters are read as long as that lasts, and may be written afterwards."""
        x = torch.randn(6, 64, device=root, requires_grad=True)
        for _ in range(2):
            loss = model(x).square().mean()
            with streams_joined(others):
                torch.autograd.grad(loss, x)
                halve(model)
            check_clocks()


UNITS = 3


def step_of(slots: list[Any], width: int, policy: MixedPrecisionPolicy, monkeypatch: Any) -> tuple[int, int]:
    """Launches and waits of a step, without its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(UNITS))).to(slots[0])
    for block in model:
        fully_shard(block, devices=slots, mp_policy=policy)
    fully_shard(model, devices=slots, mp_policy=policy)
    batch = torch.randn(2 * len(slots), width, device=slots[0])
    waits = 0

    def step() -> None:
        model(batch).square().mean().backward()
        model.zero_grad()

    step()
    make_wait = Event.make_wait

    def counted(event: Event, stream: torch.Stream) -> None:
        nonlocal waits
        waits += 1
        make_wait(event, stream)

    with monkeypatch.context() as patch, clocked.counted() as launched:
        patch.setattr(Event, "make_wait", counted)
        step()
    return sum(launched.launches), waits


@pytest.mark.slots(8)
@pytest.mark.parametrize("width", [16, 520], ids=["small units", "units of a mebibyte"])
@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)],
    ids=["fp32", "bf16"],
)
def test_of_a_slot_are_almost_as_few_with_eight_slots_as_with_two(width, policy, slots, monkeypatch):
    """Where kernels read peers. Copies are as many as there are pairs of slots."""
    if (reason := why_no_tables(slots)) is not None:
        pytest.skip(reason)
    launches_of_two, waits_of_two = step_of(slots[:2], width, policy, monkeypatch)
    launches, waits = step_of(slots, width, policy, monkeypatch)
    assert launches / 8 <= 1.1 * launches_of_two / 2
    assert waits / 8 <= 1.5 * waits_of_two / 2


@pytest.mark.slots(4)
def test_versions_are_read_once_for_a_call_and_a_pass_and_where_parameters_are_freed(slots, monkeypatch):
    """Not by each slot for each unit that it uses, gathers ahead, or frees."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(UNITS))).to(slots[0])
    for block in model:
        fully_shard(block, devices=slots)
    fully_shard(model, devices=slots)
    batch = torch.randn(8, 16, device=slots[0])
    model(batch).square().mean().backward()
    read: Counter[bool] = Counter()
    version_of = _torch.version_of

    def counted(tensor: Tensor) -> int:
        read[isinstance(tensor, ShardedTensor)] += 1
        return version_of(tensor)

    monkeypatch.setattr(_torch, "version_of", counted)
    model(batch).square().mean().backward()
    parameters = 2 * UNITS
    assert read[True] <= 3 * parameters
    # Each slot frees twice, each time after a look if somebody has written to them; freeing moves the versions. A call
    # and a pass look at the flat shard of each owner too.
    assert read[False] <= 4 * parameters * len(slots) + 2 * UNITS * len(slots)
