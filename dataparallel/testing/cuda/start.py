"""Starts the stand-in in this process, in two steps with the import of torch between them, and knows if it has.

CUDA's libraries have to be replaced before torch is imported, and operators can be registered only afterwards.
`stand_in` takes both steps, and `children` takes them around an import of torch. Importing this file does not import
torch.
"""

from __future__ import annotations

import threading
from itertools import permutations

from dataparallel.testing.compiling import SimulationUnavailable
from dataparallel.testing.cuda import environment, libraries, possible
from dataparallel.testing.cuda.machine import Machine

__all__ = ["begin", "finish", "machine"]

_lock = threading.RLock()
_machine: Machine | None = None
_finished = False
_failed: SimulationUnavailable | None = None  # raised again by every later call


def machine() -> Machine | None:
    """The machine whose devices this process has, or ``None`` if no stand-in has been started."""
    return _machine


def begin(wanted: Machine, hide_gpus: bool) -> None:
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
        environment.tell_children(wanted, hide_gpus, torch_file)


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

        from dataparallel.testing.cuda import extension, late, loading, watching
        from dataparallel.testing.host_threads import carry_knowledge, wait_at_exit

        try:
            compiled = extension.load()
        except SimulationUnavailable as error:
            _failed = error
            raise
        compiled.register()
        loading.watch(compiled)
        compiled.watch_host()
        torch.cuda._lazy_call(compiled.watch_allocators)  # they have a part for each device from then on
        watching.pass_over_tools()
        watching.host_reads()
        _make_settings()
        carry_knowledge(compiled)
        wait_at_exit()
        late.start_if_told()
        _finished = True


def _make_settings() -> None:
    """Makes the settings of torch that the operators cannot do without, each with its reason."""
    import torch

    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript would compile kernels for a GPU
