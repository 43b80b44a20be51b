"""Gradients of one unit: each owner gets its part of the sum over slots, in one order, and parameters may have none."""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from clocked import check_clocks
from dataparallel import comm
from dataparallel.comm.streams.current import Event, current_streams, streams_joined, streams_set
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.sharded.units.buffers import Layout, Precision
from dataparallel.sharded.units.gradients import SumsOfPass
from dataparallel.sharded.units.sharded_unit import PassGradients
from dataparallel.sharded.units.unit import Unit
from made_units import unit_of, values
from memory import Growth, nbytes


def begin(slots: Sequence[Any], count: int | None = None) -> SumsOfPass:
    """A pass of the first ``count`` slots."""
    computing = current_streams([torch.device(slot) for slot in slots])
    summed = PassGradients()
    return SumsOfPass(len(slots) if count is None else count, computing, summed)


def grads(slot: int, slots: Sequence[Any], unit: Unit, factor: float = 1.0) -> list[Tensor]:
    """What the slot brings: distinct numbers for each parameter."""
    return [
        torch.full(parameter.shape, factor * 10.0**slot * (at + 1), dtype=parameter.dtype, device=slots[slot])
        for at, parameter in enumerate(unit.parameters)
    ]


def run_pass(
    unit: Unit, slots: Sequence[Any], brings: dict[int, list[Any]], count: int | None = None
) -> list[bool | None]:
    """One pass in which these slots deliver these gradients, and what each delivery returned."""
    sums = begin(slots, count)
    found = [unit.gradients.deliver(slot, each, sums) for slot, lists in brings.items() for each in lists]
    unit.gradients.end_pass(sums)
    sums.wait_for_sums()
    return found


def fail_pass(unit: Unit, sums: SumsOfPass) -> None:
    """The pass ends in an error."""
    unit.gradients.end_pass(None)
    sums.drop_all()


def run_all(unit: Unit, slots: Sequence[Any], factor: float = 1.0) -> list[bool | None]:
    """One pass in which each slot brings its numbers."""
    return run_pass(unit, slots, {slot: [grads(slot, slots, unit, factor)] for slot in range(len(slots))})


def hold(unit: Unit, slots: Sequence[Any]) -> None:
    """Leaves the numbers of each slot there, for a pass that synchronises."""
    unit.requires_gradient_sync = False
    run_all(unit, slots)
    unit.requires_gradient_sync = True


def summed(unit: Unit) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor("cpu") for p in unit.parameters]


def assert_sums(unit: Unit, expected: list[float | None]) -> None:
    """Asserts that each gradient is full of this number."""
    for parameter, found, number in zip(unit.parameters, summed(unit), expected, strict=True):
        if number is None:
            assert found is None
        else:
            assert found is not None
            assert torch.equal(found, torch.full_like(found, number))
            assert parameter.grad.devices == parameter.devices


@pytest.fixture
def unit(slots: list) -> Unit:
    """Two parameters, one of which cannot be divided evenly."""
    first, _ = values()
    return unit_of([first, torch.zeros(5)], slots)


