"""`Health`: whether the ranks of a group can still talk to each other, and the error if not. Every wait asks it.

A wait ends with what it waits for, with a failure here or on another rank, which break the group for good, and three
seconds after the group's timeout, whatever torch does. `Notices` are what ranks tell each other beside the collectives.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import distributed

from dataparallel.machines.errors import MachinesError, PeerFailed, PeerGone, again, in_words

if TYPE_CHECKING:
    from dataparallel.machines.group import Group
    from dataparallel.machines.launcher import Launcher
    from dataparallel.machines.round_queue import RoundQueue

SLICE = 0.2
"""Seconds. A wait asks this often whether it is over for another reason."""

TELLING = 2.0
"""Seconds that a failure here waits until the others can know of it."""

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that torch can say its own words first."""

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for a thread."""

LATE = 0.5
"""Seconds after which a wait is worth telling."""

ANSWER = 1.5
"""Seconds that somebody waits for the store. With monitored barriers another rank notices a failure a second later."""

POLL = 0.5
"""Seconds between two looks at the store, while somebody waits."""

RESTART = "Start all processes again, from a checkpoint"

Check = Callable[[], object]
"""Raises if there is no use in waiting on."""


class Health:
    """The state of the groups that send for the same ranks. Any thread may use it.

    All queues over them share one: after a collective that one rank has not issued, nothing can be paired any more.
    """

    def __init__(self, group: Group, launcher: Launcher) -> None:
        self.launcher = launcher
        launcher.include(self)
        self._process = os.getpid()  # that is a rank
        self.broken: MachinesError | None = None  # why the group cannot be used any more
        self.notices = Notices(group)
        self.group = group
        self.name = group.names([group.rank])
        self._queues: weakref.WeakSet[RoundQueue] = weakref.WeakSet()
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()

    def include(self, queue: RoundQueue, *groups: Group) -> None:
        """The queue ends, too, when the group is broken. ``groups`` give torch's up when the interpreter ends."""
        self._queues.add(queue)
        self._groups.update(groups)

    @property
    def is_closed(self) -> bool:
        """True if the interpreter ends."""
        return self.launcher.is_closed

    def check_process(self) -> None:
        """Raises in a forked child. Called before a lock is taken, which a thread of the parent may hold for ever."""
        if self._process != os.getpid():
            raise MachinesError(
                "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
                "children of a rank, a DataLoader's workers for example, call no module that spans machines"
            )

    def close(self) -> None:
        """The interpreter ends: what has not been issued is dropped, and what is to be told is told."""
        if self._process == os.getpid():
            for each in [*self._queues]:
                each.drop_all(MachinesError("the launcher was closed before the end of the round"))
            self.notices.close(AT_EXIT)

    def let_go(self) -> None:
        """Frees torch's groups, whose threads end then. A broken one stays: its threads might wait for its timeout."""
        if self._process == os.getpid() and self.broken is None:
            for each in [*self._queues]:
                each.disconnect()
            for group in [*self._groups]:
                del group.group

    def break_because(self, error: BaseException, what: str) -> MachinesError:
        """Breaks the group because a peer is gone. Returns the error of the first failure."""
        if self.broken is not None:
            return self.broken
        self.notices.note_wait(error, what)
        said = self.notices.words_of_others()
        if self.notices.broken is not None:  # another rank knows more
            return self.break_by(self.told(what))
        names = self.group.names
        waits = [f"{names([rank])} for {word['waits']}" for rank, word in sorted(said.items()) if word["waits"]]
        failed = [f"{names([rank])} {word['failed']}" for rank, word in sorted(said.items()) if word["failed"]]
        silent = [rank for rank in range(self.group.size) if rank != self.group.rank and rank not in said]
        text = f"{self.name} has waited for {what}, and nothing comes any more: {in_words(error)}. "
        if waits:
            text += f"Others wait too: {', '.join(waits)}. "
        if failed:
            text += f"Others have failed: {', '.join(failed)}. "
        if silent:
            text += f"No word from {names(silent)}. "
        text += "A process has ended or hangs, or the ranks do not run the same number of steps"
        self.notices.tell_broken({"kind": "gone", "rank": self.name, "text": text})
        gone = PeerGone(f"{text}. {RESTART}")
        gone.__cause__ = error
        return self.break_by(gone)

    def break_here(self, error: BaseException, what: str) -> None:
        """A collective or a hook has raised on this rank: the others have sent what gets no partner any more.

        They are told before anybody here knows, who may end this process.
        """
        reason = {"kind": "failed", "rank": self.name, "text": f"{self.name} failed in {what}: {in_words(error)}"}
        self.notices.tell_broken(reason)
        self.notices.wait_until_told(TELLING)
        self.break_by(_error_of(reason))

    def break_by(self, error: MachinesError) -> MachinesError:
        """Breaks the group with this error, unless it is broken. Returns the error of the first failure."""
        if self.broken is None:
            self.broken = error
        for each in [*self._queues]:
            each.drop_all(self.broken)
        return self.broken

    def told(self, what: str) -> MachinesError:
        """The error for the reason that another rank has given, while this one has waited for ``what``."""
        assert self.notices.broken is not None
        return _error_of(self.notices.broken, f"{self.name} has waited for {what}. ")


class Watch:
    """The check of one wait: it tells others that the wait lasts, and raises when there is no use in it any more."""

    def __init__(self, health: Health, what: str) -> None:
        self._health, self._what, self._began = health, what, time.monotonic()
        self._is_told = False

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_told:
            self._health.notices.forget_wait(self)

    def __call__(self) -> None:
        """Called several times a second."""
        health, what, seconds = self._health, self._what, time.monotonic() - self._began
        if health.broken is not None:
            raise again(health.broken)
        if health.is_closed:
            raise MachinesError(f"the launcher was closed while something waited for {what}")
        if seconds > LATE:
            self._is_told = True
            health.notices.note_wait(self, what)
        if health.notices.broken is not None:
            raise again(health.break_by(health.told(what)))
        if seconds > health.group.timeout + MARGIN:
            late = TimeoutError(f"nothing has come within the group's timeout of {health.group.timeout:g} s")
            raise again(health.break_because(late, what))


