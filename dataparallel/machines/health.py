"""`Health` knows whether the ranks of a group can still exchange messages, and the error if not. Every wait asks it.

A wait ends when its result comes, when this or another rank fails, or three seconds after the group's timeout, whatever
torch does. The last two break the group for good. `Notices` carries messages between ranks beside the collectives.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import distributed

from dataparallel.machines.errors import MachinesError, PeerFailed, PeerGone, copy_error, describe_error
from dataparallel.weak_members import WeakMembers

if TYPE_CHECKING:
    from dataparallel.machines.group import MachineGroup
    from dataparallel.machines.launcher import Launcher
    from dataparallel.machines.rounds import RoundQueue

SLICE = 0.2
"""Seconds between two checks of a wait for failures and for the timeout."""

TELLING = 2.0
"""Seconds that a rank which fails waits, at most, until the store has its notice."""

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that torch's own error can come first."""

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for a thread."""

LATE = 0.5
"""Seconds after which a wait publishes that it lasts."""

ANSWER = 1.5
"""Seconds that a thread waits for the store. With monitored barriers another rank notices a failure a second later."""

POLL = 0.5
"""Seconds between two reads of the store while a wait lasts."""

RESTART = "Start all processes again, from a checkpoint"

Check = Callable[[], object]
"""A function that a wait calls several times a second. It raises if the wait has become useless."""


class Health:
    """The health of all groups and queues of the same ranks. Any thread may use it.

    They share one, because one collective that a rank has not issued leaves later collectives without partners.
    """

    def __init__(self, group: MachineGroup, launcher: Launcher) -> None:
        self.launcher = launcher
        launcher.include(self)
        self._process = os.getpid()  # a forked child is no rank
        self.broken: MachinesError | None = None  # why the group cannot be used any more
        self._breaking = threading.Lock()
        self.notices = Notices(group)
        self.group = group
        self.name = group.names([group.rank])
        self._queues: WeakMembers[RoundQueue] = WeakMembers()
        self._groups: WeakMembers[MachineGroup] = WeakMembers()

    def include(self, queue: RoundQueue, *groups: MachineGroup) -> None:
        """Adds a queue, which drops its rounds when the group breaks, and groups, which `free_groups` frees."""
        self._queues.add(queue)
        for group in groups:
            self._groups.add(group)

    @property
    def is_closed(self) -> bool:
        return self.launcher.is_closed

    def check_process(self) -> None:
        """Raises in a forked child. Call it before taking a lock: a thread of the parent may hold the lock for ever."""
        if self._process != os.getpid():
            raise MachinesError(
                "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
                "children of a rank, a DataLoader's workers for example, call no module that spans machines"
            )

    def close(self) -> None:
        """Drops all rounds and publishes the last notices, when the interpreter ends."""
        if self._process == os.getpid():
            for each_queue in [*self._queues]:
                each_queue.drop_all(MachinesError("the launcher was closed before the end of the round"))
            self.notices.close(AT_EXIT)

    def free_groups(self) -> None:
        """Frees torch's groups, which ends their threads. Broken groups stay, because their threads may still wait."""
        if self._process == os.getpid() and self.broken is None:
            for each_queue in [*self._queues]:
                each_queue.disconnect()
            for group in [*self._groups]:
                del group.group

    def break_for_lost_peer(self, error: BaseException, what: str) -> MachinesError:
        """Breaks the group because a peer is gone. Returns the error of the first failure."""
        if self.broken is not None:
            return self.broken
        self.notices.note_wait(error, what)
        states = self.notices.states_of_others()
        if self.notices.broken is not None:  # another rank has published a reason, which says more
            return self.break_with(self.reported_error(what))
        names = self.group.names
        waits = [f"{names([rank])} for {state['waits']}" for rank, state in sorted(states.items()) if state["waits"]]
        failed = [f"{names([rank])} {state['failed']}" for rank, state in sorted(states.items()) if state["failed"]]
        silent = [rank for rank in range(self.group.size) if rank != self.group.rank and rank not in states]
        text = f"{self.name} has waited for {what}, and nothing comes any more: {describe_error(error)}. "
        if waits:
            text += f"Others wait too: {', '.join(waits)}. "
        if failed:
            text += f"Others have failed: {', '.join(failed)}. "
        if silent:
            text += f"No word from {names(silent)}. "
        text += "A process has ended or hangs, or the ranks do not run the same number of steps"
        self.notices.publish_broken({"kind": "gone", "rank": self.name, "text": text})
        gone = PeerGone(f"{text}. {RESTART}")
        gone.__cause__ = error
        return self.break_with(gone)

    def break_for_own_failure(self, error: BaseException, what: str) -> None:
        """Breaks the group because a collective or a hook has raised here: what other ranks have sent has no partner.

        The store gets the notice before any wait here raises: a caller that sees the error may end the process.
        """
        reason = {"kind": "failed", "rank": self.name, "text": f"{self.name} failed in {what}: {describe_error(error)}"}
        self.notices.publish_broken(reason)
        self.notices.wait_until_published(TELLING)
        self.break_with(_error_of(reason))

    def break_with(self, error: MachinesError) -> MachinesError:
        """Breaks the group with this error, unless it is broken already. Returns the error of the first failure."""
        with self._breaking:
            if self.broken is None:
                self.broken = error
        for each_queue in [*self._queues]:
            each_queue.drop_all(self.broken)
        return self.broken

    def reported_error(self, what: str) -> MachinesError:
        """The error made of the reason that another rank has published, while this one has waited for ``what``."""
        assert self.notices.broken is not None
        return _error_of(self.notices.broken, f"{self.name} has waited for {what}. ")


