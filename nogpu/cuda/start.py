"""Starts the stand-in in this process, in two steps with the import of torch between them, and knows if it has.

CUDA's libraries have to be replaced before torch is imported, and operators can be registered only afterwards. In a
child ``inherited/sitecustomize.py`` asks `spec_of_torch`, which takes both steps around its import of torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

from nogpu.compiling import SimulationUnavailable
from nogpu.cuda import libraries, possible
from nogpu.cuda.machine import CudaMachine, machine_like

VARIABLE = "NOGPU_STAND_IN"
FOLDER = str(Path(__file__).with_name("inherited"))


def tell_children(machine: CudaMachine, hide_gpus: bool, torch_file: Path) -> None:
    """Lets the processes that this one starts from now on have the same stand-in."""
    os.environ[VARIABLE] = json.dumps(
        {"devices": machine.devices, "like": machine.like, "hide_gpus": hide_gpus, "torch": str(torch_file)}
    )
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *(path for path in paths if path and path != FOLDER)])


def told() -> dict[str, Any] | None:
    """What the parent has told: ``devices``, ``like``, ``hide_gpus`` and ``torch``; ``None`` if nothing."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


_lock = threading.RLock()
_machine: CudaMachine | None = None
_finished = False
_failed: SimulationUnavailable | None = None  # raised again by every later call


def machine() -> CudaMachine | None:
    """The machine whose devices this process has, or ``None`` if no stand-in has been started."""
    return _machine


def begin(wanted: CudaMachine, hide_gpus: bool) -> None:
    """Puts libraries in the place of CUDA's, here and in processes that this one starts. torch comes next.

    Raises:
        SimulationUnavailable: see `stand_in`. There is no second try after libraries have been opened.
    """
    global _machine
    with _lock:
        if _failed is not None:
            raise _failed
        if _machine is not None:
            return
        possible.check_process(hide_gpus)
        torch_file = possible.file_of_torch()
        assert torch_file is not None
        libraries.open_libraries(wanted)
        if not wanted.peers:
            for source, target in permutations(range(wanted.devices), 2):
                libraries.set_link(source, target, "missing")
        _machine = wanted
        tell_children(wanted, hide_gpus, torch_file)


def finish() -> None:
    """Registers operators and clocks with torch, which has just been imported.

    Raises:
        SimulationUnavailable: if they cannot be compiled.
    """
    global _finished, _failed
    with _lock:
        if _failed is not None:
            raise _failed
        if _finished or _machine is None:
            return
        import torch

        from nogpu.cuda import extension, watching
        from nogpu.host_threads import carry_knowledge, wait_at_exit

        try:
            compiled = extension.load()
        except SimulationUnavailable as error:
            _failed = error
            raise
        compiled.register()
        watching.watch_libraries(compiled)
        compiled.watch_host()
        torch.cuda._lazy_call(compiled.watch_allocators)  # they have a part for each device from then on
        torch.cuda._lazy_call(_answer_as_the_cpu)
        watching.pass_over_tools()
        watching.host_reads()
        _make_settings()
        carry_knowledge(compiled)
        wait_at_exit()
        _finished = True


def _answer_as_the_cpu() -> None:
    """Has operators that are skipped or captured know their shapes. Not earlier: it imports parts of torch."""
    from nogpu.cuda.watching import compiled
    from nogpu.simulated import shapes

    shapes.answer_as_the_cpu(compiled().in_skipped_kernel)


def _make_settings() -> None:
    """Makes the settings of torch that the operators cannot do without, each with its reason."""
    import torch

    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript would compile kernels for a GPU


def spec_of_torch() -> ModuleSpec | None:
    """What Python imports as torch. If the parent has told of a stand-in for this torch, the import starts it.

    What the program itself has begun stays as it is. If the stand-in cannot be started, each import of torch raises
    `SimulationUnavailable`.
    """
    spec = importlib.util.find_spec("torch")
    parent = told()
    if parent is None or spec is None or spec.loader is None or spec.origin is None:
        return spec
    if Path(spec.origin).resolve() == Path(parent["torch"]).resolve():
        spec.loader = _Starting(spec.loader, machine_like(parent["like"], parent["devices"]), parent["hide_gpus"])
    return spec


class _Starting(Loader):
    """Loads torch as its own loader does, after the first step of the start and before the second."""

    def __init__(self, own: Loader, machine: CudaMachine, hide_gpus: bool) -> None:
        self._own, self._machine, self._hide_gpus = own, machine, hide_gpus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        begin(self._machine, self._hide_gpus)  # not later: from here on the process counts as one with torch
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        finish()