class TestSums:
    def test_are_over_all_slots(self, unit, slots):
        returned = run_pass(unit, slots, {slot: [grads(slot, slots, unit)] for slot in (2, 0, 1)})
        assert returned == [False, False, True]
        assert_sums(unit, [111, 222])

    def test_are_added_to_gradients_that_are_there_already(self, unit, slots):
        """They stay the same objects: other code may refer to them."""
        run_all(unit, slots)
        before = [parameter.grad for parameter in unit.parameters]
        run_all(unit, slots)
        assert_sums(unit, [222, 444])
        assert all(p.grad is grad for p, grad in zip(unit.parameters, before, strict=True))

    def test_count_a_missing_gradient_as_zero_and_leave_none_where_no_slot_has_one(self, unit, slots):
        run_pass(unit, slots, {slot: [[grads(slot, slots, unit)[0] if slot else None, None]] for slot in range(3)})
        assert_sums(unit, [110, None])

    def test_count_a_slot_that_does_not_deliver_as_zero(self, unit, slots):
        assert run_pass(unit, slots, {1: [grads(1, slots, unit)]}) == [False]
        assert_sums(unit, [10, 20])

    def test_of_fewer_replicas_than_slots_are_complete_at_once(self, unit, slots):
        assert run_pass(unit, slots, {slot: [grads(slot, slots, unit)] for slot in range(2)}, count=2) == [False, True]
        assert_sums(unit, [11, 22])

    def test_of_several_deliveries_are_made_round_by_round(self, unit, slots):
        brings = {slot: [grads(slot, slots, unit), grads(slot, slots, unit, 2.0)] for slot in range(3)}
        returned = run_pass(unit, slots, {**brings, 2: brings[2][:1]})
        assert returned == [False] * 4 + [True]
        assert_sums(unit, [1 + 2 + 10 + 20 + 100, 2 * (1 + 2 + 10 + 20 + 100)])

    @given(st.permutations(range(3)))
    def test_have_the_same_bits_in_whatever_order_slots_deliver(self, slots, order):
        unit = unit_of([torch.zeros(3, 2, dtype=torch.float32)], slots)
        of_slots = [torch.tensor(number, dtype=torch.float32).expand(3, 2) for number in (1e8, 1.0, -1e8)]
        run_pass(unit, slots, {slot: [[of_slots[slot].to(slots[slot])]] for slot in order})
        assert torch.equal(summed(unit)[0], torch.zeros(3, 2))  # 1e8 + 1.0 is 1e8; in another order the sum is 1.0


ZEROING = {
    "zero_": lambda grad: grad.zero_(),
    "fill_": lambda grad: grad.fill_(0),
    "copy_": lambda grad: grad.copy_(torch.zeros_like(grad)),
    "zeros on lists": lambda grad: torch._foreach_zero_([grad]),
    "copies on lists": lambda grad: torch._foreach_copy_([grad], [torch.zeros_like(grad)]),
}


class TestWithoutSynchronisation:
    def test_gradients_stay_on_the_slots_until_a_pass_that_synchronises(self, unit, slots):
        unit.requires_gradient_sync = False
        assert run_pass(unit, slots, {slot: [grads(slot, slots, unit)] for slot in range(3)}) == [None] * 3
        assert_sums(unit, [0, 0])  # it says that they wait
        unit.requires_gradient_sync = True
        run_all(unit, slots, 2.0)
        assert_sums(unit, [333, 666])

    def test_those_of_slots_that_are_not_in_that_pass_count_too(self, unit, slots):
        hold(unit, slots)
        run_pass(unit, slots, {0: [grads(0, slots, unit)]}, count=1)
        assert_sums(unit, [112, 224])

    def test_they_are_dropped_if_the_user_throws_away_the_gradients_they_belong_to(self, unit, slots):
        unit.requires_gradient_sync = False
        run_all(unit, slots)
        unit.parameters[0].grad = None
        unit.gradients.drop_void()
        unit.requires_gradient_sync = True
        run_all(unit, slots)
        assert_sums(unit, [111, 444])

    @pytest.mark.parametrize("zero", ZEROING.values(), ids=ZEROING)
    def test_they_are_dropped_however_the_user_zeroes_these(self, unit, slots, zero):
        run_all(unit, slots)
        hold(unit, slots)
        with torch.no_grad():
            zero(unit.parameters[0].grad)
        unit.gradients.drop_void()
        run_all(unit, slots)
        assert_sums(unit, [111, 2 * 222 + 222])

    @pytest.mark.parametrize("write", [lambda grad: grad.mul_(2), lambda grad: grad.sub_(grad).add_(222)])
    def test_other_writes_to_these_leave_them(self, unit, slots, write):
        run_all(unit, slots)
        hold(unit, slots)
        with torch.no_grad():
            write(unit.parameters[0].grad)
        unit.gradients.drop_void()
        run_all(unit, slots)
        assert_sums(unit, [222 + 222, 2 * 222 + 222])

    def test_a_delivery_that_fails_leaves_them(self, unit, slots, monkeypatch):
        unit.requires_gradient_sync = False
        run_all(unit, slots)
        sums = begin(slots)
        with monkeypatch.context() as patch:
            patch.setattr(Layout, "copy_in", _no_room)
            with pytest.raises(torch.OutOfMemoryError):
                unit.gradients.deliver(1, grads(1, slots, unit), sums)
        unit.gradients.end_pass(None)
        unit.requires_gradient_sync = True
        run_pass(unit, slots, {})
        total = sum(10.0**slot for slot in range(len(slots)))
        assert_sums(unit, [total, 2 * total])

    @pytest.mark.parametrize("is_offloaded", [False, True])
    @pytest.mark.parametrize("deliver", [[], [1], [0, 2], [0, 1, 2]], ids=str)
    def test_a_failed_pass_that_was_to_add_them_up_leaves_them(self, deliver, is_offloaded, slots):
        """It has changed no gradient, also if all slots have delivered."""
        unit = unit_of(values(), slots, is_offloaded=is_offloaded)
        hold(unit, slots)
        sums = begin(slots)
        for slot in deliver:
            unit.gradients.deliver(slot, grads(slot, slots, unit, 5.0), sums)
        fail_pass(unit, sums)
        run_all(unit, slots, 2.0)
        assert_sums(unit, [333, 666])

    def test_deliveries_of_two_threads_to_one_slot_are_added(self, unit, slots, monkeypatch):
        """On the CPU a backward runs in the thread that has called it."""
        copy_in, both = Layout.copy_in, threading.Barrier(2)

        def at_once(self, *args):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # if both threads can be here, they are
            copy_in(self, *args)

        monkeypatch.setattr(Layout, "copy_in", at_once)
        unit.requires_gradient_sync = False
        sums = begin(slots)
        with ThreadPoolExecutor(2) as threads:
            brought = [grads(0, slots, unit) for _ in range(2)]
            assert [*threads.map(lambda each: unit.gradients.deliver(0, each, sums), brought)] == [None, None]
        unit.gradients.end_pass(sums)
        unit.requires_gradient_sync = True
        run_pass(unit, slots, {})
        assert_sums(unit, [2.0, 4.0])


