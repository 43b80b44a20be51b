"""The number of permits: the best one is chosen, at little cost, and the choice is checked later."""

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.comm.streams.current import DeviceClock
from dataparallel.threads import permits, situations
from dataparallel.threads.permits import PermitChooser, size_of

pytestmark = [pytest.mark.usefixtures("one_intra_op_thread", "two_cores"), pytest.mark.devices("cpu")]

# Seconds of a call with 8 slots, by the number of permits.
LAUNCH_BOUND = {1: 20.0, 2: 24.0, 4: 30.0, 8: 35.0}
COMPUTE_BOUND_ON_2_CORES = {1: 63.0, 2: 30.0, 4: 33.0, 8: 36.0}
SLEEPING = {1: 103.0, 2: 56.0, 4: 28.0, 8: 14.0}
WORST_IN_THE_MIDDLE = {1: 40.0, 2: 50.0, 4: 45.0, 8: 30.0}
COSTS = [LAUNCH_BOUND, COMPUTE_BOUND_ON_2_CORES, SLEEPING, WORST_IN_THE_MIDDLE]
any_cost = pytest.mark.parametrize("cost", COSTS, ids=["launch-bound", "compute-bound", "sleeping", "middle worst"])

Noise = Callable[[float], float]


def exactly(seconds: float) -> float:
    return seconds


def call(chooser: PermitChooser, cost: dict[int, float], size: Any = 0, noise: Noise = exactly) -> tuple[int, float]:
    """One call: the number it ran with, and the seconds it took."""
    trial = chooser.begin_call("kind", size, 8)
    seconds = noise(cost[trial.permits])
    chooser.end_call(trial, seconds)
    return trial.permits, seconds


def calls(count: int, *args: Any, **kwargs: Any) -> tuple[list[int], float]:
    """Several of them: the numbers, and the sum of the seconds."""
    numbers, seconds = zip(*[call(*args, **kwargs) for _ in range(count)], strict=True)
    return list(numbers), sum(seconds)


def best(cost: dict[int, float]) -> int:
    return min(cost, key=lambda number: cost[number])


@any_cost
def test_the_best_number_is_chosen_within_thirty_calls(cost: dict[int, float]) -> None:
    numbers, _ = calls(100, PermitChooser(), cost)
    assert set(numbers[30:]) == {best(cost)}


def disturbed(seed: int) -> Noise:
    """Other programs make every fifth call longer, by up to its own duration."""
    draw = random.Random(seed)
    return lambda s: s * (1 + 0.03 * draw.random() + (draw.random() < 0.2) * draw.random())


@any_cost
def test_so_it_is_where_other_programs_disturb_a_call_in_five(cost: dict[int, float]) -> None:
    good = 0
    for seed in range(200):
        chooser, noise = PermitChooser(), disturbed(seed)
        calls(60, chooser, cost, noise=noise)
        good += cost[call(chooser, cost, noise=noise)[0]] <= 1.1 * cost[best(cost)]
    assert good >= 180, "the rest is mended by a check"


def test_of_numbers_that_are_as_good_the_smallest_is_chosen() -> None:
    numbers, _ = calls(50, PermitChooser(), {1: 10.5, 2: 10.1, 4: 10.0, 8: 10.2})
    assert numbers[-1] == 2


@any_cost
def test_what_is_slow_is_tried_once(cost: dict[int, float]) -> None:
    numbers, _ = calls(50, PermitChooser(), cost)
    for number, seconds in cost.items():
        if seconds > 1.8 * cost[best(cost)] and number != 8:  # the unmeasured calls run with 8
            assert numbers.count(number) <= 1


@any_cost
def test_sizes_that_change_every_50_calls_cost_less_than_a_tenth(cost: dict[int, float]) -> None:
    chooser = PermitChooser()
    calls(50, chooser, cost, size=0)
    for size in range(1, 5):
        _, seconds = calls(50, chooser, cost, size=size)
        assert seconds <= 1.1 * 50 * cost[best(cost)]
    for size in range(5):
        numbers, _ = calls(50, chooser, cost, size=size)
        assert set(numbers) == {best(cost)}, "it is remembered"


