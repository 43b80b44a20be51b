"""What tests of the orders in a recording share: launches on streams and in threads, and what they have waited for."""

import torch

from at_once import in_threads


def launch_on(stream):
    """A launch that uses no memory of any other."""
    with torch.sim.stream(stream):
        torch.ones(2, device=stream.device)


def streams(count, device=1):
    return [torch.Stream(torch.device("sim", device)) for _ in range(count)]


def waits(recording):
    return [launch.waits for launch in recording.launches]


def host_waits(recording):
    return [launch.host_waits for launch in recording.launches]


def in_thread(work):
    in_threads(1, lambda *_: work())
