"""The forms in which a caller may pass devices, their meaning, and the messages of those that are refused.

Three answers of ``torch.accelerator`` play accelerators that the machine lacks: names are resolved without touching a
device, so no data is needed.
"""

import re

import pytest
import torch

from dataparallel.devices import (
    CPU,
    current_device,
    current_device_set,
    device_id,
    resolve,
    resolve_each,
    resolve_output,
    resolve_slots,
)

pytestmark = pytest.mark.devices("cpu")  # most of them pretend: once is enough

CURRENT = 1


@pytest.fixture(params=["cuda", "xpu", torch._C._get_privateuse1_backend_name()])
def accelerators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with three accelerators of one type, the second of which is current."""
    _pretend(monkeypatch, request.param, count=3)
    return request.param


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, None, count=0)


def _pretend(monkeypatch: pytest.MonkeyPatch, device_type: str | None, count: int) -> None:
    accelerator = None if device_type is None else torch.device(device_type)
    # Devices that were found stay known for the process, and this process has others.
    monkeypatch.setattr("dataparallel.devices._checked", {})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: CURRENT)


def _named(device_type: str, *indices: int) -> list[torch.device]:
    return [torch.device(device_type, index) for index in indices]


def test_what_a_list_of_devices_means(accelerators: str) -> None:
    a = accelerators
    for given, expected in (
        (None, [0, 1, 2]),
        ([2, 0], [2, 0]),
        ((0, f"{a}:2", torch.device(a, 1)), [0, 2, 1]),
        ([a, torch.device(a)], [CURRENT, CURRENT]),
        ([0, 0, 1], [0, 0, 1]),
    ):
        assert resolve_slots(given) == _named(a, *expected)
    assert resolve_slots(["cpu", torch.device("cpu"), "cpu:0"]) == [CPU, CPU, CPU]


# Devices, and the message. "{a}" is the type of the accelerators.
REFUSED = [
    ([], "empty.*{a}:0, {a}:1, {a}:2 and cpu"),
    *[([0, index], f"device {index} does not exist.*{{a}}:2 and cpu") for index in (3, -1)],
    (["{a}:3"], "'{a}:3' does not exist.*{a}:2 and cpu"),
    (["mtia:0"], "no device 'mtia:0'.*{a}:2 and cpu"),
    ([0, "cpu"], r"device_ids=\[0, 'cpu'\] mixes device types \['cpu', '{a}'\]"),
    *[([name], f"{name!r} names no device.*{{a}}:0") for name in ("", "no such", "cuda:x", "cuda:-1", "cuda:01x")],
    *[([meta], "no device 'meta'") for meta in ("meta", torch.device("meta"))],
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: repr(value)[:20])
def test_what_the_machine_lacks_is_refused(accelerators: str, given: object, message: str) -> None:
    if isinstance(given, list):
        given = [each.format(a=accelerators) if isinstance(each, str) else each for each in given]
    with pytest.raises(ValueError, match=message.replace("{a}", accelerators)):
        resolve_slots(given)


@pytest.mark.parametrize("device", ["cpu", 0, torch.device("cpu")], ids=repr)
def test_a_device_is_not_a_list_of_devices(accelerators: str, device: object) -> None:
    with pytest.raises(TypeError, match=r": expected a list of devices: write \["):
        resolve_slots(device)


@pytest.mark.parametrize("device", [0, "cuda", torch.device("xpu", 1)], ids=str)
def test_a_machine_without_accelerators_has_only_cpu_slots(no_accelerator: None, device: object) -> None:
    with pytest.raises(ValueError, match="no accelerator, only cpu"):
        resolve_slots([device])
    with pytest.raises(ValueError, match=r"device 0 .*device_ids=\['cpu', 'cpu'\]"):
        resolve_slots([0])
    assert resolve_slots(["cpu", "cpu"]) == [CPU, CPU]
    assert resolve_slots(None) == []
    assert current_device() == CPU


def test_the_current_device(accelerators: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert current_device() == torch.device(accelerators, 2)
    assert current_device(like=torch.device(accelerators, 1)) == torch.device(accelerators, 2)
    assert current_device(like=CPU) == CPU


@pytest.mark.parametrize("wrong", [True, 1.0, None, b"cpu", ["cpu"], torch.tensor(0.5)], ids=repr)
def test_what_is_no_device_is_a_type_error_that_shows_it(accelerators: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"device={wrong!r}: expected an int, a string or a torch.device")):
        resolve(wrong)
    with pytest.raises(TypeError):
        resolve_slots([0, wrong])


def test_types_may_be_mixed_where_slots_are_not_meant(accelerators: str) -> None:
    assert resolve_each([0, "cpu"]) == [torch.device(accelerators, 0), CPU]


def test_where_the_output_goes(accelerators: str) -> None:
    """To the first slot, to the CPU, or to another device of the slots' type, with a slot or without."""
    slots = _named(accelerators, 1, 0)
    assert resolve_output(None, slots) == slots[0]
    assert resolve_output(None, [CPU, CPU]) == CPU
    for cpu in (-1, "cpu", torch.device("cpu")):
        assert resolve_output(cpu, slots) == resolve_output(cpu, [CPU, CPU]) == CPU
    assert resolve_output(2, slots) == resolve_output(f"{accelerators}:2", slots) == torch.device(accelerators, 2)


def test_output_devices_that_are_refused(accelerators: str) -> None:
    slots = _named(accelerators, 0, 1)
    with pytest.raises(ValueError, match=rf"output_device='{accelerators}:0' is of type '{accelerators}'.*'cpu'"):
        resolve_output(f"{accelerators}:0", [CPU, CPU])
    with pytest.raises(ValueError, match="output_device=0 is an accelerator, but the slots are on the cpu"):
        resolve_output(0, [CPU, CPU])
    for index in (3, -2):
        with pytest.raises(ValueError, match=rf"device {index} does not exist.*{accelerators}:2"):
            resolve_output(index, slots)
    for wrong in (True, -1.0, ["cpu"]):
        with pytest.raises(TypeError, match=r"int, a string or a torch\.device"):
            resolve_output(wrong, slots)


def test_attributes_show_indices_and_cpu_slots_as_devices(accelerators: str) -> None:
    assert [device_id(device) for device in (*_named(accelerators, 2, 0), CPU)] == [2, 0, CPU]


@pytest.mark.devices("cpu", "sim", "cuda")
def test_a_slot_can_be_made_current(root: torch.device) -> None:
    with current_device_set(root):
        tensor = torch.zeros(1, device=root.type)
    assert tensor.device == root
