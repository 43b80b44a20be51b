"""`RoundQueue`: the rounds of one purpose of a group, which come one after the other, in the same order on every rank.

The launcher's thread plays them: before each item all ranks say that they have it. All waits are pauses, in which other
queues go on. A round that ranks disagree on, or in which a rank has failed, ends for itself alone; every other failure
breaks the group. A queue keeps nothing of what was issued.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dataparallel.comm import nccl
from dataparallel.machines.agreement import Control, Steps, agree, exchange_used
from dataparallel.machines.collectives import Transfer
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed, again, in_words
from dataparallel.machines.health import Health, Watch, is_of_network
from dataparallel.machines.rounds import Item, Round, make_call

if TYPE_CHECKING:
    from dataparallel.machines.group import Group

_Pauses = Iterator[None]
"""Pauses where it yields. A generator's result is what it has waited for."""


class RoundQueue:
    """The rounds of one purpose. ``name`` is equal on all ranks, and given once.

    Attributes:
        waits: the queue waits for something other than a caller of its own process.
        changed: guards the rounds.
        calls: how many calls of hooks there have been.
    """

    def __init__(self, group: Group, health: Health, name: str) -> None:
        self.name, self.health, self.waits = name, health, False
        self.group, self._launcher = group, health.launcher
        self.changed, self.wake = self._launcher.changed, self._launcher.wake
        self._rounds: deque[Round] = deque()
        self._control: Control | None = None  # once a round has begun on all ranks
        self._steps: Iterator[None] | None = None
        self.calls = 0

    # ---- what forms call

    def begin_round(self, kind: str, contents: str) -> Round:
        """Begins a round, which all ranks have to do in the same order. It starts when the rounds before have ended.

        If the ranks differ in kind or contents, nothing of the round is issued on any rank, and every wait of it raises
        `MachinesDiffer`. A broken group is no error here: the waits raise.

        Args:
            kind: a word for messages, ``"backward"`` for example.
            contents: lines of text that are equal on all ranks. Whatever decides the number, order, sizes and dtypes of
                the round's items has to be in it.
        """
        return self._add(Round(self, kind, contents))

    def all_say(self, kind: str, contents: str, value: Any) -> list[Any]:
        """A round of its own: what each rank says, in their order; small, and can be pickled. This waits."""
        round = self.begin_round(kind, contents)
        said = round.say("what the ranks say", lambda: value)
        round.close()
        found: list[Any] = said.wait()
        return found

    def signal_failure(self, error: BaseException, until_all: bool = False) -> None:
        """Tells the other ranks that this one has failed before a round that they begin.

        Their next round then raises `PeerFailed`, with this error in words. This returns at once.

        Args:
            error: why.
            until_all: in every round that they begin until they all call this too, each rank once for each failure.
                That is for rounds of which ranks may have begun different numbers when one fails.
        """
        text = f"before a round: {in_words(error)}"
        self.health.notices.tell_failure(text)
        self._add(Round(self, "a failure", "", failed=text, until_all=until_all))

    def _add(self, round: Round) -> Round:
        self.health.check_process()
        with self.changed:
            if self.health.broken is not None:
                round.error = self.health.broken
                return round
            if self.health.is_closed:
                raise MachinesError("the interpreter ends: nothing can be sent any more")
            self._launcher.play(self)
            self._rounds.append(round)
        return round

    # ---- what the launcher and `Health` call

    @property
    def has_rounds(self) -> bool:
        """True if there is something to play, or what was played has not ended: it may have a number in the order."""
        return bool(self._rounds) or self._steps is not None

    def advance(self) -> None:
        """Plays the rounds until something has to be waited for."""
        self._steps = self._steps or self._play_all()
        self.waits = False
        for _ in self._steps:
            return
        self._steps = None

    def drop_all(self, error: BaseException) -> None:
        """Nothing more is issued."""
        with self.changed:
            rounds = [*self._rounds]
            if not self.health.is_closed:
                self._rounds.clear()
            self.wake()
        for round in rounds:
            self._drop(round, error)

    def disconnect(self) -> None:
        """Frees the connections."""
        self._control = None

    # ---- the launcher's thread

    def _play_all(self) -> _Pauses:
        while self._rounds:
            round = self._rounds[0]
            error: BaseException | None = None
            try:
                yield from self._play(round)
            except Exception as failure:
                # Ends a circle: the frames of the error hold what was to be sent, which holds the error.
                traceback.clear_frames(failure.__traceback__)
                error = failure
                if not isinstance(failure, (PeerFailed, MachinesDiffer)):
                    what = f"the beginning of {round.kind!r}"
                    error = self.health.broken or self.health.break_because(failure, what)
            finally:
                self._launcher.order.leave(self.name)
            with self.changed:
                if self._rounds and self._rounds[0] is round:
                    self._rounds.popleft()
            if error is not None:
                self._drop(round, error)
            del round, error  # nothing is held while there is no round

    def _play(self, round: Round) -> _Pauses:
        """From the first item to the end.

        Raises:
            PeerFailed, MachinesDiffer: the round alone is over.
            Exception: a peer is gone.
        """
        beginning = f"the beginning of {round.kind!r}"
        yield from self._connect(beginning)
        if round.failed is not None:
            yield from self._say_failed(round, round.failed, beginning)
            return
        contents: str | None = round.contents  # until all have said them
        while True:
            while not (round.items and round.items[0].is_ready()):
                self._raise_if_broken()
                yield
            item = round.items[0]
            if item.kind == "close":
                return
            what = beginning if contents is not None else item.what
            yield from self._driven(
                agree(self.group, self.connections, round.kind, f"{contents}\n{item.kind}", None), what
            )
            with self.changed:
                if not round.items:  # the round has been dropped
                    raise again(round.error or self.health.broken or MachinesError("the round has been dropped"))
                round.items.popleft()
            try:
                yield from self._do(round, item)
            except Exception as error:
                self._fail(item, error)
                raise
            if item.kind == "end":
                return
            del item
            contents = None

    @property
    def connections(self) -> Control:
        """What a round is played over."""
        assert self._control is not None
        return self._control

    def _connect(self, what: str) -> _Pauses:
        """Makes the connections, in a thread for this alone: the other ranks may be late."""
        if self._control is not None:
            return
        found: list[Any] = []

        def connect() -> None:
            try:
                found.append(Control(self.group, self.name))
            except BaseException as error:
                found.append(error)
            self.wake()

        threading.Thread(target=connect, name="machines: connecting", daemon=True).start()
        yield from self._until(lambda: bool(found), what)
        if isinstance(found[0], BaseException):
            raise found[0]
        self._control = found[0]

    def _say_failed(self, round: Round, failed: str, what: str) -> _Pauses:
        """This rank has failed before a round: the others learn of it where they begin theirs."""
        try:
            while True:
                try:
                    yield from self._driven(agree(self.group, self.connections, round.kind, "", failed), what)
                except PeerFailed as error:
                    if error.by_all or not round.until_all:
                        raise
        finally:
            if not (self.health.broken or self.health.is_closed):
                self.health.notices.tell_failure("")  # the others know

    def _do(self, round: Round, item: Item) -> _Pauses:
        """Does what all ranks have agreed on."""
        launched, control, order = item.launched[0], self.connections, self._launcher.order
        if item.kind == "end":
            used = yield from self._driven(exchange_used(self.group, control, item.used, item.failed), item.what)
            with self.changed:
                self._rounds.popleft()
            launched.succeed(used)
            return
        if item.kind == "say":
            launched.succeed((yield from self._driven(control.all(item.calls[0]()), item.what)))
            return
        proposed = control.maximum(torch.tensor([order.propose(self.name)]))
        order.settle(self.name, int((yield from self._driven(proposed, item.what))))
        self.wake()
        yield from self._until(lambda: order.is_first(self.name), item.what)
        issued = self._launcher.issuing.put(partial(self._issue, round, item))
        issued.add_done_callback(self.wake)
        order.leave(self.name)  # what has a larger number is put behind it
        self.wake()
        while not issued.done():
            self._raise_if_broken()  # the call may block: nobody waits for it any more
            yield
        issued.result()

    def _driven(self, steps: Steps, what: str) -> Any:
        """Waits for what the ranks say to each other."""
        value = None
        with Watch(self.health, what) as watch:
            try:
                while True:
                    future = steps.send(value)
                    future.add_done_callback(self.wake)
                    yield from self._until(future.done, what, watch)
                    try:
                        value = future.value()
                    except Exception as error:
                        raise again(self.health.break_because(error, what)) from error
            except StopIteration as end:
                return end.value

    def _until(self, is_over: Callable[[], bool], what: str, watch: Watch | None = None) -> _Pauses:
        """Pauses until it is over."""
        with nullcontext(watch) if watch is not None else Watch(self.health, what) as check:
            while not is_over():
                check()
                self.waits = True
                yield

    def _raise_if_broken(self) -> None:
        if self.health.broken is not None:
            raise again(self.health.broken)

    # ---- the issuing thread

    def _issue(self, round: Round, item: Item) -> None:
        self._raise_if_broken()  # since it was put behind others: no rank would come to it
        if item.kind == "call":
            make_call(self, round, item)
            return
        # Held for all devices of the item, so that other launches on them come before it or after it on each.
        with nccl.launching() if self.group.has_nccl else nullcontext():
            for launched, call in zip(item.launched, item.calls, strict=True):
                result = call()
                if isinstance(result, Transfer):
                    result.when_done(self.wake)
                launched.succeed(result)

    # ---- ends

    def _fail(self, item: Item, error: Exception) -> None:
        left = [launched for launched in item.launched if not launched.is_decided]
        if left and not isinstance(error, MachinesError):
            if is_of_network(error):
                error = self.health.break_because(error, left[0].what)
            else:
                self.health.break_here(error, left[0].what)
        for launched in left:
            launched.fail(error)

    def _drop(self, round: Round, error: BaseException) -> None:
        with self.changed:
            round.error = error
            items = [*round.items]
            round.items.clear()
        for item in items:
            for launched in item.launched:
                launched.fail(error)
        self.wake()
