"""How long each launch takes on a device of a machine, once it has started."""

from __future__ import annotations

from dataparallel.testing.simulated.timeline.launches import Launch, Recording
from dataparallel.testing.simulated.timeline.machine import Machine

__all__ = ["durations"]


def durations(recording: Recording, machine: Machine) -> list[float]:
    """Seconds for each launch.

    A kernel takes the latency and the longer of computing and of reading and writing its memory (the roofline model:
    Williams, Waterman and Patterson, 2009). A copy takes the latency of its path and the time of its bytes.

    Raises:
        ValueError: if a launch is on a device that the machine does not have, or computes with a dtype for which it has
            no rate.
    """
    for stream in recording.streams:
        _check_device(stream.device, machine)
    return [_copy(launch, machine) if launch.copy else _kernel(launch, machine) for launch in recording.launches]


def _check_device(device: int, machine: Machine) -> None:
    if not 0 <= device < machine.devices:
        raise ValueError(
            f"the recording uses device {device}, but {machine.name} has {machine.devices}: schedule it on a machine "
            f"with {device + 1} devices or more"
        )


def _copy(launch: Launch, machine: Machine) -> float:
    assert launch.copy is not None
    path = machine.wiring.paths.get(launch.copy)
    if path is None:
        raise ValueError(
            f"launch {launch.index} ({launch.op}) copies from {launch.copy[0]} to {launch.copy[1]}; {machine.name} has "
            f"devices 0 to {machine.devices - 1}, and -1 is the host"
        )
    # `item` writes no tensor of a device: what it reads is what it sends to the host.
    return path.latency + (launch.bytes_written or launch.bytes_read) / path.bandwidth


def _kernel(launch: Launch, machine: Machine) -> float:
    memory = (launch.bytes_read + launch.bytes_written) / machine.memory_bandwidth
    if launch.flops == 0:
        return machine.kernel_latency + memory
    if launch.dtype not in machine.flops:
        raise ValueError(
            f"launch {launch.index} ({launch.op}) computes with {launch.dtype}, but {machine.name} has rates for "
            f"{[*machine.flops]} only: add one, machine.with_(flops={{..., {launch.dtype!r}: FLOPs per second}})"
        )
    return machine.kernel_latency + max(launch.flops / machine.flops[launch.dtype], memory)