def is_of_network(error: BaseException) -> bool:
    """True if torch or gloo has raised it because a peer is gone or late."""
    said = str(error)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL each collective begins with a monitored barrier.
    return isinstance(error, distributed.DistError) or "/gloo/" in said or "monitoredBarrier" in said


def _error_of(reason: dict[str, Any], before: str = "") -> MachinesError:
    """The error for a reason that a rank has told."""
    if reason["kind"] == "failed":
        return PeerFailed(f"{before}{reason['text']}. What the others have sent gets no partner any more. {RESTART}")
    return PeerGone(f"{before}{reason['rank']} has told why nothing comes any more: {reason['text']}. {RESTART}")


# ---- what ranks tell each other --------------------------------------------------------------------------------------


class Notices:
    """What ranks tell each other through the group's store: what they wait for, how they have failed.

    A thread of its own talks to the store, because a store whose machine is gone may not answer. Nobody waits for it
    for more than `ANSWER` seconds.

    Attributes:
        broken: the reason that another rank has given why the group is broken.
    """

    def __init__(self, group: Group) -> None:
        self.broken: dict[str, Any] | None = None
        self._rank, self._size = group.rank, group.size
        try:
            self._store: Any = distributed.distributed_c10d.PrefixStore("dataparallel", group.group.get_group_store())
        except RuntimeError:  # a group that has none: nothing is told then
            self._store = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waits: dict[object, str] = {}  # by wait: what for
        self._word = {"waits": "", "failed": ""}
        self._told = dict(self._word)
        self._is_over = False
        self._asked = ""
        self._heard: str | None = None

    def note_wait(self, wait: object, what: str) -> None:
        """``wait`` lasts. From now on the store is read now and then."""
        if self._waits.get(wait) != what:
            self._waits[wait] = what
            self._put(self._tell_word)

    def forget_wait(self, wait: object) -> None:
        """This wait is over."""
        if self._waits.pop(wait, None) is not None:
            self._put(self._tell_word)

    def tell_broken(self, reason: dict[str, Any]) -> None:
        """Tells the others that the group is broken, unless another rank has done so."""
        self._put(lambda: self._tell_broken(reason))

    def tell_failure(self, text: str) -> None:
        """Tells the others that this rank has failed; with an empty text, that this is over."""
        self._word["failed"] = text
        self._put(self._tell_word)

    def say(self, key: str, text: str) -> None:
        """Tells the others a text, for which they `ask`."""
        self._put(lambda: self._store.set(key, json.dumps(text)))

    def ask(self, key: str) -> None:
        """From now on, whoever waits also looks for this text, and no longer for the one before."""
        self._asked, self._heard = key, None

    def heard(self, key: str) -> str | None:
        """The text, if it was found."""
        return self._heard if self._asked == key else None

    def wait_until_told(self, seconds: float) -> None:
        """Until all that was told so far is there for others."""
        if self._store is not None:
            told = threading.Event()
            self._put(told.set)
            told.wait(seconds)

    def words_of_others(self) -> dict[int, dict[str, str]]:
        """What they wait for and how they have failed, by rank. `broken` is up to date then.

        A rank that fails at the same time may be about to say so: this waits until all have said something.
        """
        found: dict[int, dict[str, str]] = {}
        until = time.monotonic() + ANSWER
        while self._store is not None and len(found) < self._size - 1 and (left := until - time.monotonic()) > 0:
            read = threading.Event()
            self._put(lambda read=read: self._read_words(found, read))  # type: ignore[misc]
            read.wait(left)
            if len(found) < self._size - 1:
                time.sleep(0.1)
        return dict(found)

    def close(self, seconds: float) -> None:
        """Ends the thread after what it has to say."""
        thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join(seconds)

    def _put(self, job: Callable[[], None]) -> None:
        if self._store is None:
            return
        self._jobs.put(job)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._talk, name="machines: notices", daemon=True)
                self._thread.start()

    def _talk(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=POLL if self._waits and not self._is_over else None)
                if job is None:
                    return
            except queue.Empty:
                job = self._look
            try:
                job()
            except Exception:
                time.sleep(0.01)  # the store is gone, which the collectives find out by themselves

    def _look(self) -> None:
        self.broken = self.broken or self._read("broken")
        key = self._asked
        if key and self._heard is None:
            heard = self._read(key)
            if self._asked == key:
                self._heard = heard

    def _tell_word(self) -> None:
        if self._is_over:
            return  # the last word stays, for others that compose their errors
        self._word["waits"] = next(iter([*self._waits.values()]), "")
        if self._word != self._told:
            self._told = dict(self._word)
            self._store.set(f"word/{self._rank}", json.dumps(self._word))
        self._look()

    def _tell_broken(self, reason: dict[str, Any]) -> None:
        self._is_over = True
        if not self._store.check(["broken"]):
            self._store.set("broken", json.dumps(reason))

    def _read_words(self, found: dict[int, dict[str, str]], read: threading.Event) -> None:
        self._look()
        for rank in range(self._size):
            word = None if rank == self._rank else self._read(f"word/{rank}")
            if word and any(word.values()):
                found[rank] = word
        read.set()

    def _read(self, key: str) -> Any:
        """The value, or `None`: asked for first, because a store waits for a key that is not there."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
