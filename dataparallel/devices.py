"""Devices: the forms in which a caller may pass them, and the devices that the machine has.

Every other room asks here, so that ints, strings and ``torch.device`` mean the same thing everywhere, and CUDA, XPU and
PrivateUse1 devices take one code path, except in the transports of ``comm`` and the check for CUDA graph capture.
Importing it touches no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from dataparallel.arguments import checked

DeviceLike: TypeAlias = "int | str | torch.device"

CPU = torch.device("cpu")

# Devices that are known to exist. They are looked up many times in each step, and do not go away.
_checked: dict[int | torch.device, torch.device] = {CPU: CPU}


def accelerator_type() -> str | None:
    """The type of the machine's accelerators (``"cuda"``, ``"xpu"``, ...); ``None`` if it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def device_count(device_type: str) -> int:
    """The number of devices of ``device_type``; 0 for a type that the machine lacks."""
    return torch.accelerator.device_count() if device_type == accelerator_type() else 0


def all_devices() -> list[torch.device]:
    """All accelerators of the machine, in order; an empty list if it has none."""
    device_type = accelerator_type()
    if device_type is None:
        return []
    return [torch.device(device_type, index) for index in range(device_count(device_type))]


def current_device(like: torch.device | None = None) -> torch.device:
    """The current device of the type of ``like``; by default the current accelerator, or the CPU if there is none."""
    device_type = accelerator_type() if like is None else like.type
    return CPU if device_type is None else resolve(torch.device(device_type))


def what_exists() -> str:
    """The machine's devices, in words for an error message."""
    found = ", ".join(str(device) for device in all_devices())
    return f"this machine has {found} and cpu" if found else "this machine has no accelerator, only cpu"


def resolve(device: DeviceLike, name: str = "device") -> torch.device:
    """The ``torch.device`` that ``device`` means: an accelerator with its index, or ``cpu`` without one.

    An int means the current accelerator of that index; a type without an index means its current device. Integers of
    NumPy and integer tensors are ints too. ``name``: of the argument, for the error.
    """
    if type(device) in (int, torch.device) and device in _checked:
        return _checked[device]
    device = checked(name, device, int, str, torch.device)
    if isinstance(device, int):
        device_type = accelerator_type()
        if device_type is None:
            raise ValueError(
                f"device {device} asks for an accelerator, and {what_exists()}; "
                "slots on the CPU are written device_ids=['cpu', 'cpu']"
            )
        if not 0 <= device < device_count(device_type):
            raise ValueError(f"device {device} does not exist; {what_exists()}")
        _checked[device] = resolve(torch.device(device_type, device))
        return _checked[device]
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} names no device that torch knows; {what_exists()}") from error
    if named.type == "cpu":
        if named.index not in (None, 0):
            raise ValueError(f"{str(named)!r} does not exist; the CPU is 'cpu', and may be listed several times")
        return CPU
    count = device_count(named.type)
    if count == 0:
        raise ValueError(f"there is no device {str(named)!r} to run on; {what_exists()}")
    index = torch.accelerator.current_device_index() if named.index is None else named.index
    if index >= count:
        raise ValueError(f"{str(named)!r} does not exist; {what_exists()}")
    found = torch.device(named.type, index)
    _checked[found] = found
    return found


def resolve_each(devices: Sequence[DeviceLike], name: str = "devices") -> list[torch.device]:
    """Every device of a list that is not empty. Types may be mixed; other errors are those of `resolve_slots`."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(f"{name}={devices!r}: expected a list of devices: write [{devices!r}]")
    devices = list(devices)
    if not devices:
        raise ValueError(f"the list of devices is empty; pass at least one: {what_exists()}")
    return [resolve(device, f"{name}[{i}]") for i, device in enumerate(devices)]


def resolve_slots(
    device_ids: Sequence[DeviceLike] | None, devices: Sequence[DeviceLike] | None = None
) -> list[torch.device]:
    """The slots that ``device_ids`` means. ``None`` means every accelerator: an empty list if there is none.

    A device may be listed more than once: each entry is a slot. ``devices`` is another name of the same argument.

    Raises:
        TypeError: ``device_ids`` is a single device or cannot be iterated over, or an entry is not a device.
        ValueError: an empty sequence, devices of several types, or a device that the machine lacks; both names.
    """
    if devices is not None and device_ids is not None:
        raise ValueError(
            f"device_ids={device_ids!r} and devices={devices!r}: these are two names of one argument; pass one"
        )
    given, name = (device_ids, "device_ids") if devices is None else (devices, "devices")
    if given is None:
        return all_devices()
    slots = resolve_each(given, name)
    types = sorted({slot.type for slot in slots})
    if len(types) > 1:
        raise ValueError(f"{name}={list(given)!r} mixes device types {types}; all slots of one call have one type")
    return slots


def resolve_output(output_device: DeviceLike | None, slots: Sequence[torch.device]) -> torch.device:
    """The device for results: the first slot for ``None``, the CPU for -1 and ``"cpu"``, else the device given."""
    if output_device is None:
        return slots[0]
    output_device = checked("output_device", output_device, int, str, torch.device)
    if isinstance(output_device, int) and output_device == -1:
        return CPU
    if isinstance(output_device, int) and slots[0] == CPU:
        raise ValueError(f"output_device={output_device} is an accelerator, but the slots are on the cpu")
    output = resolve(output_device)
    if output != CPU and output.type != slots[0].type:
        raise ValueError(
            f"output_device={output_device!r} is of type {output.type!r}, the slots are of type {slots[0].type!r}; "
            "pass one of the slots' devices or 'cpu'"
        )
    return output


def device_id(device: torch.device) -> int | torch.device:
    """The value in attributes such as ``DataParallel.device_ids``: the index, or the device for a CPU slot."""
    return device if device.index is None else device.index


def current_device_set(device: torch.device) -> AbstractContextManager[object]:
    """A context in which ``device`` is the current device of its type. For the CPU it does nothing.

    It may create a context of the driver on the device: see ``comm.streams.current``.
    """
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
