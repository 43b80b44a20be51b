"""Parameters that other code registers in the place of a unit's own: adopted by the next call, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import CPUOffloadPolicy, fully_shard
from dataparallel.sharded import Replicate, Shard, distribute_tensor
from dataparallel.testing.steps import assert_equal
from sharded_steps import on_device, sharded, whole


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


class Net(nn.Module):
    """Two units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 6).double(), nn.Linear(6, 2).double()

    def units(self) -> list[nn.Module]:
        return [self.first]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.fixture
def net(slots: list) -> Any:
    return sharded(on_device(build, slots[0]), slots)


@pytest.fixture
def x(slots: list) -> Tensor:
    return torch.ones(6, 7, dtype=torch.float64, device=slots[0])


def new_weight(slots: list, placement: Any = None) -> Any:
    values = torch.linspace(-1, 1, 42, dtype=torch.float64).view(6, 7)
    return nn.Parameter(distribute_tensor(values, slots, placement or Shard(0)))


class TestThePlacement:
    @pytest.mark.parametrize("when", ["before the first call", "later"])
    @pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=repr)
    def test_that_is_refused(self, placement, when, net, x, slots):
        if when == "later":
            net(x)
        own = net.first.weight
        net.first.weight = new_weight(slots, placement)
        with pytest.raises(
            RuntimeError, match=r"(?s)'weight' in the unit 'first'.*(Replicate|Shard\(dim=1\)).*placed by"
        ):
            net(x)
        net.first.weight = own
        assert_equal(whole(net(x)), whole(on_device(build, slots[0])(x)), "outputs", atol=1e-9)

    @pytest.mark.slots(2)
    def test_may_be_another_dimension(self, slots, x):
        net, twin = (on_device(build, slots[0]) for _ in range(2))
        sharded(net, slots)
        net(x)
        net.last.weight = nn.Parameter(distribute_tensor(twin.last.weight.detach(), slots, Shard(1)))
        for each in (net, twin):
            each(x).sum().backward()
        assert_equal(whole(net.last.weight.grad), whole(twin.last.weight.grad), "gradient", atol=1e-9)


class TestWhatIsManaged:
    @pytest.mark.parametrize("when", ["before the next call", "later"])
    def test_is_the_parameter_that_is_registered_now(self, when, net, x, slots):
        new = net.first.weight = new_weight(slots)
        if when == "later":
            net(x)
        assert fully_shard.state(net.first).manages(new)
        assert not fully_shard.state(net).manages(new)

    @pytest.mark.parametrize("when", ["before the next call", "later"])
    def test_is_not_shared_with_another_unit(self, when, net, x, slots):
        net.first.weight = new_weight(slots)
        if when == "later":
            net(x)
        other = nn.Linear(7, 6).double().to(slots[0])
        other.weight = net.first.weight
        with pytest.raises(RuntimeError, match="'weight' is shared with a module outside"):
            fully_shard(other, devices=slots)

    def test_is_no_parameter_that_was_replaced(self, net, x, slots):
        former = net.first.weight
        net.first.weight = new_weight(slots)
        net(x)
        assert not fully_shard.state(net.first).manages(former)


@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_shards_of_an_offloaded_unit_have_to_be_in_host_memory(when, net, x, slots):
    offloaded = sharded(on_device(build, slots[0]), slots, offload_policy=CPUOffloadPolicy())
    if when == "later":
        offloaded(x)
    with torch.no_grad():
        net.first.weight.copy_(new_weight(slots))
    offloaded.load_state_dict(net.state_dict(), assign=True)
    with pytest.raises(
        RuntimeError, match=r"unit '(first|Linear)' is on .*host memory: load a state dict that is on the CPU"
    ):
        offloaded.first(x)
    with pytest.raises(RuntimeError, match="CPUOffloadPolicy"):
        offloaded(x)
    offloaded.cpu()
    assert_equal(whole(offloaded(x)), whole(net(x)), "outputs", atol=1e-9)
    offloaded.reshard()
    assert {shard.device.type for p in offloaded.parameters() for shard in p.shards} == {"cpu"}