def test_a_size_with_another_best_number_is_found_step_by_step() -> None:
    chooser = PermitChooser()
    calls(50, chooser, LAUNCH_BOUND, size="small")
    numbers, _ = calls(60, chooser, SLEEPING, size="large")
    assert numbers[:2] == [1, 1]
    assert numbers[-1] == 8
    assert calls(50, chooser, LAUNCH_BOUND, size="small")[0] == [1] * 50


def test_a_kind_says_nothing_about_another() -> None:
    chooser = PermitChooser()
    calls(50, chooser, LAUNCH_BOUND)
    trial = chooser.begin_call("another kind", 0, 8)
    assert (trial.permits, trial.is_measured) == (8, False)
    chooser.end_call(trial, 1.0)
    assert chooser.begin_call("kind", 0, 3).permits == 3


def test_once_chosen_nothing_is_measured_until_a_check_that_costs_less_than_a_hundredth() -> None:
    chooser, measured, seconds = PermitChooser(), [], 0.0
    for number in range(5000):
        trial = chooser.begin_call("kind", 0, 8)
        measured += [number] * trial.is_measured
        seconds += LAUNCH_BOUND[trial.permits] * (number >= 100)
        chooser.end_call(trial, LAUNCH_BOUND[trial.permits])
    first = [number for number in measured if number < 100]
    assert first[-1] < 30
    assert [number for number in measured if first[-1] < number < first[-1] + permits.FIRST_CHECK] == []
    assert len(measured) - len(first) < 0.02 * 5000
    assert seconds < 1.01 * 4900 * LAUNCH_BOUND[1]


def test_a_choice_that_became_wrong_is_mended_by_a_check() -> None:
    chooser = PermitChooser()
    calls(100, chooser, LAUNCH_BOUND)
    numbers, _ = calls(2000, chooser, SLEEPING)
    assert numbers[0] == 1
    assert numbers[-1] == 8


class Devices(DeviceClock):
    """They come to a mark when somebody says so. A mark holds the seconds at which they do."""

    def __init__(self) -> None:
        self.have_come = False

    def have_passed(self, marks: Any) -> bool:
        return self.have_come

    def seconds(self, begin: Any, end: Any) -> dict[Any, float]:
        assert self.have_come
        return {device: end[device] - begin[device] for device in begin}