def _no_room(*args: Any) -> None:
    raise torch.OutOfMemoryError


class TestAFailedPass:
    def test_drops_what_waits_for_other_slots(self, unit, slots):
        sums = begin(slots)
        unit.gradients.deliver(0, grads(0, slots, unit), sums)
        fail_pass(unit, sums)
        run_all(unit, slots)
        assert_sums(unit, [111, 222])

    def test_changes_no_gradient(self, unit, slots):
        """The user may have zeroed all gradients before the last thread of the pass has summed."""
        for is_first in (True, False):
            sums = begin(slots)
            for slot in range(len(slots)):
                unit.gradients.deliver(slot, grads(slot, slots, unit), sums)
            fail_pass(unit, sums)
            assert_sums(unit, [None, None] if is_first else [111, 222])
            run_all(unit, slots)


class TestGradientsOfABackward:
    def test_what_other_code_puts_there_meanwhile_is_added_to(self, unit, slots):
        sums = begin(slots)
        for slot in range(len(slots)):
            unit.gradients.deliver(slot, grads(slot, slots, unit), sums)
        for parameter in unit.parameters:
            parameter.grad = torch.ones_like(parameter)
        unit.gradients.end_pass(sums)
        sums.wait_for_sums()
        assert_sums(unit, [112, 223])

    def test_are_refused_if_a_pass_of_another_tree_has_failed(self):
        shared = PassGradients()
        shared.begin_pass()
        shared.begin_pass()
        shared.fail_pass()
        with pytest.raises(RuntimeError, match="shares modules with another one"):
            shared.end_pass()


