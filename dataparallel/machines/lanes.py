"""`Lane`: collectives and words of several ranks, which all of them issue in one order. `Issuer` is the thread for it.

Backends pair collectives by the order in which each rank issues them. A lane issues its items in the order in which
they were added, which is that of buckets and units: rank 0 sends it after the first step (``gradients.machine_sums``,
``sharded.units.over_machines``). Lanes have connections of their own, so none waits for another. Only NCCL, and hooks,
which send over a group of the user, need one order over all lanes: see `Turns`.

A *word* is a small value of each rank, gathered over gloo. A pair of items that have not followed each other before is
compared by a word, once: after the first step nothing more is sent for that.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.futures import Future

from dataparallel.comm import nccl
from dataparallel.forks import in_forked_child
from dataparallel.machines.collectives import SLICE, Link, Staged, Transfer, all_reduce, reduce_scatter, send_sums
from dataparallel.machines.descriptions import differences
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed, copy_error
from dataparallel.threads.pool import Outcome

if TYPE_CHECKING:
    from dataparallel.machines.group import Machines

GRACE = 2.0
"""Seconds that a communication hook has to end here after another rank has failed."""

IDLE = 2.0
"""Seconds after which the thread ends if there is nothing to do."""

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for a thread."""

_FRAME, _LENGTH = 1024, 8  # bytes of a word's first message, and of the length at its beginning

_Pauses = Iterator[None]
"""A generator that yields where it has to wait. The thread then runs other lanes, and resumes it later."""


class Result:
    """The future of one item of a lane. Messages call the item ``what``; ``number`` is its place in the epoch."""

    def __init__(self, lane: Lane, what: str, epoch: int, number: int) -> None:
        self.what, self.lane, self.epoch, self.number = what, lane, epoch, number
        self._decided = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """The tensor of a collective, ready for the calling thread's current stream, or the words of all ranks.

        Raises a `MachinesError`, or what a collective or a communication hook has raised on this rank.
        """
        state = self.lane.state
        state.check_process()
        check = state.wait_check(self)
        while not self._decided.wait(SLICE):
            check()
        if self._error is not None:
            raise copy_error(self._error)
        if isinstance(self._result, Transfer):
            # A transfer can be waited for once, so its tensor replaces it here for a second wait.
            try:
                self._result = self._result.wait(check)
            except MachinesError:
                raise
            except RuntimeError as error:
                raise copy_error(state.error_of(self, error)) from error
        return self._result

    def settle(self, seconds: float) -> None:
        """Waits until the item has been issued, or has failed, for this long at most."""
        self._decided.wait(max(0.0, seconds))

    def has_arrived(self) -> bool:
        """True if what is received can be sent on."""
        return self._decided.is_set() and (not isinstance(self._result, Transfer) or self._result.has_arrived())

    def transfer(self) -> Transfer:
        """The collective that has been issued, for the issuing thread to send on what it has received."""
        if self._error is not None:
            raise copy_error(self._error)
        transfer: Transfer = self._result
        return transfer

    def succeed(self, result: Any) -> None:
        self._result = result
        self._decided.set()

    def fail(self, error: BaseException) -> None:
        if not self._decided.is_set():
            self._error = error
            self._decided.set()


def masks_of(end: Result) -> tuple[list[bool], list[Any]]:
    """Waits for `Lane.end`. An entry of the mask is true if it is on any rank. Returns what each rank has said besides.

    No rank may use a sum before this returns: then all ranks have sent all of theirs.
    """
    said = end.wait()
    for key in {key for _, sent, _ in said for key in sent}:
        if len({sent[key] for _, sent, _ in said if key in sent}) > 1:
            error = MachinesDiffer(
                "the ranks have not sent the same things in one order before the end of this pass, so no gradient is "
                "used: they have run other forwards or backwards, or other parts of the model. All ranks have to run "
                "the same calls on the same model"
            )
            end.lane.state.leave(end.epoch, error)
            raise error
    return [any(of_ranks) for of_ranks in zip(*(mask for mask, _, _ in said), strict=True)], [e for _, _, e in said]


