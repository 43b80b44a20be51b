"""`PerformanceChecks` warns of what makes first calls slow beyond doubt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

CALLS = 40  # optimizers have made their state by then
LARGE_BATCH, LARGE_SAMPLE = 8 * 2**20, 2**20  # bytes; such a batch takes a link or the host about a millisecond
TOKEN = 2**10  # bytes that an integer of a sample stands for: most models make a vector of it


class PerformanceChecks:
    """The checks of one form. ``are_open``: false when all have been made. Threads at the same time may miss a call."""

    def __init__(self) -> None:
        self.are_open, self._calls, self._has_trained = True, 0, False

    def look_at(self, options: Any, slots: Sequence[torch.device], batch: tuple[Any, ...], is_training: bool) -> None:
        """Looks at the ``batch`` of a call that has ended well. ``options``: the form's `CallOptions`."""
        if not run_apart(slots) or says_no(VARIABLE):  # CPU slots and slots on one device are to try things out
            self.are_open = False
            return
        self._calls += 1
        tensors = [leaf for _, leaf in leaves(Arguments(batch), "") if isinstance(leaf, Tensor)]
        tensors = [tensor for tensor in tensors if has_strides(tensor) and not is_whole(tensor)]
        if is_training and torch.is_grad_enabled() and not self._has_trained:
            self._has_trained = True  # later batches may be what is left of the data
            _warn_of_chunks(tensors, options, len(slots))
        _warn_of_inputs(tensors, slots)
        if self._calls >= CALLS:
            self.are_open = False
            _warn_of_memory(slots)


def _warn_of_chunks(tensors: Sequence[Tensor], options: Any, slots: int) -> None:
    samples = tensors[0].shape[options.dim] if tensors and options.split.given is None else 0
    size = sum(t.numel() * TOKEN if t.dtype in (torch.int32, torch.int64) else t.nbytes for t in tensors)
    if samples <= slots and size < LARGE_SAMPLE * samples:
        warn_once(
            "chunks",
            f"a training batch of {samples} samples on {slots} slots is split into chunks of one sample. A batch is "
            f"for all slots together: DataLoader(..., batch_size={slots} * samples_for_one_device)",
        )


def _warn_of_inputs(tensors: Sequence[Tensor], slots: Sequence[torch.device]) -> None:
    there = [t for t in tensors if t.device != CPU and not t.requires_grad]  # the others were computed where they are
    if (size := sum(t.nbytes for t in there)) >= LARGE_BATCH:
        warn_once(
            "places",
            f"inputs of {size >> 20} MiB are on {there[0].device}, and most of them go out again to other devices. "
            f"Leave out .to('{there[0].device}') and pass the batch from the CPU: each device gets its chunk. "
            "dataparallel.prefetch(loader, model) sends chunks while devices compute",
        )
    pageable = [t for t in tensors if can_be_sent(t)] if can_pin(slots[0].type) else []
    if (size := sum(t.nbytes for t in pageable if not t.is_pinned())) >= LARGE_BATCH:
        warn_once(
            "pinned",
            f"inputs of {size >> 20} MiB are in host memory that is not pinned, so each call first copies them to "
            "pinned memory. Let a thread of the loader do it: DataLoader(..., pin_memory=True, num_workers=4)",
        )


def _warn_of_memory(slots: Sequence[torch.device]) -> None:
    first, *others = dict.fromkeys(slots)
    try:
        held, *next_held = (torch.accelerator.max_memory_allocated(device) >> 20 for device in (first, *others))
        total = torch.accelerator.get_memory_info(first)[1] >> 20
    except RuntimeError:  # such a backend does not count, or has no limit
        return
    if held > 2 * max(next_held) and held > 0.75 * total:
        warn_once(
            "memory",
            f"{first} has held {held} MiB of {total} MiB, and no other device more than {max(next_held)} MiB. "
            f"Compute the loss in forward, gather outputs elsewhere (output_device='{others[-1]}'), or divide "
            "parameters and the optimizer's state: dataparallel.composable.fully_shard(model)",
        )
