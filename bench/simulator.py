"""Which simulator the simulated devices came from: results of two of them are no comparison."""

from __future__ import annotations

from dataparallel.testing.simulated.build import _fingerprint
from places import Places


def simulator_notes(places: Places) -> list[str]:
    """What a report says about it, if devices are simulated.

    It is the name under which the simulator is compiled, which is made from its sources, torch and Python.
    """
    if not places.simulated:
        return []
    return [f"Simulator: {_fingerprint()}. Only results of the same simulator can be compared."]