class WaitCheck:
    """The `Check` of one wait: it publishes that the wait lasts, and raises when the wait has become useless."""

    def __init__(self, health: Health, what: str) -> None:
        self._health, self._what, self._began = health, what, time.monotonic()
        self._is_noted = False

    def __enter__(self) -> WaitCheck:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_noted:
            self._health.notices.forget_wait(self)

    def __call__(self) -> None:
        """Checks once. A wait calls this several times a second."""
        health, what, seconds = self._health, self._what, time.monotonic() - self._began
        if health.broken is not None:
            raise copy_error(health.broken)
        if health.is_closed:
            raise MachinesError(f"the launcher was closed while something waited for {what}")
        if seconds > LATE:
            self._is_noted = True
            health.notices.note_wait(self, what)
        if health.notices.broken is not None:
            raise copy_error(health.break_with(health.reported_error(what)))
        if seconds > health.group.timeout + MARGIN:
            late = TimeoutError(f"nothing has come within the group's timeout of {health.group.timeout:g} s")
            raise copy_error(health.break_for_lost_peer(late, what))


def is_of_network(error: BaseException) -> bool:
    """True if torch or gloo has raised the error because a peer is gone or late."""
    text = str(error)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL each collective begins with a monitored barrier.
    return isinstance(error, distributed.DistError) or "/gloo/" in text or "monitoredBarrier" in text


def _error_of(reason: dict[str, Any], before: str = "") -> MachinesError:
    """The error made of a reason that a rank has published."""
    if reason["kind"] == "failed":
        return PeerFailed(f"{before}{reason['text']}. What the others have sent gets no partner any more. {RESTART}")
    return PeerGone(f"{before}{reason['rank']} has told why nothing comes any more: {reason['text']}. {RESTART}")


# ---- what ranks tell each other --------------------------------------------------------------------------------------