def test_times_on_devices_are_read_in_a_later_call_and_nothing_is_measured_before() -> None:
    chooser, devices = PermitChooser(), Devices()
    chooser._clock = devices
    numbers: list[int] = []
    measured: list[int] = []
    for number in range(200):
        devices.have_come = number % 5 == 4
        trial = chooser.begin_call("kind", number % 2, 8)
        numbers.append(trial.permits)
        measured += [number] * trial.is_measured
        seconds = COMPUTE_BOUND_ON_2_CORES[trial.permits]
        before, after = {0: 7.0, 1: 3.0}, {0: 7.0 + seconds, 1: 4.0}
        chooser.end_call(trial, 1e-3, False, *((before, after) if trial.is_measured else ()))
    assert len(measured) > 10
    for size in (0, 1):
        own = [number for number in measured if number % 2 == size]
        assert all(a // 5 < b // 5 or b % 5 == 4 for a, b in itertools.pairwise(own)), "one at a time"
    assert set(numbers[-40:]) == {best(COMPUTE_BOUND_ON_2_CORES)}, "the slowest device counts, and no host"


def test_a_measured_call_without_marks_counts_by_the_host() -> None:
    chooser = PermitChooser()
    for _ in range(60):
        trial = chooser.begin_call("kind", 0, 8)
        chooser.end_call(trial, SLEEPING[trial.permits], False, {}, {})
    assert chooser.begin_call("kind", 0, 8).permits == best(SLEEPING)


def test_the_times_of_calls_in_turn_are_kept_if_devices_have_told_them() -> None:
    chooser, without_marks, devices = PermitChooser(), PermitChooser(), Devices()
    chooser._clock, devices.have_come = devices, True
    for _ in range(60):
        trial = chooser.begin_call("kind", 0, 8)
        marks = ({0: 0.0}, {0: LAUNCH_BOUND[trial.permits]}) if trial.is_measured else ()
        chooser.end_call(trial, 1e-3 * trial.permits, False, *marks)
        call(without_marks, LAUNCH_BOUND)
    assert [*chooser.times_in_turn] == [(1e-3, LAUNCH_BOUND[1])] * 6
    assert not without_marks.times_in_turn


def is_at_the_beginning(chooser: PermitChooser, size: Any) -> bool:
    """True if the next call of this size measures the first of the numbers, so nothing has been measured yet."""
    trial = chooser.begin_call("kind", size, 8)
    chooser.end_call(trial, None)
    return (trial.permits, trial.is_measured) == (8, True)


def test_calls_that_overlap_are_not_counted() -> None:
    chooser = PermitChooser()
    for _ in range(50):
        one, other = chooser.begin_call("kind", 0, 8), chooser.begin_call("kind", 1, 8)
        assert not other.is_measured
        chooser.end_call(one, 1.0)
        chooser.end_call(other, 1.0)
    for size in (0, 1):
        assert is_at_the_beginning(chooser, size)


def test_calls_that_fail_are_not_counted() -> None:
    chooser = PermitChooser()
    for _ in range(50):
        chooser.end_call(chooser.begin_call("kind", 0, 8), None)
    assert is_at_the_beginning(chooser, 0)
    assert calls(50, chooser, LAUNCH_BOUND)[0][-1] == 1


def test_a_trial_that_was_lost_does_not_stop_measuring() -> None:
    chooser = PermitChooser()
    chooser.begin_call("kind", 0, 8)  # interrupted before it could end
    assert calls(50, chooser, LAUNCH_BOUND)[0][-1] == 1


def test_what_is_remembered_is_bounded() -> None:
    chooser = PermitChooser()
    kinds = range(situations.SITUATIONS + 1)
    for kind in kinds:
        for _ in range(20):
            chooser.end_call(chooser.begin_call(kind, 0, 2), 1.0)
    chosen = [chooser.begin_call(kind, 0, 2).permits for kind in reversed(kinds)]
    assert chosen == [1] * situations.SITUATIONS + [2], (
        "the first kind is forgotten, and begins with all replicas at once"
    )


def test_batches_padded_to_many_lengths_are_a_few_sizes() -> None:
    sizes = {size_of((torch.empty(4, length),), {}) for length in range(64, 512)}
    assert len(sizes) <= 13
    assert size_of((torch.empty(4, 8),), {}) != size_of((torch.empty(8, 8),), {})


def test_what_tells_the_size() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    assert size_of((x, y), {}) == ((torch.long, 4), (torch.float, 8))
    assert set(size_of(({"x": [x], "y": (y, 3, "words")}, None), {"mask": x})) == {(torch.long, 4), (torch.float, 8)}
    assert size_of((), {}) == ()
    assert len(size_of([x] * 1000, {})) == permits.TENSORS


def test_a_slow_first_call_of_another_size_is_no_stall() -> None:
    chooser = PermitChooser()
    calls(50, chooser, LAUNCH_BOUND)
    trial = chooser.begin_call("kind", "much larger", 8)
    assert trial.stall_timeout == permits.STALL_TIMEOUT
    chooser.end_call(trial, 60.0, stalled=True)
    trial = chooser.begin_call("kind", "much larger", 8)
    assert (trial.permits, trial.stall_timeout) == (1, 60.0 * permits.STALL_CALLS)
    chooser.end_call(trial, 60.0, stalled=True)
    assert chooser.begin_call("kind", "much larger", 8).permits == 8


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_starts_afresh(copied: Callable[[Any], Any], slots: list, root: torch.device) -> None:
    model, x = DataParallel(nn.Linear(2, 2).to(root), slots), torch.zeros(6, 2, device=root)
    model(x)
    other = copied(model)
    assert list(other.state_dict()) == ["module.weight", "module.bias"]
    assert torch.equal(other(x), model(x))
    chooser = PermitChooser()
    calls(50, chooser, LAUNCH_BOUND)
    assert chooser.begin_call("kind", 0, 8).permits == 1
    assert copied(chooser).begin_call("kind", 0, 8).permits == 8
