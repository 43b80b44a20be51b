"""Copied bytes of simulated devices: each copy counts the bytes of its target, from one place to the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO

pytestmark = pytest.mark.devices("sim")

HOST = torch.device("cpu")


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