class Notices:
    """Messages between ranks through the group's store: what each rank waits for, and how it has failed.

    A thread of its own reads and writes the store, because a store whose machine is gone may not answer. No other
    thread waits for a read for more than `ANSWER` seconds.
    """

    def __init__(self, group: MachineGroup) -> None:
        self.broken: dict[str, Any] | None = None
        self._rank, self._size = group.rank, group.size
        try:
            self._store: Any = distributed.distributed_c10d.PrefixStore("dataparallel", group.group.get_group_store())
        except RuntimeError:  # the group has no store, so nothing is published
            self._store = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waits: dict[object, str] = {}  # for each wait that lasts the name of its item
        self._state = {"waits": "", "failed": ""}
        self._published = dict(self._state)
        self._is_final = False  # this rank has published that the group is broken
        self._key = ""
        self._text: str | None = None

    def note_wait(self, wait: object, what: str) -> None:
        """Publishes that ``wait`` lasts. While it does, the store is read every `POLL` seconds."""
        if self._waits.get(wait) != what:
            self._waits[wait] = what
            self._put(self._write_state)

    def forget_wait(self, wait: object) -> None:
        if self._waits.pop(wait, None) is not None:
            self._put(self._write_state)

    def publish_broken(self, reason: dict[str, Any]) -> None:
        """Publishes why the group is broken, unless another rank has done so."""
        self._put(lambda: self._write_broken(reason))

    def publish_failure(self, text: str) -> None:
        """Publishes that this rank has failed; with an empty text, that the other ranks have dealt with the failure."""
        self._state["failed"] = text
        self._put(self._write_state)

    def publish(self, key: str, text: str) -> None:
        """Publishes a text for ranks that `listen_for` the key."""
        self._put(lambda: self._store.set(key, json.dumps(text)))

    def listen_for(self, key: str) -> None:
        """From now on, while a wait lasts, the store is also read for this key, and no longer for the key before."""
        self._key, self._text = key, None

    def text_of(self, key: str) -> str | None:
        """The text of the key, if the store had one at the last read."""
        return self._text if self._key == key else None

    def wait_until_published(self, seconds: float) -> None:
        """Waits until the store has every notice of this rank so far, for this many seconds at most."""
        if self._store is not None:
            is_written = threading.Event()
            self._put(is_written.set)
            is_written.wait(seconds)

    def states_of_others(self) -> dict[int, dict[str, str]]:
        """What each other rank waits for and how it has failed, by rank. This also brings `broken` up to date.

        A rank that fails at the same time may publish it a moment later, so this waits until each rank has a state.
        """
        states: dict[int, dict[str, str]] = {}
        until = time.monotonic() + ANSWER
        while self._store is not None and len(states) < self._size - 1 and (left := until - time.monotonic()) > 0:
            is_read = threading.Event()
            self._put(lambda is_read=is_read: self._read_states(states, is_read))  # type: ignore[misc]
            is_read.wait(left)
            if len(states) < self._size - 1:
                time.sleep(0.1)
        return dict(states)

    def close(self, seconds: float) -> None:
        """Ends the thread after it has written the last notices."""
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
                self._thread = threading.Thread(target=self._run_jobs, name="machines: notices", daemon=True)
                self._thread.start()

    def _run_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=POLL if self._waits and not self._is_final else None)
                if job is None:
                    return
            except queue.Empty:
                job = self._read_notices
            try:
                job()
            except Exception:
                time.sleep(0.01)  # the store is gone; the collectives fail then too, and their waits raise

    def _read_notices(self) -> None:
        self.broken = self.broken or self._read("broken")
        key = self._key
        if key and self._text is None:
            text = self._read(key)
            if self._key == key:  # no `listen_for` came in between
                self._text = text

    def _write_state(self) -> None:
        if self._is_final:
            return  # the last state stays in the store, for the messages of other ranks
        self._state["waits"] = next(iter([*self._waits.values()]), "")
        if self._state != self._published:
            self._published = dict(self._state)
            self._store.set(f"word/{self._rank}", json.dumps(self._state))
        self._read_notices()

    def _write_broken(self, reason: dict[str, Any]) -> None:
        self._is_final = True
        if not self._store.check(["broken"]):
            self._store.set("broken", json.dumps(reason))

    def _read_states(self, states: dict[int, dict[str, str]], is_read: threading.Event) -> None:
        self._read_notices()
        for rank in range(self._size):
            state = None if rank == self._rank else self._read(f"word/{rank}")
            if state and any(state.values()):
                states[rank] = state
        is_read.set()

    def _read(self, key: str) -> Any:
        """The value of the key or `None`. ``get`` would wait for a key that is not there, so ``check`` comes first."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
