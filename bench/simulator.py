"""Names what is behind devices that are no accelerators: results of different simulators cannot be compared."""

from __future__ import annotations

from nogpu.compiling import fingerprint
from nogpu.cuda import is_stand_in
from nogpu.simulated.extension import EXTENSION
from places import Places, device_name


def simulator_notes(places: Places) -> list[str]:
    """What a report says about simulated devices, or about those of a stand-in; nothing where there is neither.

    A simulator has the name under which it was compiled, which is made from its sources, torch and Python.
    """
    if is_stand_in():
        return [
            f"Devices: {device_name(places.real[0])}. torch's CUDA build runs, with its own functions for copies. A "
            "stand-in answers CUDA's and NCCL's functions, and the CPU computes the kernels."
        ]
    if not places.simulated:
        return []
    return [f"Simulator: {fingerprint(EXTENSION)}. Only results of the same simulator can be compared."]
