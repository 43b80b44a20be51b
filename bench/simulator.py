"""Names the simulator behind the simulated devices: results of different simulators cannot be compared."""

from __future__ import annotations

from dataparallel.testing.compiling import fingerprint
from dataparallel.testing.simulated.build import EXTENSION
from places import Places


def simulator_notes(places: Places) -> list[str]:
    """What a report says about the simulator; nothing where no devices are simulated.

    It has the name under which the simulator was compiled, which is made from its sources, torch and Python.
    """
    if not places.simulated:
        return []
    return [f"Simulator: {fingerprint(EXTENSION)}. Only results of the same simulator can be compared."]
