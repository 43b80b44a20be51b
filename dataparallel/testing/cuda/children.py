"""Starts the stand-in that a parent has told of, around this process's import of torch.

``inherited/sitecustomize.py`` calls this file when torch is looked for. It is not for users.
"""

from __future__ import annotations

import importlib.util
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from dataparallel.testing.cuda import environment, start
from dataparallel.testing.cuda.machine import Machine, machine_like

__all__ = ["spec_of_torch"]


def spec_of_torch() -> ModuleSpec | None:
    """What Python imports as torch. If the parent has told of a stand-in for this torch, the import starts it.

    What the program itself has begun stays as it is. If the stand-in cannot be started, each import of torch raises
    `SimulationUnavailable`.
    """
    spec = importlib.util.find_spec("torch")
    told = environment.told()
    if told is None or spec is None or spec.loader is None or spec.origin is None:
        return spec
    if Path(spec.origin).resolve() == Path(told["torch"]).resolve():
        spec.loader = _Starting(spec.loader, machine_like(told["like"], told["devices"]), told["hide_gpus"])
    return spec


class _Starting(Loader):
    """Loads torch as its own loader does, after the first step of the start and before the second."""

    def __init__(self, own: Loader, machine: Machine, hide_gpus: bool) -> None:
        self._own, self._machine, self._hide_gpus = own, machine, hide_gpus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        start.begin(self._machine, self._hide_gpus)  # not later: from here on the process counts as one with torch
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        start.finish()
