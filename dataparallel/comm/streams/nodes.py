"""Runs the backward of a graph node that spans several devices on the streams of its forward.

The engine knows one stream of each node: that of its first output on an accelerator. On all other devices its threads
see default streams. So a node's forward notes the streams of all its devices, and its backward runs on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.devices import CPU


def note_forward_streams(node: Any, inputs: Sequence[torch.device], outputs: Sequence[torch.device]) -> None:
    """Called in a forward: notes what `forward_streams_set` needs in the backward."""
    node.streams = current_streams([*inputs, *outputs])
    node.grad_input_devices = {*inputs} - {CPU}
    # The engine takes the stream of the first output on an accelerator for the node's.
    node.engine_device = next((device for device in outputs if device != CPU), None)


@contextmanager
def forward_streams_set(node: Any, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Makes the streams of the node's forward current again inside its backward, in order with other nodes.

    The engine orders the stream of the node's first output on an accelerator. So the streams of gradients on other
    devices wait for the engine's stream first, and at the end it waits for the streams of results. A gradient of
    another device may have been made on any stream there, so ``record_stream`` is called on its memory. For a node
    whose outputs are all on the CPU the engine orders each device's current stream.
    """
    current = current_streams(node.streams)
    engine_streams = {device: current[node.engine_device or device] for device in node.streams}
    unordered = {device: stream for device, stream in node.streams.items() if stream != engine_streams[device]}
    with streams_set(node.streams):
        unordered_grads = [grad for grad in grads if grad is not None and grad.device in unordered]
        for device in {grad.device for grad in unordered_grads}:
            Event(engine_streams[device]).make_wait(unordered[device])
        for memory in chain.from_iterable(map(memory_of, unordered_grads)):
            if memory.device in unordered:
                memory.record_stream(unordered[memory.device])
        yield
        for device in node.grad_input_devices & unordered.keys():
            Event(unordered[device]).make_wait(engine_streams[device])


def memory_of(tensor: Tensor) -> list[Tensor]:
    """Tensors on which ``record_stream`` can be called, and that hold the data of ``tensor``.

    They are not the tensor itself if it has no memory of its own (sparse, subclass). Nor if it is conjugated or negated
    lazily: torch would call ``record_stream`` on a temporary copy, and then corrupt the memory of the process.
    """
    if tensor.layout is torch.sparse_coo:
        return [*_torch.sparse_memory(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that holds other tensors
        names, _ = tensor.__tensor_flatten__()
        return [memory for name in names for memory in memory_of(getattr(tensor, name))]
    if tensor.is_conj() or tensor.is_neg():
        return [tensor.new_empty(0).set_(tensor.untyped_storage())]
    return [tensor]
