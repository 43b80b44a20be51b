"""The settings of the thread that makes a call, read once and held around each of its replicas.

``settings`` is the table of what is read. ``parallel_apply`` makes a `CallerState` for each call.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from dataparallel import _torch
from dataparallel.streams.isolated import slot_streams
from dataparallel.threads import settings
from dataparallel.threads.settings import (
    CURRENT_STREAM,
    INTRA_OP_THREADS,
    ORDERED,
    TRANSLATED,
    Setting,
    refuse_what_cannot_be_shared,
)

__all__ = ["CallerState"]

T = TypeVar("T")


def _clear_modes() -> None:
    """Takes off what a task has left entered in its thread (``torch.set_default_device``): the next has its own."""
    for _ in _torch.function_modes():
        _torch.pop_function_mode()
    _torch.forget_default_device_context()


class CallerState:
    """The settings of the thread that makes it, for replicas on ``slots``. The first slot is the root."""

    def __init__(self, slots: Sequence[torch.device]) -> None:
        refuse_what_cannot_be_shared()
        self._slots = slots
        self._carried = [(setting, setting.read(slots)) for setting in settings.CARRIED]
        self._translated = [(setting, setting.read(slots)) for setting in TRANSLATED]
        self.slot_streams = slot_streams(slots)
        # Several threads cannot be inside one context, so each replica has a copy; what it sets there is dropped.
        self._contexts = [contextvars.copy_context() for _ in slots]

    @property
    def one_at_a_time(self) -> bool:
        """Whether something carried has a state that replicas must not touch at once, nor in changing order."""
        return any(value not in ([], (None, None)) for setting, value in self._carried if setting.name in ORDERED)

    @property
    def streams(self) -> list[torch.Stream]:
        """The caller's current streams on the slots' accelerators, and those that are slots' own."""
        callers = next(value for setting, value in self._translated if setting.name == CURRENT_STREAM)
        return [*callers.values(), *(own.stream for own in self.slot_streams.values())]

    @contextmanager
    def intra_op_threads_divided(self, workers: int) -> Iterator[None]:
        """Inside, replicas on CPU slots have their part of the caller's intra-op threads; ``workers`` run at a time.

        torch keeps this number for each thread, and what was set last for threads yet to be made. Workers set theirs;
        for threads yet to be made it is the caller's again at the end.
        """
        whole = torch.get_num_threads()
        each = max(1, whole // workers)
        if each == whole or self._slots[0].type != "cpu":
            yield
            return
        self._carried = [(s, each if s.name == INTRA_OP_THREADS else value) for s, value in self._carried]
        try:
            yield
        finally:
            torch.set_num_threads(whole)

    def run_in_worker(self, slot: int, task: Callable[[], T]) -> T:
        """Runs ``task`` with the caller's settings, in a thread that has none of its own."""
        try:
            return self._run(slot, task, [*self._translated, *self._carried])
        finally:
            _clear_modes()

    def run_here(self, slot: int, task: Callable[[], T]) -> T:
        """Runs ``task`` in the calling thread, where only what depends on the slot has to change.

        What it leaves switched is switched back: the next replica sees the caller's settings, in whatever thread it is.
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
                # Casts of a replica's weights would be remembered until the caller's autocast ends.
                torch.clear_autocast_cache()

    def _run(self, slot: int, task: Callable[[], T], held: list[tuple[Setting, Any]]) -> T:
        ends: list[Callable[[], object]] = []
        device, own = self._slots[slot], self.slot_streams.get(slot)
        try:
            if own is not None:
                own.begin()
                ends.append(own.end)
            for setting, value in held:
                if own is not None and setting.name == CURRENT_STREAM:
                    value = {device: own.stream}
                end = setting.hold(value, self._slots, device)
                if end is not None:
                    ends.append(end)
            return self._contexts[slot].run(task)
        finally:
            for end in reversed(ends):
                end()