@dataclass
class Item:
    """One item of a lane.

    Attributes:
        results: one for each of ``calls``; a word and a hook have one.
        text: what has to be equal on all ranks; ``None`` for what nothing has to be compared for.
        calls: of a collective: each takes a `Link` and returns a `Transfer`. Of a hook: ``begin`` and ``check``.
        over: the ranks of a collective: those of the lane, or some of them.
        after: results that have to arrive before the item is issued.
        is_hook: ``begin`` sends anything itself, and returns a future, which the thread waits for.
        value: of a word.
    """

    results: Sequence[Result]
    text: str | None
    calls: Sequence[Callable[..., Any]] = ()
    over: Machines | None = None
    after: Sequence[Result] = ()
    is_hook: bool = False
    value: Any = None


class Lane:
    """A sequence of items of the ranks of ``machines``. All of them make their lanes in one order.

    Attributes:
        history: a checksum of the texts of all collectives in this epoch. Ranks that have added the same have the same.
        connections: of this epoch: "words", and others by the places of ranks in the group.
    """

    history: int
    _count: int
    _issued: int

    def __init__(self, machines: Machines, purpose: str, number: int) -> None:
        self.machines, self.state, self.number = machines, machines.state, number
        self.name = f"{purpose} {number}"
        self._begin_epoch()

    # ---- what forms call

    def launch(
        self,
        kind: str,
        what: Sequence[str],
        calls: Sequence[Callable[[Link], Transfer]],
        text: str | None = None,
        *,
        epoch: int,
        over: Machines | None = None,
        after: Sequence[Result] = (),
    ) -> list[Result]:
        """Adds one collective on each of several devices. On none of them another launch comes between.

        The thread calls ``calls`` in the order in which items were added. If one raises, no rank can go on in the
        epoch. ``text`` says whatever decides sizes and dtypes. ``epoch``: that in which the step has begun here.
        """
        return self._add(kind, what, epoch, text=text, calls=calls, over=over or self.machines, after=after)

    def add_sums(
        self, kind: str, what: Sequence[str], staged: Sequence[Staged | Result], device: torch.device, **options: Any
    ) -> list[Result]:
        """Adds sums over ``over``, of what is staged or of what earlier results have received. See `launch`.

        With gloo they are added in rank order, so equal inputs give equal bits in every run, in buckets of any size:
        gloo's own sum begins at a rank that depends on the position in the tensor.
        """
        over = options.get("over") or self.machines
        is_one = over.size <= 2 or over.is_nccl(device)
        issue = all_reduce if is_one else reduce_scatter
        calls = [lambda link, each=each: issue(_staged(each), link) for each in staged]
        first = self.launch(kind, what, calls, **options)
        if is_one:
            return first
        sums = [lambda link, each=each: send_sums(each.transfer(), link) for each in first]
        return self.launch(kind, what, sums, **{**options, "text": None, "after": first})

    def call(
        self,
        kind: str,
        what: str,
        begin: Callable[[], Future[Any]],
        check: Callable[[], object],
        *,
        epoch: int,
        text: str,
    ) -> Result:
        """Adds a communication hook: ``begin`` calls the hook, which may send anything itself, and returns its future.

        The thread calls ``begin``, waits for the future, calls ``check``, and issues nothing else meanwhile. If either
        raises on a rank, no rank calls the next hook, and all ranks leave the epoch.
        """
        return self._add(kind, [what], epoch, text=text, calls=[begin, check], is_hook=True)[0]

    def gather(self, kind: str, text: str, value: Any, *, epoch: int, what: str = "what the ranks say") -> Result:
        """Adds a word. The result is the list of all ranks' values, or `MachinesDiffer` if the texts differ."""
        return self._add(kind, [what], epoch, text=f"{kind}\n{text}", value=value)[0]

    def end(
        self, kind: str, mask: Sequence[bool], *, epoch: int, others: Sequence[Lane] = (), extra: Any = None
    ) -> Result:
        """Adds the word at the end of a pass: a bit mask, and what the pass has sent. See `masks_of`."""
        sent = {f"{lane.name} of {lane.machines.ranks}": lane.history for lane in (self, *others)}
        text, said = f"{len(mask)} gradients", (bytes(mask), sent, extra)
        return self.gather(f"the end of {kind!r}", text, said, epoch=epoch, what="the end")

    def _add(self, kind: str, what: Sequence[str], epoch: int, **options: Any) -> list[Result]:
        self.state.check_process()
        with issuer().changed:
            results = [Result(self, f"{name} of {kind!r}", epoch, self._count) for name in what]
            error = self.state.why_not(epoch)
            if error is None and results:
                self._count += 1
                item = Item(results, **options)
                if item.calls and item.text is not None:
                    self.history = zlib.crc32(item.text.encode(), self.history)
                self._items.append(item)
                issuer().run(self)
        if error is not None:
            for result in results:
                result.fail(error)
        return results

    # ---- what `GroupState` calls, with ``issuer().changed`` held

    def _begin_epoch(self) -> None:
        self._items: deque[Item] = deque()
        self._steps: Iterator[None] | None = None
        self._count = self._issued = self._before = self.history = 0
        self._seen: set[tuple[int, int]] = set()  # pairs of items, by hashes of their texts
        self.connections: dict[tuple[int, ...] | str, Any] = {}

    def drop(self, error: BaseException) -> int:
        """Drops all items for a new epoch, and makes their waits raise. Returns how many items had been issued."""
        items, issued = self._items, self._issued
        self._begin_epoch()
        for item in items:
            for result in item.results:
                result.fail(error)
        return issued

    # ---- the issuing thread

    @property
    def has_items(self) -> bool:
        return bool(self._items)

    @property
    def waits_for_results(self) -> bool:
        """True if nobody wakes the thread when the next item can be issued: gloo tells only of some collectives."""
        items = self._items
        return bool(items) and bool(items[0].after)

    def advance(self) -> None:
        """Issues items until one of them has to wait, or none is left."""
        with issuer().changed:
            if self._steps is None:
                self._steps = self._issue_all(self._items)
            steps = self._steps
        for _ in steps:  # to the next pause
            return
        with issuer().changed:
            if self._steps is steps:
                self._steps = None

    def _issue_all(self, items: deque[Item]) -> _Pauses:
        while items and items is self._items:
            item = items[0]
            result = item.results[0]
            try:
                yield from self._issue(item)
            except GeneratorExit:
                raise
            except BaseException as error:
                self._fail(item, error)
                del error
            with issuer().changed:
                if items is self._items and items and items[0] is item:
                    items.popleft()
                    self._issued += 1
            del item, result  # while the generator waits it holds neither

    def _issue(self, item: Item) -> _Pauses:
        result = item.results[0]
        if item.text is not None and (item.calls or item.is_hook):
            pair = self._before, hash(item.text)
            if pair not in self._seen:
                yield from self._gather(result, f"what comes next\n{item.text}", None)
                self._seen.add(pair)
            self._before = pair[1]
        if not item.calls:
            result.succeed((yield from self._gather(result, item.text or "", item.value)))
            return
        yield from self._until(result, lambda: all(each.has_arrived() for each in item.after))
        if item.is_hook:
            # All ranks have come to this hook, so none has failed before it, or in the one before.
            yield from self._gather(result, "a hook", None)
            yield from self.state.turns.take(self, result)
            self._run_hook(item, *item.calls)
            result.succeed(None)
            return
        assert item.over is not None
        over = item.over
        gloo = yield from self.connect(result, over.places)
        if self.state.has_nccl:
            yield from self.state.turns.take(self, result)
        link = Link(over.rank, over.size, gloo, over.nccl() if over.has_nccl else None, over)
        # Held for all devices of the item, so that other launches on them come before it or after it on each.
        with nccl.launching if over.has_nccl else nullcontext():
            for each, call in zip(item.results, item.calls, strict=True):
                each.succeed(call(link))

    def _run_hook(self, item: Item, begin: Callable[[], Any], check_result: Callable[[], object]) -> None:
        """Runs a communication hook, which sends messages over a group of the user.

        If the hook fails on one rank, it may wait on others for messages that never come. If it still waits `GRACE`
        seconds after its rank knows of that, its messages would be paired with later ones: the group is lost.
        """
        (result,), done = item.results, threading.Event()
        future, check = begin(), self.state.wait_check(result)
        future.add_done_callback(lambda _: done.set())
        try:
            while not done.wait(SLICE):
                check()
        except (PeerFailed, MachinesDiffer) as failed:
            if not done.wait(GRACE):
                text = f"what it has sent here gets no answer, because it has failed on another rank: {failed}"
                raise self.state.lose(RuntimeError(text), result) from failed
            raise
        check_result()

    def _gather(self, result: Result, text: str, value: Any) -> Any:
        """Gathers a word. A second message is sent if one of them is long."""
        gloo = yield from self.connect(result, "words")
        pickled = pickle.dumps((text, value))
        data = len(pickled).to_bytes(_LENGTH, "little") + pickled
        rows = yield from self._gather_bytes(result, gloo, data[:_FRAME], _FRAME)
        lengths = [_LENGTH + int.from_bytes(row[:_LENGTH], "little") for row in rows]
        if max(lengths) > _FRAME:
            rests = yield from self._gather_bytes(result, gloo, data[_FRAME:], max(lengths) - _FRAME)
            rows = [row + rest for row, rest in zip(rows, rests, strict=True)]
        said = [pickle.loads(row[_LENGTH:length]) for row, length in zip(rows, lengths, strict=True)]
        if self.machines.size == self.state.size:  # all ranks are in this epoch
            self.state.forget_old()
        if len({text for text, _ in said}) > 1:
            raise MachinesDiffer(self._differences([text for text, _ in said]))
        return [value for _, value in said]

    def _gather_bytes(self, result: Result, gloo: Any, data: bytes, size: int) -> Any:
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.machines.size)]
        work = gloo.allgather([rows], [own])
        future = work.get_future()  # it is done before the work says that it is completed
        future.add_done_callback(issuer().wake)
        yield from self._until(result, future.done)
        work.wait()  # raises its error
        return [row.numpy().tobytes() for row in rows]

    def _differences(self, texts: Sequence[str]) -> str:
        """The message of `MachinesDiffer`. The first line of a text is its kind."""
        kinds = [text.removeprefix("what comes next\n").partition("\n")[0] for text in texts]
        names = self.machines.names
        if len({*kinds}) > 1:
            by_kind = {kind: [rank for rank, other in enumerate(kinds) if other == kind] for kind in kinds}
            parts = [f"{kind!r} begins on {names(ranks)}" for kind, ranks in by_kind.items()]
        else:
            parts = differences(texts, self.machines.ranks)
        return (
            f"the ranks differ in what they do next ({kinds[0]!r}), so nothing of it is used: {'; '.join(parts)}. All "
            "ranks have to run the same calls on the same model"
        )

    def connect(self, result: Result, key: tuple[int, ...] | str) -> Any:
        """Connects ranks by gloo, once in an epoch, in a thread of its own: that blocks until all of them have come.

        ``key``: places of ranks in the group, "words" for those of the lane, or "turns" for all.
        """
        connections = self.state.turns.connections if key == "turns" else self.connections
        if key not in connections:
            outcome = Outcome()

            def connect() -> None:
                outcome.fill(partial(self.state.connect, self, key, result.epoch))
                issuer().wake()

            threading.Thread(target=connect, daemon=True).start()
            yield from self._until(result, lambda: (outcome.value or outcome.error) is not None)
            if outcome.error is not None:
                raise outcome.error
            connections[key] = outcome.value
        return connections[key]

    def _until(self, result: Result, is_over: Callable[[], bool]) -> _Pauses:
        check = self.state.wait_check(result)
        while not is_over():
            check()
            yield

    def _fail(self, item: Item, error: BaseException) -> None:
        """An item cannot be issued, or a collective or a hook has raised here: the epoch is over."""
        result = item.results[0]
        if isinstance(error, MachinesError):
            self._issued += isinstance(error, MachinesDiffer)  # what tells the others was sent
            self.state.leave(result.epoch, error)
        elif is_of_network(error):
            error = self.state.error_of(result, error)
        else:
            if not isinstance(error, Exception):  # would end the thread that waits
                other = RuntimeError(f"{type(error).__name__}: {error}")
                other.__cause__, error = error, other
            for each in item.results:
                each.fail(error)
            self.state.leave(result.epoch, error, result.what)
        for each in item.results:
            each.fail(error)


