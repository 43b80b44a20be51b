"""A sharded model on any streams, its backward on others than its forward; launches and waits grow with the slots."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import clocked
from clocked import check_clocks
from dataparallel.comm.streams.current import Event, streams_joined
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from nogpu.timeline import HOST

pytestmark = pytest.mark.devices("sim", "stand-in")


def sequence(slots: list, *widths: int, **options: Any) -> Any:
    """Linear layers, each of which is a unit."""
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))).to(slots[0])
    for layer in model:
        fully_shard(layer, devices=slots, **options)
    return fully_shard(model, devices=slots, **options)


@pytest.mark.parametrize("samples", [6, 1])
def test_steps_on_other_streams_than_the_first(slots, root, samples):
    """The clocks raise if memory of one stream is used on another without an order, or goes back to the wrong one."""
    model = sequence(slots, 8, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):  # the second one adds to gradients
            model(torch.randn(samples, 8, device=root)).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
        with streams_joined({device: torch.Stream(device) for device in slots}):
            step()
            step()
            check_clocks()
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


class TestBackwardOnOtherStreamsThanTheForward:
    """When it returns, the streams that were current where it was called are behind all that it has launched."""

    @pytest.fixture
    def model(self, slots) -> nn.Module:
        # The first layers get no gradients. In backward the last ones are gathered again beside small units.
        return sequence(slots, 64, 64, 64, 256, 64)

    @pytest.fixture(params=["all devices", "the first device"])
    def others(self, request, slots) -> dict[torch.device, torch.Stream]:
        return {device: torch.Stream(device) for device in slots[: 1 if "first" in request.param else None]}

    @pytest.mark.parametrize("in_hooks", [False, True])
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("passes", [1, 2])
    def test_an_optimizer_may_step_on_them(self, model, others, passes, in_hooks, frozen, root):
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        if in_hooks:
            step_in_hooks(model)
        for _ in range(3):
            for left in reversed(range(passes)):
                model.set_is_last_backward(left == 0)
                loss = model(torch.randn(6, 64, device=root, requires_grad=frozen)).square().mean()
                with streams_joined(others):
                    loss.backward()
                    if left == 0 and not in_hooks:
                        optimizer.step()
                        optimizer.zero_grad()
            check_clocks()

    def test_parameters_may_be_written_after_a_pass_that_is_not_the_last(self, model, others, root):
        model.set_is_last_backward(False)
        model[0].requires_grad_(False)
        model[1].set_modules_to_backward_prefetch([model[0]])  # in vain
        for _ in range(2):
            loss = model(torch.randn(6, 64, device=root)).square().mean()
            with streams_joined(others):
                loss.backward()
                halve(model)
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


def step_of(slots: list[Any], width: int, policy: MixedPrecisionPolicy, monkeypatch: Any) -> tuple[int, int]:
    """Launches and waits of a step, without its optimizer."""
    model = sequence(slots, *[width] * 4, mp_policy=policy)
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


@pytest.mark.devices("stand-in")
@pytest.mark.slots(4)
def test_kernels_carry_buffers_losses_and_their_gradients(slots, root):
    """Where they carry parameters: one launch takes the place of a copy for each slot, one after the other."""
    if (reason := why_no_tables(slots)) is not None:
        pytest.skip(reason)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    model = fully_shard(Net().to(root), devices=slots)
    for pinned in [torch.ones(16, 8, pin_memory=True)] * 2:
        with clocked.timeline() as recorded:
            model(pinned).mean().backward()
    launches = recorded.recording.launches
    assert not [launch for launch in launches if launch.copy is not None and HOST not in launch.copy]
    gathers = [launch for launch in launches if len(launch.peers) == 3 and {each[2] for each in launch.peers} == {4}]
    assert len(gathers) == 1
    check_clocks()
