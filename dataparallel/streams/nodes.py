"""On which streams a node of the graph that spans several devices runs its backward, and what orders it.

The engine knows one stream of each node, that of its first output, and on all other devices its threads see default
streams. Such a node notes in its forward the streams that are current on all of its devices (`note_streams`), and its
backward runs on these (`on_streams_of`). A backward that is recorded makes nodes itself, in a thread of the engine:
they note the caller's streams, too, not those of that thread.

``functions`` and ``autograd.bucket_nodes`` have such nodes. Which streams are current in a replica is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.streams.current import Event, current_streams, streams_set

__all__ = ["memory_of", "note_streams", "on_streams_of", "wait_for_streams"]


def note_streams(node: Any, inputs: Sequence[torch.device], outputs: Sequence[torch.device]) -> None:
    """In a forward: what `on_streams_of` has to know in its backward."""
    node.streams = current_streams([*inputs, *outputs])
    node.results_on = {*inputs} - {CPU}
    # The engine takes the stream of the first output on an accelerator for the node's.
    node.home = next((device for device in outputs if device != CPU), None)


@contextmanager
def on_streams_of(node: Any, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Inside a backward, the streams that were current in the forward are so again, in order with other nodes.

    The engine knows one stream of a node, that of its home, and makes it current. It has that stream wait for all
    gradients, and has what uses a result wait for that stream. On other devices its threads see default streams, which
    know nothing of the caller's. So the streams of gradients wait for the known one first, and at the end it waits for
    those of results. A gradient of another device may have been made on any stream there, so it is recorded.
    A node whose outputs are all on the CPU has no home: the engine then knows the current stream of each device.
    """
    here = current_streams(node.streams)
    known = {device: here[node.home or device] for device in node.streams}
    others = {device: stream for device, stream in node.streams.items() if stream != known[device]}
    with streams_set(node.streams):
        elsewhere = [grad for grad in grads if grad is not None and grad.device in others]
        for device in {grad.device for grad in elsewhere}:
            Event(known[device]).hold_back(others[device])
        for memory in chain.from_iterable(map(memory_of, elsewhere)):
            if memory.device in others:
                memory.record_stream(others[memory.device])
        yield
        for device in node.results_on & others.keys():
            Event(others[device]).hold_back(known[device])


def wait_for_streams(streams: dict[torch.device, torch.Stream], grads: Sequence[Tensor | None]) -> None:
    """Orders what follows, on the current streams, after the gradients that were made on ``streams``."""
    for device, stream in streams.items():
        here = torch.accelerator.current_stream(device)
        if here != stream:
            Event(stream).hold_back(here)
            for grad in grads:
                if grad is not None and grad.device == device:
                    for memory in memory_of(grad):
                        memory.record_stream(here)


def memory_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the data of one that has no memory itself; else the tensor."""
    if tensor.layout is torch.sparse_coo:
        return [*_torch.sparse_memory(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass around others
        names, _ = tensor.__tensor_flatten__()
        return [memory for name in names for memory in memory_of(getattr(tensor, name))]
    return [tensor]
