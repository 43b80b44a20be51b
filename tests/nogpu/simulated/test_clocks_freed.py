"""Memory that returns to its stream while another stream may still use it."""

import pytest
import torch

from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER
from orders import finish

pytestmark = pytest.mark.devices("sim")


@pytest.fixture
def used_on_the_stream(stream):
    """A function that makes memory on the current stream, uses it on the other one, and frees it."""

    def use(guard=lambda tensor: None):
        source = torch.ones(3, device=ONE)
        stream.wait_stream(torch.sim.current_stream(ONE))
        with torch.sim.stream(stream):
            result = source + 1
        guard(source)
        return result

    return use


def too_early():
    return pytest.raises(
        RuntimeError, match=r"^freed too early: memory in sim:1 .*aten::add, which reads bytes 0 to 12"
    )


def test_memory_freed_while_another_stream_uses_it(used_on_the_stream):
    result = used_on_the_stream()
    with too_early():
        torch.sim.check_clocks()
    torch.sim.check_clocks()  # reported once
    finish()
    assert result.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "use_again",
    [lambda other: torch.empty(3, device=ONE).zero_(), lambda other: torch.ones(3).to(ONE), torch.median],
    ids=["allocated", "copied", "made by an operator"],
)
def test_memory_freed_too_early_raises_where_it_is_used_again(used_on_the_stream, use_again):
    other = torch.ones(3, device=ONE)
    result = used_on_the_stream()
    with too_early():
        use_again(other)
    use_again(other)  # reported once
    finish()
    del result


def test_memory_freed_early_is_no_hazard_if_its_stream_waits_before_it_goes_on(stream, used_on_the_stream):
    result = used_on_the_stream()
    torch.sim.current_stream(ONE).wait_stream(stream)
    torch.ones(3, device=ONE).add_(result)
    torch.sim.check_clocks()
    finish()


@pytest.mark.parametrize(
    "guard",
    [
        lambda stream, tensor: tensor.record_stream(stream),
        lambda stream, tensor: torch.sim.current_stream(ONE).wait_stream(stream),
        lambda stream, tensor: stream.synchronize(),
    ],
    ids=["record_stream", "wait_stream", "synchronize"],
)
def test_memory_freed_after_the_other_stream_is_known_to_be_done(stream, used_on_the_stream, guard):
    result = used_on_the_stream(lambda tensor: guard(stream, tensor))
    torch.sim.check_clocks()
    torch.ones(3, device=ONE).zero_()
    finish()
    del result


def test_a_cache_is_not_emptied_before_a_copy_from_another_device_has_arrived():
    """The target's stream waits for the copy, but a GPU takes memory from its peers before it waits for itself."""
    sent = torch.ones(3, device=ONE)
    for is_known in (False, True):
        arrived = sent.to(OTHER)  # by a stream of the source
        if is_known:
            torch.sim.synchronize(ONE)
        del arrived
        torch.sim.check_clocks()
        if is_known:
            torch.sim.empty_cache()
            continue
        with pytest.raises(RuntimeError, match=r"^freed too early: memory in sim:2 ceases .*default stream of sim:1"):
            torch.sim.empty_cache()
        torch.sim.empty_cache()  # reported once
