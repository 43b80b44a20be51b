"""The machine that a stand-in for CUDA shows: how many devices, and what they say of themselves.

The figures are the vendor's. They decide what programs see and how much memory there is, not how fast anything runs:
``nogpu.timeline.presets`` has machines for predictions. Importing this file does not import
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

CEILING = 64
_GIB = 2**30


@dataclass(frozen=True)
class CudaMachine:
    """Devices that are all alike.

    Attributes:
        devices: how many.
        like: the key in `LIKE`.
        name: what each says that it is.
        major: with ``minor`` the compute capability.
        minor: see ``major``.
        bytes: the memory of each.
        processors: the streaming multiprocessors of each.
        peers: if each device can access the memory of each other one.
    """

    devices: int
    like: str
    name: str
    major: int
    minor: int
    bytes: int
    processors: int
    peers: bool = True


LIKE: dict[str, tuple[str, int, int, int, int, bool]] = {
    # name, compute capability, GiB, multiprocessors, peers
    "v100": ("Tesla V100-SXM2-16GB", 7, 0, 16, 80, True),
    "a100": ("NVIDIA A100-SXM4-40GB", 8, 0, 40, 108, True),
    "a100_80": ("NVIDIA A100-SXM4-80GB", 8, 0, 80, 108, True),
    "h100": ("NVIDIA H100 80GB HBM3", 9, 0, 80, 132, True),
    "rtx_3090": ("NVIDIA GeForce RTX 3090", 8, 6, 24, 82, False),
    "titan_rtx": ("NVIDIA TITAN RTX", 7, 5, 24, 72, True),
    "titan_rtx_pcie": ("NVIDIA TITAN RTX", 7, 5, 24, 72, False),
}
"""What a device can be like."""


def machine_like(like: str, devices: int) -> CudaMachine:
    """Returns the machine with so many devices of that kind.

    Raises:
        TypeError: if ``devices`` is not an int.
        ValueError: if nothing is known of such a kind, or if there cannot be so many devices.
    """
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise TypeError(f"the number of devices is an int; got {type(devices).__name__}")
    if not 1 <= devices <= CEILING:
        raise ValueError(f"a stand-in has 1 to {CEILING} devices; got {devices}")
    if like not in LIKE:
        raise ValueError(f"a stand-in's devices are like one of {', '.join(LIKE)}; got {like!r}")
    name, major, minor, gib, processors, peers = LIKE[like]
    return CudaMachine(devices, like, f"{name} (stand-in, no GPU)", major, minor, gib * _GIB, processors, peers)
