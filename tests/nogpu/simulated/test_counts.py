"""Launches and copied bytes of simulated devices: each is counted once, on its device, from all threads."""

import pytest
import torch

from at_once import in_threads
from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from like_the_cpu import launches_of

pytestmark = pytest.mark.devices("sim")


# Launches


@pytest.mark.smoke
@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x + 1,
        lambda x: x.sort(),
        lambda x: x.nonzero(),
        lambda x: x.t().contiguous(),
        lambda x: x.to(torch.float64),
        lambda x: x[0, 0].item(),
        lambda x: torch.equal(x, x),
        lambda x: torch.arange(5, device=x.device),
        lambda x: torch.arange(5, out=torch.empty(0, dtype=torch.int64, device=x.device)),
        lambda x: torch.nn.functional.conv1d(x[None], x[:, :, None]),
        lambda x: torch.cat([x, x], out=x.new_empty(8, 4)),
    ],
)
def test_an_operator_is_one_launch_on_its_device(operator):
    assert launches_of(operator, torch.ones(4, 4, device=ONE)) == {1: 1}


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x.view(16)[3:].as_strided((2, 2), (2, 1)),
        lambda x: x.detach().unsqueeze_(0).transpose_(0, 1).squeeze_().t_(),
        lambda x: (torch.empty_like(x), x.new_empty(3), torch.empty_strided((2, 2), (1, 2), device=x.device)),
        lambda x: x.detach().set_(x.untyped_storage()),
        lambda x: torch.empty(3, device=x.device).resize_(2),
        lambda x: torch._fused_sdp_choice(x[None, None], x[None, None], x[None, None]),
        lambda x: x.record_stream(torch.sim.current_stream(x.device)),
        lambda x: torch.sim.synchronize(x.device),
    ],
)
def test_views_allocations_and_shapes_are_no_launch(operator):
    assert launches_of(operator, torch.ones(4, 4, device=ONE)) == {}


@pytest.mark.parametrize(
    "operator",
    [lambda x: x + 1, lambda x: torch.cat([x, x]), lambda x: x.to(TWO), lambda x: x.cpu(), lambda x: x.fill_(1)],
)
def test_without_elements_nothing_is_launched(operator):
    assert launches_of(operator, torch.empty(0, 3, device=ONE)) == {}


def test_moving_elements_to_more_memory_is_a_launch():
    x = torch.ones(3, device=ONE)
    assert launches_of(x.resize_, 100) == {1: 1}
    assert launches_of(x.untyped_storage().resize_, 1_000) == {1: 1}


def test_an_operator_that_raises_is_no_launch():
    x = torch.zeros(3, 2, device=ONE)
    with torch.sim.counted() as counts, pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(x, x)
    assert not any(counts.launches)


# Blocks


def test_blocks_nest():
    x = torch.ones(3, device=ONE)
    with torch.sim.counted() as outer:
        x.add_(1)
        with torch.sim.counted() as inner:
            x.add_(1)
            x.to(TWO)
        x.add_(1)
    assert (outer.launches[1], inner.launches[1]) == (4, 2)
    assert outer.copied == inner.copied == {(1, 2): 12}


def test_there_is_a_number_for_every_device():
    with torch.sim.counted() as counts:
        pass
    assert counts.launches == [0] * torch.sim.device_count()
    with pytest.raises(ValueError, match=r"simulates \d+ devices"):
        counts.sent(64)
    with pytest.raises(ValueError, match="is about simulated devices"):
        counts.received("cpu")


def test_clocks_do_not_matter():
    x = torch.ones(3, device=ONE)
    with torch.sim.clocks(False), torch.sim.counted() as counts:
        torch.cat([x + 1, x]).to(TWO)
        x.t_()
    assert counts.launches[1] == 3
    assert counts.copied == {(1, 2): 24}


# Threads


def test_no_launch_is_lost_between_threads():
    def work(index, barrier):
        x = torch.empty(4, device=ONE)
        barrier.wait()
        for _ in range(500):
            x.add_(1)
            x.to(TWO)

    with torch.sim.counted() as counts:
        in_threads(4, work)
    assert counts.launches[1] == 4 * 500 * 2
    assert counts.copied == {(1, 2): 4 * 500 * 16}
