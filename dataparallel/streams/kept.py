"""The streams that the library keeps on each accelerator: eight, whatever the number of slots and models.

CUDA puts the streams of a device into as many hardware queues as ``CUDA_DEVICE_MAX_CONNECTIONS`` says, eight if it is
not set, and streams in one queue wait for each other. torch has 32 streams for each device, and then hands out the
same ones again. So purposes share streams, by the table below and nowhere else.

Streams that are shared cannot wait for each other in a circle: a stream only waits for what was launched before. But
work that waits long holds up what is launched behind it. So a stream has purposes of different forms, since a model has
one form, or those that wait for each other anyway:

- Shards are cast after all that the call began with. ``calls meet`` and ``pulls meet`` stand for that.
- In backward a gather ahead waits for the last sums, which are what ``sums meet`` stands for.
- The first owner's sum waits for the deliveries that meet.
- Shards leave for several slots on four streams in turn. With two, a device was seen to wait for slots that lag:
  predicted steps on 8 devices took a third longer. With four they took 2 % longer than with a stream for each slot.

``hooks`` and ``collectives`` launch what waits for other machines, which runs on streams of the process group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["kept_stream"]

_STREAMS: Mapping[str, tuple[int, ...]] = {
    "parameters": (0,),
    "gathers": (0,),
    "flat buffers": (1,),
    "shards are cast": (1,),
    "calls meet": (1,),
    "pulls meet": (1,),
    "sums meet": (1,),
    "hooks": (1,),
    "collectives": (1,),
    "peers are checked": (1,),
    "inputs": (2,),
    "sums": (3,),
    "deliveries meet": (3,),
    "gradients": (3, 4, 5, 6),
    "shards leave": (4, 5, 6, 7),
    "second of two": (7,),
}
"""For each purpose its streams, which are taken in turn."""

_kept: dict[tuple[torch.device, int], torch.Stream] = {}


def kept_stream(device: torch.device, purpose: str, number: int = 0) -> torch.Stream:
    """A stream of an accelerator that the library keeps for the whole process. Threads that ask get the same one.

    ``number``: of a slot or a bucket, which take the purpose's streams in turn.
    """
    streams = _STREAMS[purpose]
    key = device, streams[number % len(streams)]
    if key not in _kept:
        _kept.setdefault(key, torch.Stream(device))
    return _kept[key]
