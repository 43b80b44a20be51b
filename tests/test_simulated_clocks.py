"""The simulated accelerators' clocks: what no event orders raises, in every run, and what one orders does not."""

import threading

import pytest
import torch

from simulated import DEVICE as ONE
from simulated import OTHER as TWO

pytestmark = pytest.mark.devices("sim")


@pytest.fixture
def stream():
    """A stream of sim:1 beside the current one, which has waited for all that was launched there before."""
    side = torch.Stream(ONE)
    side.wait_stream(torch.sim.current_stream(ONE))
    return side


def finish():
    """From here on memory of any stream may be freed."""
    torch.sim.synchronize(ONE)


def race():
    return pytest.raises(RuntimeError, match=r"^race: ")


def test_tensors_of_two_devices_in_one_operator():
    with pytest.raises(RuntimeError, match=r"same device.*sim:1.*sim:2"):
        torch.ones(3, device=ONE) + torch.ones(3, device=TWO)
    assert (torch.ones(3, device=ONE) + torch.ones(3, device=TWO).to(ONE)).tolist() == [2, 2, 2]


def test_a_cpu_tensor_beside_a_device_tensor():
    with pytest.raises(RuntimeError, match=r"same device.*sim:1.*cpu"):
        torch.ones(3, device=ONE) + torch.ones(3)
    assert (torch.ones(3, device=ONE) + torch.ones(())).tolist() == [2, 2, 2]


def test_a_read_on_a_stream_that_has_not_waited(stream):
    written = torch.ones(3, device=ONE) * 2
    with torch.sim.stream(stream), race() as caught:
        written + 1
    message = str(caught.value)
    assert "aten::add reads its argument 'self' in sim:1 on stream" in message
    assert "aten::mul, which writes bytes 0 to 12 of it on the default stream of sim:1" in message


def test_a_read_on_a_stream_that_has_waited(stream):
    written = torch.ones(3, device=ONE) * 2
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        result = written + 1
    torch.sim.current_stream(ONE).wait_stream(stream)
    assert result.tolist() == [3, 3, 3]


def test_an_event_recorded_too_early(stream):
    source = torch.ones(3, device=ONE)
    event = torch.sim.current_stream(ONE).record_event()
    written = source * 2
    stream.wait_event(event)
    with torch.sim.stream(stream), race():
        written + 1


def test_an_event_recorded_after_the_write(stream):
    written = torch.ones(3, device=ONE) * 2
    stream.wait_event(torch.sim.current_stream(ONE).record_event())
    with torch.sim.stream(stream):
        written.add_(1)
    stream.synchronize()


def test_an_event_counts_from_its_last_record(stream):
    event = torch.Event(ONE)
    event.record(torch.sim.current_stream(ONE))
    written = torch.ones(3, device=ONE) * 2
    event.record(torch.sim.current_stream(ONE))
    stream.wait_event(event)
    with torch.sim.stream(stream):
        written.add_(1)
    stream.synchronize()


def test_waiting_for_an_event_that_was_never_recorded_orders_nothing(stream):
    written = torch.ones(3, device=ONE) * 2
    stream.wait_event(torch.Event(ONE))
    with torch.sim.stream(stream), race():
        written + 1


def test_a_copy_from_pinned_memory_read_on_another_stream_without_waiting(stream):
    host = torch.ones(3).pin_memory()
    with torch.sim.stream(stream):
        copied = host.to(ONE, non_blocking=True)
    with race():
        copied + 1
    torch.sim.current_stream(ONE).wait_stream(stream)
    assert (copied + 1).tolist() == [2, 2, 2]


def test_a_blocking_copy_from_the_host_needs_no_waiting(stream):
    with torch.sim.stream(stream):
        copied = torch.ones(3).to(ONE)
    assert (copied + 1).tolist() == [2, 2, 2]


def test_a_copy_into_pinned_memory_that_is_still_being_sent(stream):
    host = torch.ones(3).pin_memory()
    with torch.sim.stream(stream):
        copied = host.to(ONE, non_blocking=True)
    source = torch.zeros(3, device=ONE)
    with race():
        host.copy_(source, non_blocking=True)
    stream.synchronize()
    host.copy_(source, non_blocking=True)
    del copied


