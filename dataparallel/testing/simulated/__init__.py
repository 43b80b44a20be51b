"""Simulated accelerators: several devices out of none, real to torch, for tests of multi-device code.

`simulate` makes them. The parts: ``build`` compiles what is in ``csrc`` (devices, streams, memory, operators, clocks),
``device_module`` is ``torch.sim``, ``threads`` carries what a host thread has waited for to the threads that it starts.
The library itself does not import this package.
"""

from __future__ import annotations

import atexit
import threading
import time
from types import ModuleType

import torch
from torch.utils import backend_registration

from dataparallel.testing.simulated import device_module, threads
from dataparallel.testing.simulated.build import (
    SimulationTooLate,
    SimulationUnavailable,
    ToolsMissing,
    load_extension,
)

__all__ = ["SimulationTooLate", "SimulationUnavailable", "ToolsMissing", "simulate"]

BACKEND = "sim"
_lock = threading.Lock()
_started = False
_failed: SimulationUnavailable | None = None  # once torch knows of the devices there is no second try


def simulate(n: int = 8) -> list[torch.device]:
    """Makes ``n`` simulated accelerators, ``sim:0`` to ``sim:n-1``, in this process, and returns them.

    They are devices to torch: ``tensor.to("sim:3")``, ``torch.accelerator``, ``torch.sim`` (what ``torch.cuda`` is for
    CUDA), streams, events, one thread of the autograd engine each. Operators run on the CPU in the device's own memory,
    which is counted to the byte; tensors of two devices in one operator raise as they do on CUDA. Vector clocks watch
    every access: a read or write that no stream, event or synchronisation orders after an earlier conflicting one
    raises ``RuntimeError`` (``race: ...``), and so does using memory again that was freed while another stream might
    still use it (``freed too early: ...``), although nothing really runs late here. The same orders from the same
    threads give the same error in every run; threads that race each other on the host may differ. Which thread of a
    backward is faster makes no difference to memory that one of them frees and another takes. ``torch.sim.clocks``
    switches this, and ``torch.sim.check_clocks()`` at the end of a test finds memory that nobody has used again yet.

    What the clocks cannot see: operators of the host on pinned memory. After ``h = x.to("cpu", non_blocking=True)``
    ``h.tolist()`` raises nothing, although on CUDA the copy may still be filling ``h``. And where the clocks see too
    little: what one thread has waited for is known to the threads that it starts and to those that join it
    (``threading.Thread``), but not to threads that get work by locks or queues, executors among them; these have to
    wait once more, for the stream or an event, in the thread that uses the result.

    Call it before the first backward of the process, in a ``conftest.py`` for example: torch's autograd engine makes
    its threads then. After `SimulationTooLate` the process is of no more use for accelerators. The first call on a
    machine compiles for a minute or two.

    Args:
        n: the number of devices, 1 to 64. A later call may ask for more, up to 64; asking for fewer is an error,
            because tensors may be on the others.

    Raises:
        ValueError: if ``n`` is not from 1 to 64, or smaller than in an earlier call.
        SimulationUnavailable: a ``RuntimeError`` that says why this process or machine cannot have them;
            `ToolsMissing` where the machine lacks what compiling needs, `SimulationTooLate` where the process has
            run a backward or used CUDA before.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"simulate takes a number of devices, an int; got {type(n).__name__}")
    with _lock:
        if _failed is not None:
            raise _failed
        before = device_module.device_count() if _started else 0
        ceiling = device_module._C.CEILING if _started else 64
        if not 1 <= n <= ceiling:
            raise ValueError(f"1 to {ceiling} devices can be simulated; got {n}")
        if n < before:
            raise ValueError(
                f"{before} devices are simulated already, and tensors may be on them: ask for {before} or more; got {n}"
            )
        if not _started:
            _check_process()
            _start(load_extension())
        device_module._C.set_device_count(n)
    return [torch.device(BACKEND, index) for index in range(n)]


def _check_process() -> None:
    """Raises `SimulationUnavailable` if torch already has another accelerator in this process."""
    if torch.cuda.is_initialized():
        raise SimulationTooLate(
            "CUDA has been initialised in this process, and torch has one kind of accelerator at a time: call simulate "
            "before anything touches CUDA, or in a process of its own"
        )
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", BACKEND) or hasattr(torch, name):
        raise SimulationUnavailable(
            f"another backend, {name!r}, has torch's PrivateUse1 slot in this process, and there is one: use a process "
            "in which it is not imported"
        )


def _start(extension: ModuleType) -> None:
    """Tells torch of the devices. What is half told stays, so any failure here is that of every later call."""
    global _started, _failed
    atexit.register(_before_exit)
    try:
        device_module._C = extension
        backend_registration.rename_privateuse1_backend(BACKEND)
        torch._register_device_module(BACKEND, device_module)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        _start_engine_threads(extension)
        threads.carry_knowledge()
    except SimulationUnavailable as error:
        _failed = error
        raise
    except BaseException as error:
        _failed = SimulationUnavailable(
            f"an earlier call of simulate in this process ended half-way, and there is no second try: {error!r}"
        )
        _failed.__cause__ = error
        raise
    _started = True


def _start_engine_threads(extension: ModuleType) -> None:
    """Has the autograd engine make a thread for each device that there may ever be, and each thread begin its work.

    The engine does so at the first backward of the process, and asks how many devices there are only then.
    """
    extension.set_device_count(extension.CEILING)
    try:
        for index in reversed(range(extension.CEILING)):
            leaf = torch.ones((), device=torch.device(BACKEND, index), requires_grad=True)
            leaf.clone().backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise SimulationTooLate(
            "a backward has run in this process before simulate, and torch's autograd engine has made its threads, "
            "without any for these devices: call simulate first, before any backward"
        ) from error
    finally:
        extension.set_device_count(0)
        extension.forget_contexts()


def _before_exit() -> None:
    # A thread of the engine may still be dropping a graph, which Python must not have left by then.
    time.sleep(0.1)
