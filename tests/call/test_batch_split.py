"""The forms split batches by shares, or by a split that they choose, and results do not depend on it."""

import copy
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel import DataParallel, prefetch
from dataparallel.composable import fully_shard, replicate
from dataparallel.threads import balance, permit_numbers
from dataparallel.threads.meetings import here
from dataparallel.threads.slot_costs import SlotTimes
from each_form import FORMS
from memory import WITHOUT_LOCK


class Net(nn.Module):
    """A model that notes how many samples each replica gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        place = here()
        seen[0 if place is None else place.index] = len(x)
        return self.layers(x)


seen: dict[int, int] = {}
"""The samples of each replica in the last call. Replicas write to it from several threads, each to its own entry."""


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    seen.clear()
    yield
    seen.clear()


def assign(form: str, model: Any, chunk_sizes: Any) -> None:
    if form == "DataParallel":
        model.options.chunk_sizes = chunk_sizes
    else:
        (replicate if form == "replicate" else fully_shard).state(model).options.chunk_sizes = chunk_sizes


def gradients(model: nn.Module) -> list[Tensor]:
    return [getattr(p.grad, "full_tensor", lambda g=p.grad: g)().clone() for p in model.parameters()]


def check_step(model: nn.Module, single: nn.Module, x: Tensor) -> None:
    """Output and gradients are those of one device."""
    model.zero_grad()
    single.zero_grad()
    output, expected = model(x), single(x)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)
    for found, wanted in zip(gradients(model), single.parameters(), strict=True):
        torch.testing.assert_close(found.to(wanted.device), wanted.grad, rtol=1e-9, atol=1e-12)


@pytest.fixture
def single(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Net().double().to(root)


@pytest.mark.parametrize("form", FORMS)
def test_shares_split_batches_of_any_size(form: str, single: nn.Module, slots: list, root: torch.device) -> None:
    model = FORMS[form](copy.deepcopy(single), slots, chunk_sizes=[0.5, 1, 1])
    for total, sizes in ((10, [2, 4, 4]), (7, [1, 3, 3]), (3, [1, 1, 1]), (2, [1, 1])):
        seen.clear()
        check_step(model, single, torch.randn(total, 4, dtype=torch.float64, device=root))
        if len(sizes) > 1:
            seen.clear()
            model(torch.zeros(total, 4, dtype=torch.float64, device=root))
            assert [seen[slot] for slot in range(len(sizes))] == sizes
            assert len(seen) == len(sizes)


@pytest.mark.parametrize("form", FORMS)
def test_results_equal_one_device_under_any_split(
    form: str, single: nn.Module, slots: list, root: torch.device
) -> None:
    model = FORMS[form](copy.deepcopy(single), slots, chunk_sizes=None)

    @settings(max_examples=10)
    @given(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), st.integers(1, 20))
    def check(shares: list[float], total: int) -> None:
        assign(form, model, shares)
        check_step(model, single, torch.randn(total, 4, dtype=torch.float64, device=root))

    check()


Costs = Callable[[int, int], float]


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> list[Costs]:
    """Replaces the clock: the first entry gives the seconds of a slot with so many samples."""
    costs: list[Costs] = [lambda slot, samples: samples * 1e-3]

    class Counted(SlotTimes):
        def end_call(self) -> None:
            super().end_call()
            assert {*self.seconds} == {*range(len(self.slots))}, "every replica has been timed"
            self.seconds = {slot: costs[0](slot, samples) for slot, samples in seen.items()}
            self.span = max(self.seconds.values())

    monkeypatch.setattr(balance, "SlotTimes", Counted)
    return costs


@pytest.mark.parametrize("form", FORMS)
def test_balanced_finds_the_slow_slot_and_changes_no_result(
    form: str, single: nn.Module, slots: list, root: torch.device, costs: list[Costs]
) -> None:
    def one_is_slow(slot: int, samples: int) -> float:
        return samples * (3e-3 if slot == 1 else 1e-3)

    costs[0] = one_is_slow
    model = FORMS[form](copy.deepcopy(single), slots, chunk_sizes="balanced")
    splits = []
    for _ in range(20):
        check_step(model, single, torch.randn(21, 4, dtype=torch.float64, device=root))
        model(torch.zeros(21, 4, dtype=torch.float64, device=root))
        splits.append(tuple(seen[slot] for slot in range(3)))
    assert splits[0] == (7, 7, 7)
    # Where slots take turns, as on the CPU with gradients, a slow one is best left with a single sample.
    assert splits[-1][1] in (1, 3)
    assert abs(splits[-1][0] - splits[-1][2]) <= 2
    for total in (8, 3, 2, 1):  # a smaller last batch
        check_step(model, single, torch.randn(total, 4, dtype=torch.float64, device=root))


@pytest.mark.parametrize("form", FORMS)
def test_chunk_sizes_may_be_assigned_between_calls(
    form: str, single: nn.Module, slots: list, root: torch.device
) -> None:
    model = FORMS[form](copy.deepcopy(single), slots, chunk_sizes=[1, 4, 2])
    for chunk_sizes, sizes in (
        ([2, 2, 3], (2, 2, 3)),
        ([3.0, 1, 3], (3, 1, 3)),
        ("balanced", (3, 2, 2)),
        (None, (3, 3, 1)),
    ):
        assign(form, model, chunk_sizes)
        model(torch.zeros(7, 4, dtype=torch.float64, device=root))
        assert tuple(seen[slot] for slot in range(3)) == sizes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [[1, -1, 1], [0.5, 0.5], [0.0, 1.0, 1.0], [float("nan"), 1, 1], "even"])
def test_bad_values_are_refused_before_anything_changes(form: str, single: nn.Module, slots: list, bad: Any) -> None:
    with pytest.raises(ValueError, match="chunk_sizes="):
        FORMS[form](copy.deepcopy(single), slots, chunk_sizes=bad)
    model = FORMS[form](single, slots, chunk_sizes=[0.5, 1, 1])
    with pytest.raises(ValueError, match="chunk_sizes="):
        assign(form, model, bad)
    with pytest.raises(TypeError, match="chunk_sizes="):
        assign(form, model, [0.5, True, 1])
    holder = model if form == "DataParallel" else (replicate if form == "replicate" else fully_shard).state(model)
    assert holder.options.chunk_sizes == (0.5, 1, 1)


def test_shares_are_checked_again_where_slots_have_changed(single: nn.Module, slots: list, root: torch.device) -> None:
    model = DataParallel(single, slots, chunk_sizes=[0.5, 1, 1])
    model.device_ids = model.device_ids[:2]
    with pytest.raises(ValueError, match="has 3 entries for 2 slots"):
        model(torch.zeros(7, 4, dtype=torch.float64, device=root))


def test_balanced_leaves_the_choice_of_permits_alone(
    single: nn.Module, slots: list, root: torch.device, costs: list[Costs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the split is being chosen no number of permits is measured, and a changed chunk is no other situation."""
    # All slots run at once, also in a Python without a lock on fewer cores than slots.
    monkeypatch.setattr(permit_numbers, "has_lock", lambda: True)
    costs[0] = lambda slot, samples: samples * (3e-3 if slot == 0 else 1e-3)
    model = DataParallel(single.eval(), slots, chunk_sizes="balanced")
    splits = []

    def measured_permits() -> int:
        return sum(len(times) for each in model.options.permits._situations.values() for times in each._times.values())

    with torch.no_grad():
        for number in range(40):
            model(torch.zeros(42, 4, dtype=torch.float64, device=root))
            splits.append(seen[0])
            balancer = model.options.split._balancer
            assert balancer is not None
            (situation,) = balancer._situations.values()
            if number > 1 and situation._current is not None:
                assert measured_permits() == 0
                assert len({*splits[:-1]}) < 4
    assert splits[0] == 14
    assert splits[20] == splits[39] == 6
    assert len(model.options.permits._situations) == 1
    assert measured_permits() > 0


