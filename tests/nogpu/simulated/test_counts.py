"""Launches and copied bytes of simulated devices: each is counted once, on its device, from all threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from at_once import in_threads
from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from like_the_cpu import launches_of

pytestmark = pytest.mark.devices("sim")

HOST = torch.device("cpu")


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
        lambda x: torch.cat([x[:0], x[:0] + 1]).fill_(1).to(TWO).cpu(),
    ],
)
def test_views_allocations_shapes_and_operators_without_elements_are_no_launch(operator):
    assert launches_of(operator, torch.ones(4, 4, device=ONE)) == {}


def test_moving_elements_to_more_memory_is_a_launch():
    x = torch.ones(3, device=ONE)
    assert launches_of(x.resize_, 100) == {1: 1}
    assert launches_of(x.untyped_storage().resize_, 1_000) == {1: 1}


def test_an_operator_that_raises_is_no_launch():
    x = torch.zeros(3, 2, device=ONE)
    with torch.sim.counted() as counts, pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(x, x)
    assert not any(counts.launches)


# Lists of tensors: one launch where a device has a fused kernel


def many(count=1_000, device=ONE):
    return [torch.ones(3, device=device) for _ in range(count)]


@pytest.mark.parametrize(
    "operator",
    [
        torch.cat,
        lambda tensors: torch.cat(tensors, out=torch.empty(3_000, device=ONE)),
        lambda tensors: torch._foreach_add(tensors, tensors),
        lambda tensors: torch._foreach_copy_(tensors, tensors[::-1]),
        lambda tensors: torch._foreach_mul_(tensors, torch.tensor(2.0)),
        lambda tensors: torch._foreach_norm(tensors),
        lambda tensors: torch.split_with_sizes_copy(torch.empty(3_000, device=ONE), [3] * 1_000, out=tensors),
    ],
)
def test_a_thousand_tensors_in_one_operator_are_one_launch(operator):
    assert launches_of(operator, many()) == {1: 1}


def test_lists_that_lie_on_several_devices_are_launched_one_by_one():
    assert launches_of(torch._foreach_add_, many(2) + many(3, TWO), 1) == {1: 2, 2: 3}
    targets, sources = many(3, TWO), many(3)
    with torch.sim.counted() as counts:
        torch._foreach_copy_(targets, sources)
    assert (counts.launches[1], counts.launches[2]) == (3, 0)
    assert counts.copied == {(1, 2): 36}


# Copies: each counts the bytes of its target, from one place to the other


def test_copies_from_and_to_the_host_count_apart():
    with torch.sim.counted() as counts:
        x = torch.ones(6).to(ONE)
        x.cpu()
        x[:2].tolist()
        x[0].item()
        torch.empty(6).copy_(x[:1])
    assert counts.launches[1] == 5
    assert counts.copied == {(-1, 1): 24, (1, -1): 24 + 8 + 4 + 24}
    assert counts.sent(ONE) == counts.received(ONE) == 0


@pytest.mark.parametrize("target", [TWO, HOST], ids=["device", "host"])
def test_whatever_the_layouts_a_copy_is_one_launch_and_the_bytes_of_its_target(target):
    source = torch.ones(8, 6, device=ONE)[::2, 1:].t()
    for to in (
        torch.empty(5, 4, device=target),
        torch.empty(4, 5, device=target).t(),
        torch.empty(10, 8, device=target)[::2, ::2],
        torch.empty(3, 5, 4, dtype=torch.float64, device=target),
    ):
        with torch.sim.counted() as counts:
            to.copy_(source)
        assert sum(counts.launches) == counts.launches[1] == 1
        assert counts.copied == {(1, -1 if target is HOST else 2): to.numel() * to.element_size()}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([-1, 0, 1, 2]),
            st.sampled_from([-1, 0, 1, 2]),
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.bool]),
        )
    )
)
def test_copies_add_up(copies):
    expected: dict[tuple[int, int], int] = {}
    places = {index: torch.device("sim", index) if index >= 0 else HOST for index in (-1, 0, 1, 2)}
    prepared = [
        (torch.zeros(shape, dtype=dtype, device=places[origin]), torch.empty(shape, dtype=dtype, device=places[target]))
        for origin, target, shape, dtype in copies
    ]
    with torch.sim.counted() as counts:
        for source, to in prepared:
            to.copy_(source)
    for (origin, target, _, _), (source, _) in zip(copies, prepared, strict=True):
        if origin != target and source.nbytes:
            expected[origin, target] = expected.get((origin, target), 0) + source.nbytes
    assert counts.copied == expected
    for device in (0, 1, 2):
        assert counts.sent(device) == sum(expected.get((device, other), 0) for other in (0, 1, 2))
        assert counts.received(device) == sum(expected.get((other, device), 0) for other in (0, 1, 2))


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
