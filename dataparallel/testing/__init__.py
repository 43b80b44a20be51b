"""What tests need and the library does not: small models, and comparisons with one device.

`models` is a zoo, one small model per way in which a replica can go wrong, made of the parts in
`cases`. `parity` compares a module on several slots with the same module on one device; it is
public, so that users can ask of their own module what the library's tests ask of the zoo, and
stands on `steps`. `simulated` makes accelerators out of none; ``dataparallel.testing.pytest`` is
a plugin with a fixture for them. `isolated_slots` makes slots on one device behave as devices of
their own. Nothing in the library imports this package, and importing it touches no device.
"""

from dataparallel.testing.isolation import isolated_slots
from dataparallel.testing.simulated import SimulationUnavailable, ToolsMissing, simulate

__all__ = ["SimulationUnavailable", "ToolsMissing", "isolated_slots", "simulate"]