class TestDtypes:
    def test_sums_of_16_bits_are_made_in_32(self, slots):
        unit = unit_of([torch.zeros(3)], slots, Precision(parameters=torch.bfloat16))
        brings = {0: 256.0, 1: 1.0, 2: 1.0}  # in bfloat16 256 + 1 is 256
        run_pass(unit, slots, {s: [[torch.full((3,), v, device=slots[s]).bfloat16()]] for s, v in brings.items()})
        assert_sums(unit, [258])
        assert unit.parameters[0].grad.dtype == torch.float32

    def test_gradients_have_the_dtype_of_the_parameters(self, slots):
        unit = unit_of([torch.zeros(3, dtype=torch.bfloat16)], slots, Precision(sums=torch.float32))
        run_all(unit, slots)
        assert unit.parameters[0].grad.dtype == torch.bfloat16
        assert_sums(unit, [111])

    @pytest.mark.devices("sim", "cuda")
    @given(
        dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 3),
        rows=st.lists(st.integers(0, 9), min_size=1, max_size=3), holding=st.sets(st.integers(0, 2)),
        missing=st.sets(st.integers(0, 8)), seed=st.integers(0, 2**32),
    )  # fmt: skip
    def test_kernels_have_the_bits_of_copies(self, slots, dtypes, rows, holding, missing, seed):
        """Some slots hold gradients of an earlier pass. Not all have a gradient of each parameter."""
        stored, on_slots, sums = dtypes
        found = []
        for transport in (None, "copy"):
            generator = torch.Generator().manual_seed(seed)

            def drawn(slot: int, generator: torch.Generator = generator) -> list[Tensor | None]:
                values = [(torch.randn(n, 3, generator=generator) * 2.0**slot).to(on_slots) for n in rows]
                return [None if 3 * slot + at in missing else value.to(slots[slot]) for at, value in enumerate(values)]

            with comm.using(transport=transport) if transport else contextlib.nullcontext():
                unit = unit_of([torch.zeros(n, 3).to(stored) for n in rows], slots, Precision(on_slots, sums))
                unit.requires_gradient_sync = False
                run_pass(unit, slots, {slot: [drawn(slot)] for slot in sorted(holding)})
                unit.requires_gradient_sync = True
                run_pass(unit, slots, {slot: [drawn(slot)] for slot in range(len(slots))})
            found.append(summed(unit))
        for by_kernels, by_copies in zip(*found, strict=True):
            assert (by_kernels is None) == (by_copies is None)
            assert by_kernels is None or torch.equal(by_kernels, by_copies)

    @pytest.mark.devices("sim", "cuda")
    @pytest.mark.parametrize("sums", [torch.bfloat16, torch.float32], ids=str)
    def test_kernels_add_gradients_of_16_bits_where_they_lie(self, slots, sums, monkeypatch):
        if (reason := why_no_tables([*map(torch.device, slots)])) is not None:
            pytest.skip(reason)
        unit = unit_of([torch.zeros(3)], slots, Precision(torch.bfloat16, sums))
        monkeypatch.setattr(Layout, "copy_in", None)  # packs
        run_pass(unit, slots, {slot: [[torch.ones(3, device=slots[slot]).bfloat16()]] for slot in range(len(slots))})
        assert_sums(unit, [3])


