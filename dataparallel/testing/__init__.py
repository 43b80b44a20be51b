"""Helpers for tests, of the library and of its users: small models, comparisons, simulated accelerators.

`models` has small models, one for each feature that replicas must reproduce; `cases` has their parts.
`parity` compares a module on several slots with the same module on one device, for the library's
models and for your own; `steps` has its comparisons. `simulated` makes accelerators on a machine
without any, and ``dataparallel.testing.pytest`` is a plugin with a fixture for them.
`isolated_slots` makes slots on one device behave as separate devices. Nothing in the library
imports this package, and importing it touches no device.
"""

from dataparallel.testing.isolation import isolated_slots
from dataparallel.testing.simulated import SimulationUnavailable, ToolsMissing, simulate

__all__ = ["SimulationUnavailable", "ToolsMissing", "isolated_slots", "simulate"]