def _staged(each: Staged | Result) -> Staged:
    return each.transfer().received() if isinstance(each, Result) else each


def is_of_network(error: BaseException) -> bool:
    """True if torch or gloo has raised the error because a peer is gone or late."""
    text = str(error)
    return isinstance(error, distributed.DistError) or "/gloo/" in text or "caused pair closure" in text


class Turns:
    """Whose turn it is, where launches of all lanes need one order: NCCL hangs if ranks launch in different ones.

    Rank 0 launches what is ready there, and tells the others, one small broadcast for each launch, which lane it was.
    They launch the next item of that lane. Only the issuing thread uses this. A new epoch has a new object.
    """

    def __init__(self) -> None:
        self.connections: dict[Any, Any] = {}
        self._next: int | None = None
        self._told: tuple[torch.Tensor, Any] | None = None

    def take(self, lane: Lane, result: Result) -> _Pauses:
        """Returns when the lane may launch. The caller then does so, without another pause."""
        if lane.state.size == 1:
            return
        gloo = yield from lane.connect(result, "turns")
        options = distributed.BroadcastOptions()
        if lane.state.rank == 0:
            gloo.broadcast([torch.tensor([lane.number])], options)
            return
        check = lane.state.wait_check(result)
        while not self._is_of(lane.number, gloo, options):
            check()
            yield

    def _is_of(self, number: int, gloo: Any, options: Any) -> bool:
        if self._next is None:
            if self._told is None:
                told = torch.empty(1, dtype=torch.int64)
                self._told = told, gloo.broadcast([told], options).get_future()
                self._told[1].add_done_callback(issuer().wake)
            told, future = self._told
            if not future.done():
                return False
            future.wait()
            self._next, self._told = int(told), None
            issuer().wake()  # another lane may have waited for this
        if self._next != number:
            return False
        self._next = None
        return True