@pytest.mark.devices("sim", "stand-in")
class TestOrders:
    """Nothing below compares values: the clocks raise if an event is missing."""

    @pytest.mark.parametrize("precision", [None, Precision(sums=torch.float32)], ids=["one dtype", "two dtypes"])
    @pytest.mark.parametrize("deliver", [[0], [1, 2], [0, 1, 2]], ids=str)
    def test_memory_is_free_after_the_sums_have_read_it(self, unit, slots, deliver, precision):
        """Owners whose slot brings nothing begin with zeros. With gradients already there, sums are dropped."""
        unit = unit_of(values(), slots, precision)
        for _ in range(3):
            sums = begin(slots, len(deliver))
            for slot in deliver:
                unit.gradients.deliver(slot, grads(slot, slots, unit), sums)
            unit.gradients.end_pass(sums)
            check_clocks()  # before the computing streams wait for the sums
            sums.wait_for_sums()
            del sums
            check_clocks()

    def test_sums_begin_after_what_the_slots_streams_did_to_gradients(self, unit, slots):
        """As an optimizer does, once the pass has ended."""
        run_all(unit, slots)
        for parameter in unit.parameters:
            parameter.grad.mul_(2)
        run_all(unit, slots)
        assert_sums(unit, [333, 666])

    def test_a_slot_delivers_again_only_after_the_sums_have_read_its_last_delivery(self, unit, slots):
        sums = begin(slots)
        for _ in range(3):
            for slot in range(3):
                unit.gradients.deliver(slot, grads(slot, slots, unit), sums)
            check_clocks()
        unit.gradients.end_pass(sums)
        sums.wait_for_sums()
        assert_sums(unit, [333, 666])

    @pytest.mark.slots(4)
    def test_sums_begin_after_all_deliveries_though_the_first_slot_brings_none(self, unit, slots):
        """Streams of the first device wait for the deliveries in any case, since their events meet there."""
        for _ in range(2):
            run_pass(unit, slots, {slot: [grads(slot, slots, unit)] for slot in (1, 2, 3)})
        assert_sums(unit, [2 * 1110, 2 * 2220])

    @pytest.mark.counts_memory
    def test_a_slot_that_brings_nothing_holds_the_sums_of_one_unit_at_a_time(self, slots):
        """They are made in memory of their own, in twice the bytes of the gradients."""
        units = [unit_of(values(rows=768, dtype=torch.float32), slots, Precision(sums=torch.float64)) for _ in range(5)]
        part = nbytes(parameter.shards[0] for parameter in units[0].parameters)
        sums = begin(slots)
        for unit in units:
            for slot in (1, 2):
                unit.gradients.deliver(slot, grads(slot, slots, unit), sums)
        growth = Growth(torch.device(slots[0]))
        for unit in units:
            unit.gradients.end_pass(sums)
        assert growth.peak <= (5 + 2 * 2) * part
        sums.wait_for_sums()

    def test_a_failed_pass_drops_its_memory_after_the_sums(self, unit, slots):
        sums = begin(slots)
        for slot in (0, 1, 2, 0):
            unit.gradients.deliver(slot, grads(slot, slots, unit), sums)
        fail_pass(unit, sums)
        check_clocks()

    @pytest.mark.parametrize("deliver", [[0], [0, 1, 2]], ids=str)
    def test_the_graphs_stream_may_be_older_than_the_pass(self, unit, slots, deliver):
        """The node belongs to the stream of the first call; what a later pass makes belongs to that pass's stream."""
        default = current_streams(slots)
        for _ in range(2):
            side = {slot: torch.Stream(slot) for slot in slots}
            with streams_joined(side):
                for _ in range(2):
                    sums = begin(slots, len(deliver))
                    before = {slot: grads(slot, slots, unit) for slot in deliver}
                    for device, stream in side.items():
                        Event(stream).make_wait(default[device])
                    with streams_set(default):
                        for slot in deliver:
                            unit.gradients.deliver(slot, before.pop(slot), sums)
                    unit.gradients.end_pass(sums)
                    sums.wait_for_sums()
                    check_clocks()
                    for parameter in unit.parameters:
                        parameter.grad.mul_(2)
                        parameter.grad = None
                    check_clocks()

    def test_the_graphs_stream_has_made_the_gradients(self, unit, slots):
        """The pass takes them on its own streams, after they were made and before their memory is used again."""
        side = {slot: torch.Stream(slot) for slot in slots}
        with streams_joined(side):
            sums = begin(slots)
        for slot in range(3):
            unit.gradients.deliver(slot, grads(slot, slots, unit), sums)
        check_clocks()
        unit.gradients.end_pass(sums)
        sums.wait_for_sums()
        assert_sums(unit, [111, 222])

    def test_slots_on_one_device_are_read_after_both_have_delivered(self, root):
        """The first one's event says nothing of what the second one writes after it."""
        slots = [root, root]
        unit = unit_of(values(), slots)
        for _ in range(2):
            run_pass(unit, slots, {slot: [grads(slot, slots, unit)] for slot in range(2)})
        assert_sums(unit, [22, 44])

    def test_the_host_adds_up_what_has_arrived(self, slots):
        """Gradients of an offloaded unit are read by the host."""
        unit = unit_of(values(), slots, is_offloaded=True)
        for _ in range(2):
            run_all(unit, slots)
        assert_sums(unit, [222, 444])
        assert {shard.device.type for shard in unit.parameters[0].grad.shards} == {"cpu"}

    def test_the_host_has_waited_for_what_arrives(self, slots, stream):
        """The clocks do not see the host's own accesses: another device writes in its place, as late as the host."""
        unit = unit_of(values(), slots, is_offloaded=True)
        run_all(unit, slots)
        with streams_set({stream.device: stream}):
            for parameter in unit.parameters:
                for shard in parameter.grad.shards:
                    shard.copy_(torch.empty_like(shard, device=stream.device), non_blocking=True)
