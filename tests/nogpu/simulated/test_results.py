"""Results of operators on simulated devices: which device owns them, what shares memory, and every byte counts."""

import gc

import pytest
import torch

from at_once import in_threads
from like_the_cpu import DEVICE as ONE
from memory import Growth

pytestmark = pytest.mark.devices("sim")

BYTES = 4 * 1024


@pytest.fixture
def growth():
    gc.collect()
    return Growth(ONE)


@pytest.fixture
def define():
    """A function that defines a CPU operator `results_test::NAME`, until the test ends or it is called again."""
    made = []

    def define(schema, kernel):
        while made:
            made.pop()._destroy()
        made.append(torch.library.Library("results_test", "FRAGMENT"))
        made[0].define(schema)
        made[0].impl(schema.partition("(")[0], kernel, "CPU")
        return getattr(torch.ops.results_test, schema.partition("(")[0])

    yield define
    while made:
        made.pop()._destroy()


def numbers():
    return torch.ones(1024, device=ONE)


def test_results_that_share_memory_still_do_and_count_once(define, growth):
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
def test_what_an_operator_keeps_of_its_result_stays_the_cpus(define, growth, keep):
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


def test_an_out_argument_that_is_itself_a_result_may_get_other_memory(growth):
    x = numbers()
    out = x[:1] + 1
    assert growth.now == BYTES + 4
    torch.add(x, 1, out=out)
    assert growth.now == 2 * BYTES
    assert out.sum().item() == 2 * 1024


def test_threads_that_make_and_drop_memory_at_once_leave_none_and_the_peak_has_seen_all(growth):
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
