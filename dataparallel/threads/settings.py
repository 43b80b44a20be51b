"""The table of the caller's settings that replicas see.

Much of what torch calls a setting belongs to a thread. A replica runs in another thread and should not notice, so this
table has a row for each setting: *carried* ones are the same in replicas, *translated* ones depend on the slot,
*refused* ones cannot be extended to other threads. Settings of the process, such as the default dtype, anomaly mode and
cuDNN's switches, need no row.

``holding`` has the functions that read and set each setting. ``caller_state`` reads the table in the calling thread,
and holds its values around each replica. ``stages`` refuses calls by it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dataparallel import _torch
from dataparallel.devices import current_device_set
from dataparallel.streams.current import current_streams
from dataparallel.threads import holding
from dataparallel.threads.holding import Setting, entered, switch

__all__ = [
    "CARRIED",
    "INTRA_OP_THREADS",
    "REFUSED",
    "TRANSLATED",
    "Setting",
    "carry",
    "refuse_what_cannot_be_shared",
]

INTRA_OP_THREADS = "intra-op threads"

CARRIED: tuple[Setting, ...] = (
    # Inference mode changes grad mode, so it comes first.
    Setting("inference mode", lambda slots: torch.is_inference_mode_enabled(), holding.hold_inference_mode),
    switch("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    switch("forward-mode gradients", _torch.is_fwd_grad_enabled, _torch.set_fwd_grad_enabled),
    switch("multithreaded backward", _torch.is_multithreading_enabled, _torch.set_multithreading_enabled),
    switch("view replay", _torch.is_view_replay_enabled, _torch.set_view_replay_enabled),
    Setting("autocast", holding.read_autocast, holding.hold_autocast, holding.restore_autocast),
    Setting("torch function", holding.read_torch_function, holding.hold_torch_function),
    Setting("torch function modes", holding.read_function_modes, holding.hold_function_modes, one_at_a_time=True),
    Setting("torch dispatch modes", holding.read_dispatch_modes, holding.hold_dispatch_modes, one_at_a_time=True),
    Setting("saved-tensor hooks", holding.read_saved_tensor_hooks, holding.hold_saved_tensor_hooks, one_at_a_time=True),
    Setting(INTRA_OP_THREADS, lambda slots: torch.get_num_threads(), holding.hold_threads, holding.set_threads),
)
"""Settings of the calling thread that are the same in replicas. `CallerState` carries context variables too.

Replicas on CPU slots that run at the same time divide the intra-op threads: `CallerState.intra_op_threads_divided`.
"""


def carry(setting: Setting) -> None:
    """Adds a row to `CARRIED`, for thread-local state of another library that modules use in ``forward``."""
    global CARRIED
    CARRIED = (*CARRIED, setting)


TRANSLATED: tuple[Setting, ...] = (
    Setting("current device", lambda slots: None, lambda value, slots, device: entered(current_device_set(device))),
    Setting("current stream", current_streams, holding.hold_stream),
    Setting("default device", holding.read_default_device, holding.hold_default_device),
)
"""Settings that depend on the slot: its device, and the caller's current stream there."""


def _capturing_cuda_graph() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


REFUSED: tuple[tuple[str, Callable[[], bool], str], ...] = (
    (
        "functorch transform",
        _torch.is_inside_functorch_transform,
        "a torch.func transform (vmap, grad, jvp, functionalize) is running around the call, and exists in its thread "
        "only. Apply the transform inside the module's forward, or call the module that is not wrapped",
    ),
    (
        "CUDA graph capture",
        _capturing_cuda_graph,
        "a CUDA graph is being captured around the call, and one capture cannot follow several threads. Capture the "
        "module that is not wrapped",
    ),
    (
        "jit trace",
        lambda: bool(torch.jit.is_tracing()),  # type: ignore[attr-defined]
        "torch.jit.trace is running around the call, and sees its own thread only. Trace the module without wrapper",
    ),
    (
        "export",
        torch.compiler.is_exporting,
        "torch.export is running around the call, and an exported program runs on the devices of its example. Export "
        "the module without wrapper: the program's module() can be wrapped",
    ),
)
"""States that cannot be extended to other threads: a name, a function that detects it, and the error's sentence."""


def refuse_what_cannot_be_shared() -> None:
    """Raises ``RuntimeError`` with the sentence of the first row of `REFUSED` that is true in the calling thread."""
    for _, is_true, sentence in REFUSED:
        if is_true():
            raise RuntimeError(f"replicas cannot run here: {sentence}")