class Issuer:
    """The thread that issues what lanes have. It runs each until it has to wait, and sleeps when all wait.

    ``changed`` guards the items of all lanes, and `wake` notifies it. The thread is a daemon, as a launch may block.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False
        self._lanes: dict[Lane, None] = {}
        self._is_awake = False
        self._thread: threading.Thread | None = None

    def run(self, lane: Lane) -> None:
        """Runs the lane, which has a new item, from now on."""
        with self.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="machines: issuing", daemon=True)
                thread.start()  # if there can be no thread, nothing has changed
                self._thread = thread
            self._lanes[lane] = None
            self.wake()

    def wake(self, _: object = None) -> None:
        with self.changed:
            self._is_awake = True
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the thread, and makes waits raise, when the interpreter ends."""
        self.is_closed = True
        self.wake()
        if self._thread is not None:
            self._thread.join(AT_EXIT)

    def _run(self) -> None:
        while not self.is_closed:
            with self.changed:
                self._is_awake = False
                lanes = [*self._lanes]
            for lane in lanes:
                lane.advance()
                with self.changed:
                    if not lane.has_items:
                        self._lanes.pop(lane, None)
            polls = any(lane.waits_for_results for lane in lanes)
            lanes.clear()
            lane = None  # type: ignore[assignment]
            with self.changed:
                if not self._is_awake and not self.is_closed:
                    self.changed.wait(0.001 if polls else SLICE if self._lanes else IDLE)
                if not self._is_awake and not self._lanes:
                    self._thread = None
                    return


_issuer = Issuer()


def issuer() -> Issuer:
    return _issuer


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _issuer
    _issuer = Issuer()
