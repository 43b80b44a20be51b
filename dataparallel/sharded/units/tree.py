"""`Tree` runs calls of the root and passes of backward over its units, and orders them against each other.

The root is the outermost module that is called. Its tree has the units of the root and of all modules below.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dataparallel import _torch
from dataparallel.autograd.pass_of_backward import running_pass, wait_for_passes
from dataparallel.comm.streams.current import GivenEvents, current_streams
from dataparallel.optimizer_steps import before_each_step
from dataparallel.sharded.operators import note_host_reads
from dataparallel.sharded.units.bindings import TreeBinding
from dataparallel.sharded.units.calls import RootCall
from dataparallel.sharded.units.joint_gathers import GatherBudget
from dataparallel.sharded.units.passes import BackwardPass, SumsOfPass
from dataparallel.sharded.units.shards import LastCopies, wait_for
from dataparallel.sharded.units.sums import PassGradients
from dataparallel.sharded.units.unit import Unit

if TYPE_CHECKING:
    from dataparallel.sharded.units.sums_over_machines import SumsOverMachines

_lock = threading.Lock()
_before_step: dict[weakref.WeakMethod[Callable[[Optimizer], bool]], None] = {}
_hook: Any = None


def before_next_step(method: Callable[[Optimizer], bool]) -> None:
    """Calls a bound method with the optimizer before each step of any optimizer, until the method returns true.

    Only a weak reference to the method's object is kept.
    """
    global _hook
    with _lock:
        if _hook is None:
            _hook = before_each_step(_run_before_step)
        _before_step[weakref.WeakMethod(method)] = None


def _run_before_step(optimizer: Optimizer) -> None:
    """Runs before each step of every optimizer."""
    for reference in [*_before_step]:
        method = reference()
        if method is None or method(optimizer):
            with _lock:
                _before_step.pop(reference, None)


class Tree:
    """The units of one tree, the root's first.

    Attributes:
        machines: the processes that the units are spread over, if there are several.
        bindings: for each unit the binding that a call of this tree gives it.
        next_unit: for each unit the unit that came after it in the last forward.
        last_call: the call of the root that began last.
        order_of_sums: the numbers of units, in the order of sums over machines: rank 0's if ``is_order_known``.
    """

    def __init__(self, units: Sequence[Unit], slots: Sequence[torch.device]) -> None:
        self.units, self.slots = list(units), list(slots)
        self.next_unit: dict[Unit, Unit] = {}
        self.last_call: RootCall | None = None
        self._pass: BackwardPass | None = None
        self._failed: list[BackwardPass] = []  # passes that have failed while tasks of the engine run on in them
        self._ending_thread: int | None = None  # ends a pass now
        self._changed = threading.Condition()
        self._copies = LastCopies()
        self.gather_budget = GatherBudget()
        self.bindings = {
            unit: TreeBinding(i, self.deliver, self.settle, self._copies, self.gather_budget, self._join_directly)
            for i, unit in enumerate(self.units)
        }
        self._registering = threading.Lock()  # guards what a tree registers, and how many calls run
        self._number_of_calls = 0
        self._unfinished: list[SumsOfPass] = []  # of passes before the last one of a step
        self.machines = self.units[0].machines
        self.order_of_sums = [*reversed(range(len(self.units)))]
        self.is_order_known = False

    @contextmanager
    def calling(self, number_of_slots: int) -> Iterator[RootCall]:
        """Wraps a call of the root on the first ``number_of_slots`` slots. Call `prepare` before."""
        self._finish_sums()
        self._begin_call()
        call: RootCall | None = None
        has_failed = True
        try:
            call = RootCall(self, self.slots[:number_of_slots])
            yield call
            has_failed = False
        finally:
            with self._registering:
                self._number_of_calls -= 1
            if call is not None:
                call.end_forward(has_failed)
                self._make_owners_wait(call.computing)

    def _begin_call(self) -> None:
        """Registers the sharded parameters. They stay in the user's modules until the last running call has ended."""
        with self._registering:
            self._number_of_calls += 1
            for unit in self.units:
                unit.registries.show_sharded()

    def show_current(self) -> None:
        """Registers full parameters again that the user's ``unshard()`` keeps, unless a call of any thread runs.

        A call that begins reads the user's modules. Full parameters of another call would be freed under its hands.
        """
        with self._registering:
            if self._number_of_calls == 0:
                for unit in self.units:
                    unit.registries.show_current()

    def prepare(self) -> None:
        """Adapts the units to what other code has done to the parameters since the last call."""
        for unit in self.units:
            unit.refresh(self._wait_for_optimizer)
            unit.gradients.drop_void()
            unit.drop_old_values()

    def settle(self) -> None:
        """Waits until no pass of backward uses the units. Called inside a backward, it does nothing.

        A backward that fails raises at once, while other threads of the engine still run its nodes, which read
        parameters. Its pass ends when these threads have left.
        """
        if _torch.is_in_backward() or self._ending_thread == threading.get_ident():
            return
        with self._changed:
            wait_for_passes(self._changed, lambda: self._pass is None and self._ending_thread is None)

    def _wait_for_optimizer(self) -> None:
        """Makes the current streams, on which shards are packed next, wait for the optimizer's step."""
        event = self.take_post_optim_event()
        if event is not None:
            wait_for([event], current_streams(self.slots).values())

    def take_post_optim_event(self) -> GivenEvents | None:
        """Returns, once, the events after the optimizer's step that the user has given for the next call."""
        root = self.units[0]
        given, root.post_optim_event = root.post_optim_event, None
        if given is None:
            return None
        return GivenEvents([given] if isinstance(given, torch.Event) else given)

    def _finish_sums(self) -> None:
        """Makes streams wait for the sums of passes before the last one of a step."""
        while self._unfinished:
            try:
                sums = self._unfinished.pop(0)
            except IndexError:  # another thread has taken the last ones
                return
            sums.wait_for_sums()

    def before_last_sums(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        """Orders writes to the shards after all reads: hooks on gradients, which run next, may step an optimizer."""
        self._finish_sums()
        self._make_owners_wait(computing)

    def join_pass(self, call: RootCall, only_if_alone: bool = False, reaches_units: bool = True) -> BackwardPass:
        """Returns the running pass of backward, begun now if there is none. It lasts until the task has ended."""
        with self._changed:
            if any(failed.has_current_task() for failed in self._failed):
                raise RuntimeError(
                    "this backward has lost gradients: it ran together with another one through the same modules, "
                    "which has failed. Zero the gradients, and run it again"
                )
            is_new = False
            # While another thread ends a pass it frees all units, also those that a new pass would gather.
            wait_for_passes(self._changed, lambda: self._ending_thread in (None, threading.get_ident()))
            while self._pass is None or not self._pass.join(only_if_alone):
                if self._pass is None:
                    self._pass, is_new = self._new_pass(call), True
                else:
                    ending = self._pass
                    wait_for_passes(self._changed, lambda: self._pass is not ending and self._ending_thread is None)  # noqa: B023 - called at once
            self._pass.include(call.slots)
            self._pass.reaches_units |= reaches_units
            if is_new:  # after joining, so that the pass fails if this raises
                self._refuse_lost()
            return self._pass

    def note_backward_returned(self) -> None:
        """Has the next optimizer step wait: a ``backward()`` has returned while another one in its pass runs on.

        The other one may have failed before: torch raises the error while threads still run its nodes. A backward that
        begins meanwhile takes part in the same pass, and loses gradients when the pass ends.
        """
        before_next_step(self._end_pass_before_step)

    def _end_pass_before_step(self, optimizer: Optimizer) -> bool:
        """Waits for the pass. Returns false if the optimizer has none of the parameters: a later one may have."""
        own = {id(parameter) for unit in self.units for parameter in unit.parameters}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return False
        self.settle()
        self._refuse_lost()
        return True

    def _refuse_lost(self) -> None:
        for unit in self.units:
            unit.gradients.refuse_lost()

    def _new_pass(self, call: RootCall) -> BackwardPass:
        self.gather_budget.renew()
        for unit in self.units:
            unit.begin_gathers(len(call.slots))
            unit.gradients.drop_void()
            # The user's modules have the sharded ones until the pass has ended. Replicas have the full ones.
            unit.registries.show_sharded()
        summed = running_pass().get(PassGradients, lambda _: PassGradients())
        return BackwardPass(self, call.slots, call.computing, summed, self._sums_over_machines(call.computing))

    def _sums_over_machines(self, computing: Mapping[torch.device, torch.Stream]) -> SumsOverMachines | None:
        """Returns the sums over machines of a new pass; ``None`` with one machine, or if no unit synchronises."""
        if self.machines is None or not any(unit.requires_gradient_sync for unit in self.units):
            return None
        if any(unit.gradients.partial is not None or not unit.requires_all_reduce for unit in self.units):
            self._finish_sums()  # partial sums, which wait for other machines, are part of the next sums
        from dataparallel.sharded.units.sums_over_machines import SumsOverMachines

        return SumsOverMachines(self, self.machines, computing)

    def learn_order(self, order: list[int]) -> None:
        """Sets the order of rank 0, in which units are summed over machines from the next pass on."""
        self.order_of_sums, self.is_order_known = order, True

    def deliver(self, unit: Unit, slot: int, grads: Sequence[Tensor | None]) -> None:
        """Takes the gradients of all parameters of a unit on a slot, from the backward of their node."""
        call = self.last_call
        assert call is not None
        running = self.join_pass(call, only_if_alone=True)
        if unit.gradients.deliver(slot, grads, running.sums) is not None:
            running.note_delivery(slot, unit, unit.gradients.full_bytes)

    def _join_directly(self) -> BackwardPass:
        """Joins the pass in a backward that brings gradients to parameters which a loss uses directly."""
        call = self.last_call
        assert call is not None
        return self.join_pass(call, reaches_units=False)

    def note_pass_end(self, ended: BackwardPass, has_failed: bool) -> None:
        """Frees the units after a pass, and lets threads go on that wait for its end."""
        with self._changed:
            self._pass, self._ending_thread = None, threading.get_ident()
            self._failed = [failed for failed in [*self._failed, ended] if failed.has_tasks]
            if not ended.has_finished:
                self._unfinished.append(ended.sums)
        if has_failed and self.machines is not None:
            self.machines.step_failed(RuntimeError("its backward has failed, with an error that is shown there"))
        try:
            for unit in self.units:
                if ended.reaches_units:
                    for slot_unit in unit.slot_units:
                        slot_unit.note_pass_end(has_failed, ended.is_recorded)
                    unit.pieces.drop()
                unit.end_gathers()
            self.show_current()
            self._make_owners_wait(ended.sums.computing)
            ended.sums.make_callers_wait()
        finally:
            with self._changed:
                self._ending_thread = None
                self._changed.notify_all()

    def _make_owners_wait(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        """Orders later writes to the shards, by streams and by the host, after all pulls and copies of shards."""
        copies = self._copies.take_last()
        reads = [*copies, *(event for unit in self.units for event in unit.take_pulls())]
        after_reads = self.units[0].streams.meet("pulls", reads) if reads else None
        wait_for([] if after_reads is None else [after_reads], computing.values())
        if any(unit.is_offloaded for unit in self.units):
            note_host_reads(copies)
