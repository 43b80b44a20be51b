"""Memory of simulated devices: counted to the byte, limited on request, shared by results, given back at the end."""

import gc
import time

import pytest
import torch
from torch import nn

from at_once import in_threads
from dataparallel import DataParallel
from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from memory import Growth, nbytes

pytestmark = pytest.mark.devices("sim")


@pytest.fixture(autouse=True)
def fresh():
    gc.collect()


@pytest.fixture
def capacity():
    """A function that limits a device to a number of bytes, until the test ends."""
    limited = []

    def limit(size, device):
        limited.append(device)
        torch.sim.set_memory_capacity(size, device)

    yield limit
    for device in limited:
        torch.sim.set_memory_capacity(None, device)


def settles_at(growths, expected):
    """True once the bytes are these, within a second: a thread of the engine may free its part of a graph late."""
    for _ in range(100):
        if [growth.now for growth in growths] == expected:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.smoke
def test_every_byte_counts_on_its_device():
    one, two = Growth(ONE), Growth(TWO)
    tensor = torch.empty(3, 5, dtype=torch.float64, device=ONE)
    assert (one.now, two.now) == (120, 0)
    view = tensor[1:]
    assert one.now == 120, "a view has no memory of its own"
    copied = tensor.to(TWO)
    assert (one.now, two.now) == (120, 120)
    del tensor
    assert one.now == 120, "the view keeps it"
    del view, copied
    assert (one.now, two.now) == (0, 0)
    assert (one.peak, two.peak) == (120, 120)


def test_an_output_that_an_operator_resizes_counts():
    growth = Growth(ONE)
    out = torch.empty(0, device=ONE)
    torch.arange(100, out=out)
    assert growth.now == 400
    out.resize_(200)
    assert growth.now == 800
    out.untyped_storage().resize_(40)
    assert growth.now == 40


@pytest.mark.parametrize(
    "enlarge",
    [
        lambda x: x.resize_(10**6),
        lambda x: x.set_(x.untyped_storage(), 0, (10**6,), (1,)),
        lambda x: x.untyped_storage().resize_(10**6),
    ],
    ids=["resize_", "set_", "storage"],
)
def test_a_tensor_that_finds_no_memory_stays_what_it_was(capacity, enlarge):
    x = torch.ones(3, device=ONE)
    capacity(torch.sim.memory_allocated(ONE) + 1000, ONE)
    with pytest.raises(torch.OutOfMemoryError):
        enlarge(x)
    assert x.tolist() == [1, 1, 1]


def test_beyond_its_capacity_a_device_raises_torchs_error(capacity):
    used = torch.sim.memory_allocated(ONE)
    capacity(used + 1000, ONE)
    assert torch.sim.mem_get_info(ONE) == (1000, used + 1000)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1004 bytes.*device 1.*capacity"):
        torch.empty(251, device=ONE)
    x = torch.ones(200, device=ONE)
    with pytest.raises(torch.OutOfMemoryError):
        x.cumsum(0).sort()  # made by an operator on the CPU
    torch.empty(251, device=TWO)
    assert torch.sim.memory_allocated(ONE) == used + 800


@pytest.mark.parametrize(("wrong", "error"), [(-1, ValueError), (1e6, TypeError), ("1", TypeError)])
def test_a_capacity_is_a_number_of_bytes(wrong, error):
    with pytest.raises(error, match="a capacity is a number of bytes"):
        torch.sim.set_memory_capacity(wrong, ONE)


def peaks_of_a_step(call, model, x, devices):
    """Peak bytes on each device in a training step that begins and ends without gradients."""
    for _ in range(2):  # the first one may allocate what later ones use again
        gc.collect()
        growths = [Growth(device) for device in devices]
        call(x).sum().backward()
        model.zero_grad()
        for device in devices:
            torch.sim.synchronize(device)
    assert settles_at(growths, [0] * len(devices))
    return [growth.peak for growth in growths]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_step_costs_each_other_device_one_copy_of_parameters_and_gradients(count):
    """The layers are wide, so that activations are freed before the last gradients exist."""
    devices = [torch.device("sim", index) for index in range(count)]
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(devices[0])
    parameters = nbytes(model.parameters())
    peaks = peaks_of_a_step(DataParallel(model, devices), model, torch.ones(2 * count, 64), devices)
    assert peaks[1:] == [2 * parameters] * (count - 1)
    # The gradients, the flat bucket, and the gradients of one other slot; there is no second copy of the parameters.
    assert peaks[0] < 3.01 * parameters


# What operators return: it may share memory with what they keep.

BYTES = 4 * 1024


@pytest.fixture
def define():
    """A function that defines a CPU operator `results_test::NAME`, until the test ends."""
    with torch.library._scoped_library("results_test", "FRAGMENT") as library:

        def define(schema, kernel):
            name = schema.partition("(")[0]
            library.define(schema)
            library.impl(name, kernel, "CPU")
            return getattr(torch.ops.results_test, name)

        yield define


def numbers():
    return torch.ones(1024, device=ONE)


def test_results_that_share_memory_still_do_and_count_once(define):
    growth = Growth(ONE)

    def both(x):
        made = x + 1
        return made, made[512:]

    x = numbers()
    whole, half = define("both(Tensor x) -> (Tensor, Tensor)", both)(x)
    assert growth.now == 2 * BYTES
    half.zero_()
    assert whole.sum().item() == 2 * 512
    assert half.device == whole.device == x.device
    del whole, x
    assert growth.now == BYTES
    del half
    assert growth.now == 0


@pytest.mark.parametrize("keep", [lambda made: made, lambda made: made.view(-1), lambda made: made.untyped_storage()])
def test_what_an_operator_keeps_of_its_result_stays_the_cpus(define, keep):
    growth = Growth(ONE)
    kept = []

    def keeping(x):
        made = x + 1
        kept.append(keep(made))
        return made

    result = define("keeping(Tensor x) -> Tensor", keeping)(numbers())
    assert kept[0].device == torch.device("cpu")
    assert result.device == ONE
    assert kept[0].data_ptr() == result.data_ptr()
    assert growth.now == BYTES
    del result
    assert growth.now == 0
    assert len(kept[0].tolist()) > 0  # its memory is still there


def test_an_out_argument_that_is_itself_a_result_may_get_other_memory():
    growth = Growth(ONE)
    x = numbers()
    out = x[:1] + 1
    assert growth.now == BYTES + 4
    torch.add(x, 1, out=out)
    assert growth.now == 2 * BYTES
    assert out.sum().item() == 2 * 1024


def test_threads_that_make_and_drop_memory_at_once_leave_none_and_the_peak_has_seen_all():
    growth = Growth(ONE)
    before = torch.sim.memory_allocated(ONE)
    torch.sim.reset_peak_memory_stats(ONE)

    def work(index, barrier):
        held = numbers()
        barrier.wait()
        for _ in range(200):
            held + 1
        del held

    in_threads(4, work)
    assert growth.now == 0
    assert 4 * BYTES <= torch.sim.max_memory_allocated(ONE) - before <= 8 * BYTES


def test_operators_called_for_the_first_time_by_two_threads_at_once_are_right():
    results = []

    def work(index, barrier):
        x = numbers()
        barrier.wait()
        results.append(torch.special.bessel_y1(x).cpu())

    in_threads(2, work)
    assert torch.equal(results[0], results[1])
