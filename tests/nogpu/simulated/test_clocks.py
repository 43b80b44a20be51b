"""The clocks of simulated devices: accesses that nothing orders raise in every run, and ordered ones do not."""

import threading

import pytest
import torch

from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO

pytestmark = pytest.mark.devices("sim")


def race():
    return pytest.raises(RuntimeError, match=r"^race: ")


def finish():
    """Waits for all streams, so that memory of any stream may be freed."""
    torch.sim.synchronize(ONE)


@pytest.mark.parametrize(
    "read",
    [lambda t: t.sum().item(), lambda t: t.nonzero(), lambda t: t.cpu(), lambda t: torch.equal(t, t)],
)
def test_reading_on_the_host_and_a_blocking_copy_from_it_wait(stream, read):
    with torch.sim.stream(stream):
        copied = torch.ones(3).to(ONE)
    copied.add_(1)
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        written = copied * 2
        read(written)
    written.add_(1)
    finish()


@pytest.mark.smoke
def test_the_message_shows_the_earlier_accesss_stack_on_request(stream):
    def writes_the_tensor():
        return torch.ones(3, device=ONE) * 2

    with torch.sim.clocks(stacks=True):
        written = writes_the_tensor()
        with torch.sim.stream(stream), race() as caught:
            written + 1
    message = str(caught.value)
    assert "aten::add reads its argument 'self' in sim:1 on stream" in message
    assert "aten::mul, which writes bytes 0 to 12 of it on the default stream of sim:1" in message
    assert "in writes_the_tensor" in message
    written = writes_the_tensor()
    with torch.sim.stream(stream), race() as caught:
        written + 1
    assert "writes_the_tensor" not in str(caught.value)
    assert "stacks=True" in str(caught.value)


def test_the_clocks_can_be_switched_off(stream):
    written = torch.ones(3, device=ONE) * 2
    with torch.sim.clocks(False), torch.sim.stream(stream):
        written + 1
    with torch.sim.stream(stream), race():
        written + 1


def test_what_happened_while_they_were_off_raises_no_alarm_when_they_are_on_again(stream):
    with torch.sim.clocks(False):
        made_before = torch.ones(3, device=TWO)
        with torch.sim.stream(stream):
            elsewhere = torch.ones(3, device=ONE)
    made_before.add_(1)
    elsewhere.add_(1)
    del made_before, elsewhere
    torch.sim.check_clocks()
    for device in (torch.device("sim", 0), ONE, TWO):
        torch.empty(3, device=device).zero_()


def test_an_operator_that_raises_has_touched_nothing(stream):
    written = torch.ones(3, device=ONE)
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream), pytest.raises(RuntimeError, match="size"):
        written.add_(torch.ones(2, device=ONE))
    written.add_(1)
    finish()


def test_indexing_waits_for_masks_only(stream):
    with torch.sim.stream(stream):
        written, places = torch.ones(3, device=ONE), torch.tensor([0, 1]).to(ONE, non_blocking=True)
        also_written = written * 2
        written[places]
    with race():
        also_written + 1
    with torch.sim.stream(stream):
        written[written > 0]
    also_written + 1
    finish()


def test_running_statistics_are_written_in_training_only(stream):
    norm = torch.nn.BatchNorm1d(2).to(ONE)
    x = torch.ones(4, 2, device=ONE)
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        norm.eval()(x)
    norm(x)
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        norm.train()(x)
    with race():
        norm.running_mean + 1
    finish()


# What a host thread has waited for is known to threads that it starts or that join it, and to no others.


def test_what_a_thread_has_waited_for_is_known_to_the_threads_that_it_starts(stream):
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    stream.synchronize()
    errors = []

    def read():
        try:
            written + 1
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    finish()
    assert not errors


def test_what_another_thread_has_waited_for_is_not_known(stream):
    """The wait came first only by luck."""
    started, done = threading.Event(), threading.Event()

    def wait():
        started.wait()
        stream.synchronize()
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    started.set()
    done.wait()
    with race():
        written.add_(1)
    thread.join()
    written.add_(1)
    finish()


def test_what_the_caller_of_backward_has_waited_for_is_known_to_its_threads(stream):
    with torch.sim.stream(stream):
        factor = torch.full((3,), 2.0, device=ONE)
    stream.synchronize()
    leaf = torch.ones(3, device=ONE, requires_grad=True)
    out = leaf * 1
    out.register_hook(lambda grad: grad * factor)
    out.sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


def test_who_sees_that_a_thread_has_ended_knows_what_it_has_waited_for(stream):
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    while thread.is_alive():
        pass
    written.add_(1)
    finish()


def test_a_cache_is_not_emptied_before_a_copy_from_another_device_has_arrived():
    """The target's stream waits for the copy, but a GPU takes memory from its peers before it waits for itself."""
    sent = torch.ones(3, device=ONE)
    for is_known in (False, True):
        arrived = sent.to(TWO)  # by a stream of the source
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