def test_waiting_for_a_slow_replica_is_not_a_slots_own_time(
    slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            place = here()
            assert place is not None
            if place.index == 1:
                time.sleep(0.1)
            place.meet("all are here", None, lambda values: values)
            return x

    measured: list[dict[int, float]] = []

    class Kept(SlotTimes):
        def end_call(self) -> None:
            super().end_call()
            measured.append(self.seconds)

    monkeypatch.setattr(balance, "SlotTimes", Kept)
    model = DataParallel(Meets(), slots, chunk_sizes="balanced", workers=3)
    for _ in range(3):
        model(torch.zeros(6, 1, device=root))
    (seconds,) = measured
    assert seconds[1] >= 0.1
    assert max(seconds[0], seconds[2]) < 0.05


def test_calls_with_one_slot_or_without_arguments_are_not_split(root: torch.device, slots: list) -> None:
    alone = DataParallel(Net().to(root), slots[:1], chunk_sizes="balanced")
    assert alone(torch.zeros(5, 4, device=root)).shape == (5, 2)

    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.zeros(2)

    for chunk_sizes in ("balanced", [0.5, 1, 1]):
        assert DataParallel(Constant(), slots, chunk_sizes=chunk_sizes)().shape == (2,)


def test_a_copy_keeps_what_was_given(single: nn.Module, slots: list, root: torch.device) -> None:
    for chunk_sizes in ("balanced", (0.5, 1, 1), (1, 4, 2)):
        model = DataParallel(single, slots, chunk_sizes=chunk_sizes)
        assert model.options.chunk_sizes == chunk_sizes
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other.options.chunk_sizes == chunk_sizes
            other(torch.zeros(7, 4, dtype=torch.float64, device=root))


@pytest.mark.parametrize("chunk_sizes", [[0.5, 1, 1], "balanced", [7, 7, 7]])
def test_prefetched_batches_are_split_as_the_calls_say(
    chunk_sizes: Any, single: nn.Module, slots: list, costs: list[Costs]
) -> None:
    costs[0] = lambda slot, samples: samples * (3e-3 if slot == 0 else 1e-3)
    model = DataParallel(copy.deepcopy(single), slots, chunk_sizes=chunk_sizes)
    batches = [torch.randn(21 if number < 20 else 8, 4, dtype=torch.float64) for number in range(22)]
    if chunk_sizes == [7, 7, 7]:
        batches = batches[:20]
    for batch in prefetch(batches, model):
        output = model(batch)
        torch.testing.assert_close(output, single(batch.to(output.device)), rtol=1e-9, atol=1e-12)


@pytest.mark.devices("sim")
def test_a_slot_whose_device_is_nearly_full_gets_fewer_samples(root: torch.device, costs: list[Costs]) -> None:
    sim, slots = torch.sim, [0, 1, 2]  # type: ignore[attr-defined]
    net = Net()
    net.layers = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(4, 4), nn.Tanh())))
    model = DataParallel(net.double().to("sim:0"), slots, output_device=1, chunk_sizes="balanced")
    x = torch.zeros(600, 4, dtype=torch.float64)  # about 350 bytes of activations each
    try:
        for slot, room in enumerate((60_000, 400_000, 400_000)):
            sim.set_memory_capacity(sim.memory_allocated(slot) + room, slot)
        splits = []
        for _ in range(20):
            model(x).sum().backward()
            splits.append([seen[slot] for slot in slots])
            if WITHOUT_LOCK:  # what threads of the engine have made stays until their next backward
                gc.collect()
    finally:
        for slot in slots:
            sim.set_memory_capacity(None, slot)
    assert 50 < splits[0][0] < 90, "before anything is measured, the free memory says so"
    assert 60 < splits[-1][0] < 170, splits
    assert abs(splits[-1][1] - splits[-1][2]) < 20