def test_parts_of_one_pinned_buffer_are_filled_by_several_devices_at_once():
    host = torch.empty(4, 6).pin_memory()
    for index in range(4):
        side = torch.Stream(torch.device("sim", index))
        with torch.sim.stream(side):
            host[index].copy_(torch.full((6,), float(index), device=side.device), non_blocking=True)
    for index in range(4):
        torch.sim.synchronize(index)
    assert host[:, 0].tolist() == [0, 1, 2, 3]


def test_columns_of_one_tensor_are_different_memory(stream):
    table = torch.zeros(5, 4, device=ONE)
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        table[:, :2].add_(1)
    table[:, 2:].add_(2)
    with race():
        table[:, 1:3].add_(1)
    stream.synchronize()
    assert table[0].tolist() == [1, 1, 2, 2]


def test_a_write_over_a_pending_read(stream):
    source = torch.ones(3, device=ONE)
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        result = source + 1
    with race() as caught:
        source.zero_()
    assert "which reads bytes 0 to 12" in str(caught.value)
    torch.sim.current_stream(ONE).wait_stream(stream)
    source.zero_()
    assert result.tolist() == [2, 2, 2]


def test_two_reads_need_no_order(stream):
    source = torch.ones(3, device=ONE)
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        first = source + 1
    second = source + 2
    stream.synchronize()
    assert (first + second).tolist() == [5, 5, 5]


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
    torch.sim.check_clocks()  # said once
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
    use_again(other)  # said once
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


def test_memory_belongs_to_the_stream_that_was_current_when_it_was_made(stream):
    """The stream may still be busy with what had the memory before."""
    before = torch.ones(3, device=ONE) * 2
    made = torch.empty(3, device=ONE)
    with torch.sim.stream(stream), pytest.raises(RuntimeError, match=r"^race: .*the allocation of that memory on"):
        made.zero_()
    stream.wait_stream(torch.sim.current_stream(ONE))
    with torch.sim.stream(stream):
        made.zero_()
    stream.synchronize()
    del before


def test_a_copy_between_devices_is_ordered_against_both_current_streams():
    source = torch.ones(3, device=ONE) * 2
    copied = source.to(TWO, non_blocking=True)
    source.zero_()
    assert (copied + 1).tolist() == [3, 3, 3]


def test_a_copy_between_devices_is_not_ordered_against_other_streams(stream):
    with torch.sim.stream(stream):
        source = torch.ones(3, device=ONE)
    with race():
        source.to(TWO)
    stream.synchronize()
    assert source.to(TWO).tolist() == [1, 1, 1]


@pytest.mark.parametrize("read", [lambda t: t.sum().item(), lambda t: t.nonzero(), lambda t: t.cpu(), torch.equal])
def test_reading_on_the_host_waits(stream, read):
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
        read(written, written) if read is torch.equal else read(written)
    written.add_(1)
    finish()


def test_an_order_goes_through_a_third_stream(stream):
    third = torch.Stream(TWO)
    written = torch.ones(3, device=ONE) * 2
    third.wait_stream(torch.sim.current_stream(ONE))
    stream.wait_stream(third)
    with torch.sim.stream(stream):
        written.add_(1)
    stream.synchronize()


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


def test_what_a_thread_has_waited_for_is_known_to_the_one_that_joins_it(stream):
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    thread.join()
    written.add_(1)
    finish()


def test_what_another_thread_has_waited_for_is_not_known(stream):
    """Whether the wait came first is a matter of luck."""
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
    (leaf * 1).register_hook(lambda grad: grad * factor)
    out = leaf * 1
    out.register_hook(lambda grad: grad * factor)
    out.sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


def test_the_message_shows_the_earlier_accesss_stack_on_request(stream):
    def writes_the_tensor():
        return torch.ones(3, device=ONE) * 2

    with torch.sim.clocks(stacks=True):
        written = writes_the_tensor()
        with torch.sim.stream(stream), race() as caught:
            written + 1
    assert "in writes_the_tensor" in str(caught.value)
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
