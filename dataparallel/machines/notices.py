"""`Notices`: what the ranks of a group tell each other beside the collectives, through the group's store."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import distributed

if TYPE_CHECKING:
    from dataparallel.machines.group import Group

LATE = 0.5
"""Seconds after which a wait is worth telling."""

ANSWER = 1.5
"""Seconds that somebody waits for the store. With monitored barriers another rank notices a failure a second later."""

POLL = 0.5
"""Seconds between two looks at the store, while somebody waits."""

BROKEN = "broken"


class Notices:
    """The notices of one group. They come as well as the store lets them.

    A rank that waits for long says what for, so that the error of another one can name it. A rank that has failed
    before a round says so, in case that it ends before the round. A rank whose group is broken gives the reason.

    A thread of its own talks to the store, because a store whose machine is gone may not answer. It is started when
    there is something to say. Nobody waits for it for more than `ANSWER` seconds.

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
        """``wait`` has lasted for more than `LATE` seconds. From now on the store is read now and then."""
        if self._waits.get(wait) != what:
            self._waits[wait] = what
            self._do(self._tell_word)

    def forget_wait(self, wait: object) -> None:
        """This wait is over."""
        if self._waits.pop(wait, None) is not None:
            self._do(self._tell_word)

    def tell_broken(self, reason: dict[str, Any]) -> None:
        """Tells the others that the group is broken, unless another rank has done so."""
        self._do(lambda: self._tell_broken(reason))

    def tell_failure(self, text: str) -> None:
        """Tells the others that this rank has failed; with an empty text, that this is over."""
        self._word["failed"] = text
        self._do(self._tell_word)

    def say(self, key: str, text: str) -> None:
        """Tells the others a text, for which they `ask`."""
        self._do(lambda: self._store.set(key, json.dumps(text)))

    def ask(self, key: str) -> None:
        """From now on, whoever waits also looks for this text, and no longer for the one before."""
        self._asked, self._heard = key, None

    def heard(self, key: str) -> str | None:
        """The text, if it was found."""
        return self._heard if self._asked == key else None

    def wait_until_told(self, seconds: float) -> None:
        """Waits until all that was told so far is there for others, but no longer than ``seconds``."""
        if self._store is not None:
            told = threading.Event()
            self._do(told.set)
            told.wait(seconds)

    def words_of_others(self) -> dict[int, dict[str, str]]:
        """What other ranks have said, by rank: what they wait for, how they have failed. `broken` is up to date then.

        A rank that fails at the same time may be about to say so: this waits until all have said something, for
        `ANSWER` seconds at most.
        """
        found: dict[int, dict[str, str]] = {}
        until = time.monotonic() + ANSWER
        while self._store is not None and len(found) < self._size - 1 and (left := until - time.monotonic()) > 0:
            read = threading.Event()
            self._do(lambda read=read: self._read_words(found, read))  # type: ignore[misc]
            read.wait(left)
            if len(found) < self._size - 1:
                time.sleep(0.1)
        return dict(found)

    def close(self, seconds: float) -> None:
        """Ends the thread after what it has to say; waits for that no longer than ``seconds``."""
        thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join(seconds)

    def _do(self, job: Callable[[], None]) -> None:
        if self._store is None:
            return
        self._jobs.put(job)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._talk, name="machines: notices", daemon=True)
                self._thread.start()

    def _talk(self) -> None:
        """The thread."""
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
        self.broken = self.broken or self._read(BROKEN)
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
        if not self._store.check([BROKEN]):
            self._store.set(BROKEN, json.dumps(reason))

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
