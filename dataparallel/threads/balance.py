"""`Balancer` chooses the split of a batch for ``chunk_sizes="balanced"``, by timing the replicas of a form's calls.

The calls of each *situation* are measured in rounds. After each round the slots' costs are fitted to all rounds, and
the next round tries the best split for these costs. When no better split is predicted, the best round's split and the
split before the search are measured in turns, and the faster one stays. A slot gets no more samples than fit in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from dataparallel.batches.chunk_sizes import split_by_shares
from dataparallel.comm.checks import near_equal_sizes
from dataparallel.devices import CPU
from dataparallel.threads.situations import Chooser, ChoosingCall, Situation, lower_third
from dataparallel.threads.slot_costs import (
    Cost,
    SlotTimes,
    fit,
    predicted,
    samples_that_fit,
    search,
    shares_by_memory,
    within,
)

log = logging.getLogger("dataparallel")

SAMPLES = 3  # calls of a round
ROUNDS = 4  # rounds of one search, at most: with the compared calls, a choice takes at most 18 calls
COMPARED = 2  # further calls with each of the two splits that are compared
GAIN = 1.03  # a split has to be faster by this ratio, or the split before the search stays
FIRST_CHECK = 100  # a choice is checked the first time after so many calls


@dataclass
class _Round:
    """The measured calls with one split. It is kept as shares, because batches of a situation may differ a little."""

    shares: tuple[float, ...]
    calls: list[tuple[list[int], list[float], float]] = field(default_factory=list)  # sizes, seconds, span

    def points(self, slot: int) -> list[tuple[float, float]]:
        """Returns the slot's (samples, seconds) in the fastest third of calls, which other load has slowed least."""
        pairs = sorted(((sizes[slot], seconds[slot]) for sizes, seconds, _ in self.calls), key=lambda p: p[1] / p[0])
        return [(float(samples), seconds) for samples, seconds in pairs[: (len(pairs) + 2) // 3]]

    def time(self) -> float:
        """Returns the seconds of a call per sample of its batch, at the end of the fastest third."""
        return lower_third(span / sum(sizes) for sizes, _, span in self.calls)


class BalancedCall(ChoosingCall):
    """The split and the measurements of one call.

    Attributes:
        size: the size of the whole batch. The number of permits is chosen by it, because chunks change.
        chunks: the sizes of the chunks, once the batch is split.
        times: the measurements, if this call is measured.
    """

    def __init__(self, balancer: Balancer, situation: _Situation, size: Hashable) -> None:
        super().__init__()
        self._balancer, self._situation = balancer, situation
        self.size = size
        self.chunks: list[int] = []
        self.times: SlotTimes | None = None
        self.groups: Sequence[Hashable | None] | None = None
        self.permits: int | None = None

    def sizes(self, total: int, slots: int) -> list[int]:
        """Returns the sizes of the chunks of ``total`` samples."""
        if slots != len(self._situation.slots):  # code of the user scatters to other slots
            return near_equal_sizes(total, slots)
        if sum(self.chunks) != total or not self.chunks:  # a call may scatter several times: all get the same split
            self.chunks = self._balancer._sizes(self._situation, total, self.is_alone)
        return list(self.chunks)

    def measures(self, slots: Sequence[torch.device]) -> SlotTimes | None:
        """Returns the object that measures the replicas on ``slots``; ``None`` if this call is not measured."""
        if len(self.chunks) == len(slots) == len(self._situation.slots) > 1:
            self.times = self._balancer._times(self, slots)
        return self.times

    def runs_with(self, permits: int, groups: Sequence[Hashable | None] | None) -> None:
        """Notes how many replicas run at a time, and which replicas never run together."""
        self.permits, self.groups = permits, groups


class Balancer(Chooser["_Situation", "_Choice"]):
    """Chooses the split for one form. Calls with fewer samples than slots are not measured."""

    def __init__(self) -> None:
        super().__init__()
        self._last: _Situation | None = None

    def begin_call(self, name: str, kind: Hashable, size: Hashable, slots: Sequence[torch.device]) -> BalancedCall:
        """Begins a call of the module with this ``name``. `end_call` has to follow."""
        with self._lock:
            kind = (kind, tuple(slots))
            situation = self._situation(kind, size, lambda start: _Situation(name, kind, slots, start))
            self._last = situation
            call = BalancedCall(self, situation, size)
            self._note_begin(call)
            return call

    def end_call(self, call: BalancedCall, failed: bool) -> None:
        """Notes that the call has ended, or failed."""
        with self._lock:
            self._running.discard(call)
            situation, times = call._situation, call.times
            if failed or not call.is_alone:
                return
            if times is not None and len(times.seconds) == len(call.chunks) and situation.note(call, times):
                self._note_choice(situation.kind, situation.choice)

    def next_sizes(self, total: int, slots: int) -> list[int]:
        """Returns the sizes into which the next call will probably split ``total`` samples: as the last call would."""
        situation = self._last
        if situation is None or len(situation.slots) != slots:
            return split_by_shares(total, [1] * slots)
        return self._sizes(situation, total, alone=True)

    def _sizes(self, situation: _Situation, total: int, alone: bool) -> list[int]:
        with self._lock:
            return situation.sizes(total, alone)

    def _times(self, call: BalancedCall, slots: Sequence[torch.device]) -> SlotTimes | None:
        with self._lock:
            return call._situation.times(slots) if call.is_alone else None


@dataclass(frozen=True)
class _Choice:
    """The shares of a batch, and how many samples each slot has memory for."""

    shares: tuple[float, ...]
    most: tuple[float, ...]


class _Situation(Situation):
    """The measured rounds of one situation, and the choice that follows from them."""

    def __init__(self, name: str, kind: Hashable, slots: Sequence[torch.device], start: _Choice | None) -> None:
        super().__init__(FIRST_CHECK)
        self.name, self.kind, self.slots = name, kind, tuple(slots)
        self.choice = start or _Choice(shares_by_memory(slots), (math.inf,) * len(slots))
        self._rounds: list[_Round] = []
        self._current: _Round | None = None  # the round of the next measured call
        self._is_compared = False

    def sizes(self, total: int, alone: bool) -> list[int]:
        """Returns the split that is being measured. A call that overlaps others is not measured: it gets the choice."""
        measured = self._current if alone else None
        return self._sizes_for((measured or self.choice).shares, total)

    def _sizes_for(self, shares: Sequence[float], total: int) -> list[int]:
        sizes = split_by_shares(total, shares)
        return within(sizes, self.choice.most) if len(sizes) == len(self.slots) else sizes

    def times(self, slots: Sequence[torch.device]) -> SlotTimes | None:
        """Returns the object that measures a call that begins now, or ``None``."""
        if self._current is None:
            if not self._is_time_to_measure:
                return None
            self._current = _Round(self.choice.shares)
            self._rounds, self._is_compared = [self._current], False
        return SlotTimes(slots)

    def note(self, call: BalancedCall, times: SlotTimes) -> bool:
        """Adds a measured call. Returns ``True`` if the situation has its choice now."""
        current = self._current
        if current is None or call.permits is None:
            return False
        seconds = [times.seconds[slot] for slot in range(len(self.slots))]
        current.calls.append((call.chunks, seconds, times.span))
        most = samples_that_fit(self.slots, call.chunks, times.free, times.taken)
        self.choice = _Choice(self.choice.shares, most)
        if self._is_compared:
            # The two rounds take turns, so that other load on the machine affects both.
            self._current = min(self._rounds, key=lambda each: len(each.calls))
            return len(self._current.calls) >= SAMPLES + COMPARED and self._decide(call)
        if len(current.calls) < SAMPLES:
            return False
        proposal = self._proposal(call)
        if proposal is not None:
            self._current = _Round(proposal)
            self._rounds.append(self._current)
            return False
        before, best = self._rounds[0], min(self._rounds, key=_Round.time)
        if best is before:
            return self._decide(call)
        self._current, self._rounds, self._is_compared = before, [before, best], True
        return False

    def _proposal(self, call: BalancedCall) -> tuple[float, ...] | None:
        """Returns the split to try next; ``None`` if the best split has been tried, or would gain too little."""
        if len(self._rounds) >= ROUNDS:
            return None
        costs, total = self._costs(), sum(call.chunks)
        # Devices compute at the same time, also if few replicas run Python at a time.
        permits = len(self.slots) if self.slots[0] != CPU or call.permits is None else call.permits
        best = search(costs, call.chunks, permits, call.groups, self.choice.most)
        current_time, best_time = (
            predicted([cost.of(size) for cost, size in zip(costs, sizes, strict=True)], permits, call.groups)
            for sizes in (call.chunks, best)
        )
        is_tried = any(self._sizes_for(each.shares, total) == best for each in self._rounds)
        return None if is_tried or current_time < GAIN * best_time else tuple(map(float, best))

    def _costs(self) -> list[Cost]:
        return [fit([point for each in self._rounds for point in each.points(slot)]) for slot in range(len(self.slots))]

    def _decide(self, call: BalancedCall) -> bool:
        before, best = self._rounds[0], self._rounds[-1] if self._is_compared else self._rounds[0]
        winner = before if before.time() < GAIN * best.time() else best
        self.choice = _Choice(winner.shares, self.choice.most)
        self._log(sum(call.chunks), before, winner)
        self._rounds, self._current = [], None
        self._note_decision()
        return True

    def _log(self, total: int, before: _Round, winner: _Round) -> None:
        sizes = self._sizes_for(winner.shares, total)
        each = ", ".join(f"{1e3 * cost.of(size) / size:.3g}" for cost, size in zip(self._costs(), sizes, strict=True))
        full = [slot for slot, most in enumerate(self.choice.most) if sizes[slot] >= most]
        gain = "no other split is faster"
        if winner is not before:
            gain = f"{before.time() / winner.time():.2f} times as fast as {self._sizes_for(before.shares, total)}"
        log.info(
            "chunk_sizes='balanced': %s on %s: %d samples are split into %s, %s; a sample takes %s ms in forward%s",
            self.name,
            ", ".join(map(str, self.slots)),
            total,
            sizes,
            gain,
            each,
            f"; slots {full} have memory for no more" if full else "",
        )
