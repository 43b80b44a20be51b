"""Simulated accelerators: several devices on a machine that has none, real to torch, for tests of multi-device code.

`simulate` makes them. ``csrc`` implements devices, streams, memory, operators and clocks; ``extension`` compiles and
holds it. ``device_module`` is ``torch.sim``, with ``watching`` and ``timeline``. ``shapes`` serves
``compute=False``.
"""

from __future__ import annotations

import threading
from types import ModuleType

import torch
from torch.utils import backend_registration

from nogpu.compiling import SimulationTooLate, SimulationUnavailable, ToolsMissing
from nogpu.host_threads import carry_knowledge, wait_at_exit
from nogpu.simulated import device_module, extension, shapes
from nogpu.simulated.extension import load_extension

__all__ = ["SimulationTooLate", "SimulationUnavailable", "ToolsMissing", "simulate"]

BACKEND = "sim"
CEILING = 64  # kCeiling in csrc/shared/ceilings.h
_lock = threading.Lock()
_started = False
_failed: SimulationUnavailable | None = None  # raised again by every later call


def simulate(n: int = 8, *, compute: bool = True) -> list[torch.device]:
    """Makes ``n`` simulated accelerators, ``sim:0`` to ``sim:n-1``, in this process, and returns them.

    To torch they are devices like any others: ``tensor.to("sim:3")``, ``torch.accelerator``, ``torch.sim`` (what
    ``torch.cuda`` is for CUDA), streams, events, one thread of the autograd engine each. Operators run on the CPU in
    the device's own memory, which is counted to the byte. Tensors of two devices in one operator raise as on CUDA.

    Nothing really runs late here, so vector clocks watch every access and raise ``RuntimeError``:

    - ``race: ...`` for a read or write that no stream, event or synchronisation orders after an earlier conflicting
      one;
    - ``freed too early: ...`` when memory is used again that was freed while another stream might still use it.
      ``torch.sim.check_clocks()`` at the end of a test finds such memory before it is used again.

    The same launches from the same threads raise the same error in every run. Launches of threads that race each other
    on the host may come in another order; but the speed of the threads of one backward does not decide what is found
    about memory that one of them frees and another allocates. ``torch.sim.clocks`` switches the clocks off and on.

    The clocks miss operators of the host on pinned memory: after ``h = x.to("cpu", non_blocking=True)``
    ``h.tolist()`` raises nothing, although on CUDA the copy may still be filling ``h``. They also raise where nothing
    is wrong: what a thread has waited for is known to the threads that it starts, to those that join it
    (``threading.Thread``), and through a ``queue.Queue`` or a ``ThreadPoolExecutor``, but not to threads that get work
    in other ways, such as locks and events. Let the thread that uses the result wait for the stream or an event too.

    With ``compute=False`` kernels are skipped and the devices have no memory behind their addresses: shapes come from
    torch's meta kernels. A model of any size is planned so on a small machine. Launches, copied bytes, memory to the
    byte, ``torch.OutOfMemoryError`` and the clocks are what they are with kernels. No tensor on a device has values.
    What needs them raises ``NotImplementedError``, a ``RuntimeError``, with the operator's name: ``item``, ``cpu``,
    ``tolist``, ``print``, ``nonzero``, masks as indices, ``if tensor:`` and so on. So do operators without a meta
    kernel, and sparse and nested tensors. Nothing is drawn from the generators of the devices.

    Call this before the first backward of the process, for example in a ``conftest.py``: torch's autograd engine makes
    its threads at that backward. After `SimulationTooLate` the process cannot use accelerators any more. The first call
    on a machine compiles for a minute or two.

    Args:
        n: the number of devices, 1 to 64. A later call may ask for more, but not for fewer, because tensors may be on
            the others.
        compute: if False, kernels are skipped. The first call decides for the process.

    Raises:
        TypeError: if ``n`` is not an int, or ``compute`` is not a bool.
        ValueError: if ``n`` is not from 1 to 64, or is smaller than in an earlier call; if ``compute`` is not what it
            was in the first call.
        SimulationUnavailable: a ``RuntimeError`` that says why this process or machine cannot have them. It is
            `ToolsMissing` if the machine lacks what compiling needs, and `SimulationTooLate` if the process has run a
            backward or used CUDA before.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"simulate takes a number of devices, an int; got {type(n).__name__}")
    if not isinstance(compute, bool):
        raise TypeError(f"compute is True or False; got {compute!r}")
    with _lock:
        if _failed is not None:
            raise _failed
        before = extension.C.device_count() if _started else 0
        if not 1 <= n <= CEILING:
            raise ValueError(f"1 to {CEILING} devices can be simulated; got {n}")
        if n < before:
            raise ValueError(
                f"{before} devices are simulated already, and tensors may be on them: ask for {before} or more; got {n}"
            )
        if _started and compute != extension.C.computes():
            raise ValueError(
                f"the first simulate of this process had compute={not compute}, which holds for all its devices; got "
                f"compute={compute}: use a process of its own"
            )
        if not _started:
            _check_process()
            _start(load_extension(), compute)
        extension.C.set_device_count(n)
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
            f"the backend {name!r} has torch's PrivateUse1 slot in this process already, and there is one slot: use a "
            "process in which nothing has taken it"
        )


def _start(compiled: ModuleType, compute: bool) -> None:
    """Tells torch of the devices, which it cannot forget again: after a failure there is no second try."""
    global _started, _failed
    assert compiled.CEILING == CEILING
    wait_at_exit()
    try:
        extension.C = compiled
        if not compute:
            compiled.skip_kernels()
            shapes.answer_as_the_cpu(compiled.in_skipped_kernel)
        backend_registration.rename_privateuse1_backend(BACKEND)
        torch._register_device_module(BACKEND, device_module)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        _start_engine_threads()
        carry_knowledge(compiled)
    except SimulationUnavailable as error:
        _failed = error
        raise
    _started = True


def _start_engine_threads() -> None:
    """Lets the autograd engine make a thread for each of `CEILING` devices, and lets each thread begin its work.

    The engine makes its threads at the first backward of the process, and asks for the number of devices only then.
    """
    extension.C.set_device_count(CEILING)
    try:
        for index in reversed(range(CEILING)):
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
        extension.C.set_device_count(0)
        extension.C.forget_contexts()
