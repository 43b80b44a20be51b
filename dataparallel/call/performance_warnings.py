"""`PerformanceChecks` looks at the first calls of a form, and warns of what makes them slower than they have to be.

`CallEngine` tells it of each call until it is closed. It changes nothing, and no device is waited for. It looks at
calls on several accelerators only: CPU slots and slots on one device are there to try things out, and are not faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.batches.structures import Arguments, is_whole, leaves
from dataparallel.comm.buckets import has_strides
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.ahead import can_be_sent
from dataparallel.comm.streams.current import run_apart
from dataparallel.devices import CPU
from dataparallel.environment import says_no
from dataparallel.user_warnings import VARIABLE, warn_once

if TYPE_CHECKING:
    from dataparallel.call.options import CallOptions

CALLS = 40  # optimizers have made their state by then

LARGE_BATCH = 8 * 2**20  # bytes that take a link or the host about a millisecond
LARGE_SAMPLE = 2**20  # bytes; detectors and volumes are trained with one sample on each device, for want of memory
TOKEN = 2**10  # bytes that an integer of a sample stands for: most models make a vector of it

MOST = 2.0  # the first device holds more than MOST times what any other one does
SHORT = 0.75  # and this share of its memory


class PerformanceChecks:
    """The checks of one form. ``are_open``: false when all have been made; then `look_at` must not be called.

    Threads may call at the same time. Then a call may not be counted, which only makes a check later.
    """

    def __init__(self) -> None:
        self.are_open = True
        self._calls, self._has_trained = 0, False

    def look_at(
        self,
        options: CallOptions,
        slots: Sequence[torch.device],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        is_training: bool,
    ) -> None:
        """Looks at a call that has ended well.

        Args:
            options: of the form.
            slots: all slots of the form.
            arguments: of the whole batch.
            is_training: the module is in training mode.
        """
        # An overridden stage may split, send and run in any other way.
        if not run_apart(slots) or options.overridden or says_no(VARIABLE):
            self.are_open = False
            return
        self._calls += 1
        tensors = [leaf for _, leaf in leaves(Arguments(arguments), "") if isinstance(leaf, Tensor)]
        tensors = [tensor for tensor in tensors if has_strides(tensor) and not is_whole(tensor)]
        if is_training and torch.is_grad_enabled() and not self._has_trained:
            self._has_trained = True
            _check_chunks(tensors, options, len(slots))
        _check_places(tensors, slots)
        _check_pinned(tensors, slots)
        if self._calls >= CALLS:
            self.are_open = False
            _check_memory(slots)


def _check_chunks(tensors: Sequence[Tensor], options: CallOptions, slots: int) -> None:
    """The batch size is that of one device, on as many devices.

    The first training batch tells: later ones may be what is left of a data set. Inference takes what there is, one
    sample too. With ``chunk_sizes`` the user has decided.
    """
    if not tensors or options.split.given is not None:
        return
    samples = tensors[0].shape[options.dim]
    if samples > slots:
        return
    whole_numbers = (torch.int32, torch.int64)
    in_bytes = sum(t.numel() * TOKEN if t.dtype in whole_numbers else t.nbytes for t in tensors)
    if in_bytes < LARGE_SAMPLE * samples:
        warn_once(
            "chunks",
            f"a training batch of {samples} samples on {slots} slots is split into chunks of one sample. A batch is "
            f"for all slots together: DataLoader(..., batch_size={slots} * samples_for_one_device)",
        )


def _check_places(tensors: Sequence[Tensor], slots: Sequence[torch.device]) -> None:
    """The batch goes to one accelerator, and from there to the others. What needs gradients was computed there."""
    there = [tensor for tensor in tensors if tensor.device != CPU and not tensor.requires_grad]
    if sum(tensor.nbytes for tensor in there) >= LARGE_BATCH:
        device = there[0].device
        warn_once(
            "places",
            f"inputs of {_mib(sum(tensor.nbytes for tensor in there))} are on {device}, and most of them go out again "
            f"to other devices. Leave out .to('{device}') and pass the batch from the CPU: each device gets its chunk "
            "from there. for batch in dataparallel.prefetch(loader, model) sends chunks while devices compute",
        )


def _check_pinned(tensors: Sequence[Tensor], slots: Sequence[torch.device]) -> None:
    """The calling thread copies what is not pinned to pinned memory. For small batches this costs next to nothing."""
    pageable = [tensor for tensor in tensors if can_be_sent(tensor)]
    if sum(tensor.nbytes for tensor in pageable) < LARGE_BATCH or not can_pin(slots[0].type):
        return
    size = sum(tensor.nbytes for tensor in pageable if not tensor.is_pinned())
    if size >= LARGE_BATCH:
        warn_once(
            "pinned",
            f"inputs of {_mib(size)} are in host memory that is not pinned, so each call first copies them to pinned "
            "memory. Let a thread of the loader do it: DataLoader(..., pin_memory=True, num_workers=4)",
        )


def _check_memory(slots: Sequence[torch.device]) -> None:
    """The first device is nearly full and the others are not, so it limits the batch."""
    first, *others = dict.fromkeys(slots)
    peak = torch.accelerator.max_memory_allocated
    try:
        held, next_held = peak(first), max(map(peak, others))
        _, total = torch.accelerator.get_memory_info(first)
    except RuntimeError:  # such a backend does not count, or has no limit
        return
    if held > MOST * next_held and held > SHORT * total:
        warn_once(
            "memory",
            f"{first} has held {_mib(held)} of {_mib(total)}, and no other device more than {_mib(next_held)}. Compute "
            "the loss on all devices (in forward), gather outputs elsewhere "
            f"(output_device='{others[-1]}'), or divide parameters and the optimizer's state: "
            "dataparallel.composable.fully_shard(model)",
        )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
