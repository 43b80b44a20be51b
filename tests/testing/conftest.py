"""Fixtures of the plugin, which run a function in several ranks, for several files of this folder."""

from dataparallel.testing.pytest import on_processes, on_slots, on_threads  # noqa: F401
