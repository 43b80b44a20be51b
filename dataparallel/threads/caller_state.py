"""The settings of the thread that makes a call (``settings``), read once and held around each of its replicas."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from dataparallel import _torch
from dataparallel.comm.streams.current import current_streams
from dataparallel.threads import settings
from dataparallel.threads.settings import INTRA_OP_THREADS, TRANSLATED, Setting

T = TypeVar("T")


class CallerState:
    """The settings of the thread that makes this object, for replicas on ``slots``. The first slot is the root."""

    def __init__(self, slots: Sequence[torch.device]) -> None:
        settings.refuse_what_cannot_be_shared()
        self.slots = slots
        self._carried = [(setting, setting.read(slots)) for setting in settings.CARRIED]
        self._translated = [(setting, setting.read(slots)) for setting in TRANSLATED]
        # Two threads cannot enter one context, so each replica has a copy. Values that it sets there are dropped.
        self._contexts = [contextvars.copy_context() for _ in slots]

    @property
    def one_at_a_time(self) -> bool:
        """True if a carried object has a state, which replicas must change one at a time and in slot order."""
        return any(setting.one_at_a_time and value not in ([], (None, None)) for setting, value in self._carried)

    @property
    def streams(self) -> list[torch.Stream]:
        """The caller's current streams on the slots' accelerators."""
        return [*current_streams(self.slots).values()]

    @contextmanager
    def intra_op_threads_divided(self, workers: int, here: bool = False) -> Iterator[None]:
        """Divides the caller's intra-op threads among replicas on CPU slots, of which ``workers`` run at a time.

        torch keeps this number for each thread, and gives new threads the number that was set last. Workers set their
        own number. With ``here`` the calling thread gets it too, because it runs replicas. At the end of the block the
        calling thread and new threads get the caller's number again.
        """
        whole = torch.get_num_threads()
        each = max(1, whole // workers)
        if each == whole or self.slots[0].type != "cpu":
            yield
            return
        self._carried = [(s, each if s.name == INTRA_OP_THREADS else value) for s, value in self._carried]
        try:
            if here:
                torch.set_num_threads(each)
            yield
        finally:
            torch.set_num_threads(whole)

    def run_in_worker(self, slot: int, task: Callable[[], T]) -> T:
        """Runs ``task`` in a worker thread, with the caller's settings."""
        try:
            return self._run(slot, task, [*self._translated, *self._carried])
        finally:
            # Modes that the task has left in this thread (``torch.set_default_device``) must not meet its next task.
            for _ in _torch.function_modes():
                _torch.pop_function_mode()
            _torch.forget_default_device_context()

    def run_here(self, slot: int, task: Callable[[], T]) -> T:
        """Runs ``task`` in the calling thread, where only the translated settings have to be held.

        Settings that the task leaves changed are restored, so that the next replica sees the caller's.
        """
        default = _torch.default_device_context()
        try:
            return self._run(slot, task, self._translated)
        finally:
            if _torch.default_device_context() is not default:
                torch.set_default_device(None if default is None else default.device)
            for setting, value in self._carried:
                if setting.restore is not None:
                    setting.restore(value)
            if _torch.is_any_autocast_enabled():
                # Otherwise casts of the replica's weights would be cached until the caller's autocast ends.
                torch.clear_autocast_cache()

    def _run(self, slot: int, task: Callable[[], T], held: list[tuple[Setting, Any]]) -> T:
        ends: list[Callable[[], object]] = []
        try:
            for setting, value in held:
                end = setting.hold(value, self.slots, self.slots[slot])
                if end is not None:
                    ends.append(end)
            return self._contexts[slot].run(task)
        finally:
            for end in reversed(ends):
                end()
