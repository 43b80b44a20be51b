"""The forms in which a caller may pass devices, their meaning, and the messages of those that are refused.

Three answers of ``torch.accelerator`` play accelerators that the machine lacks: names are resolved without touching a
device, so no data is needed.
"""

import subprocess
import sys

import pytest
import torch

from dataparallel import devices
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
every_kind = pytest.mark.devices("cpu", "sim", "cuda")

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


# Slots


def test_none_means_every_accelerator(accelerators: str) -> None:
    assert resolve_slots(None) == _named(accelerators, 0, 1, 2)


def test_none_means_no_slots_where_there_is_no_accelerator(no_accelerator: None) -> None:
    assert resolve_slots(None) == []


def test_ints_mean_the_current_accelerator(accelerators: str) -> None:
    assert resolve_slots([2, 0]) == _named(accelerators, 2, 0)


def test_ints_strings_and_torch_devices_may_be_mixed(accelerators: str) -> None:
    mixed = [0, f"{accelerators}:2", torch.device(accelerators, 1)]
    assert resolve_slots(mixed) == _named(accelerators, 0, 2, 1)
    assert resolve_slots(tuple(mixed)) == resolve_slots(mixed)


def test_a_type_without_index_means_its_current_device(accelerators: str) -> None:
    assert resolve_slots([accelerators, torch.device(accelerators)]) == _named(accelerators, CURRENT, CURRENT)


def test_one_device_may_hold_several_slots(accelerators: str) -> None:
    assert resolve_slots([0, 0, 1]) == _named(accelerators, 0, 0, 1)
    assert resolve_slots(["cpu", torch.device("cpu"), "cpu:0"]) == [CPU, CPU, CPU]


@every_kind
def test_the_fixture_resolves_to_itself(slots: list, root: torch.device) -> None:
    resolved = resolve_slots(slots)
    assert resolved[0] == root
    assert resolve_slots(resolved) == resolved


# Devices, and the message. "{a}" is the type of the accelerators.
REFUSED = [
    *[(empty, "empty.*{a}:0, {a}:1, {a}:2 and cpu") for empty in ([], ())],
    *[([0, index], f"device {index} does not exist.*{{a}}:2 and cpu") for index in (3, -1, 10**6)],
    (["{a}:3"], "'{a}:3' does not exist.*{a}:2 and cpu"),
    (["mtia:0"], "no device 'mtia:0'.*{a}:2 and cpu"),
    ([0, "cpu"], r"device_ids=\[0, 'cpu'\] mixes device types \['cpu', '{a}'\]"),
    *[
        ([name], f"{name!r} names no device.*{{a}}:0")
        for name in ("", "no such", "cuda:", "cuda:x", "cuda:-1", "cuda:01x")
    ],
    *[([meta], "no device 'meta'") for meta in ("meta", torch.device("meta"))],
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: repr(value)[:20])
def test_what_the_machine_lacks_is_refused(accelerators: str, given: object, message: str) -> None:
    if isinstance(given, list):
        given = [each.format(a=accelerators) if isinstance(each, str) else each for each in given]
    with pytest.raises(ValueError, match=message.replace("{a}", accelerators)):
        resolve_slots(given)


@pytest.mark.parametrize("device", ["cpu", 0, 1, torch.device("cpu")], ids=repr)
def test_a_device_is_not_a_list_of_devices(accelerators: str, device: object) -> None:
    with pytest.raises(TypeError, match=r"expected a list of devices; got .*write \["):
        resolve_slots(device)


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("xpu", 1)], ids=str)
def test_a_machine_without_accelerators_has_only_cpu_slots(no_accelerator: None, device: object) -> None:
    with pytest.raises(ValueError, match="no accelerator, only cpu"):
        resolve_slots([device])
    assert resolve_slots(["cpu", "cpu"]) == [CPU, CPU]


def test_an_int_on_a_machine_without_accelerators_is_told_about_cpu_slots(no_accelerator: None) -> None:
    with pytest.raises(ValueError, match=r"device 0 .*device_ids=\['cpu', 'cpu'\]"):
        resolve_slots([0])


def test_the_current_device(accelerators: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert current_device() == torch.device(accelerators, 2)
    assert current_device(like=torch.device(accelerators, 1)) == torch.device(accelerators, 2)
    assert current_device(like=CPU) == CPU


def test_the_current_device_without_accelerators(no_accelerator: None) -> None:
    assert current_device() == CPU


@pytest.mark.parametrize("wrong", [True, False, 1.0, None, b"cpu", ["cpu"]], ids=repr)
def test_what_is_no_device_is_a_type_error_that_shows_it(accelerators: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"int, a string or a torch\.device; got .* of type " + type(wrong).__name__):
        resolve(wrong)
    with pytest.raises(TypeError):
        resolve_slots([0, wrong])


def test_types_may_be_mixed_where_slots_are_not_meant(accelerators: str) -> None:
    assert resolve_each([0, "cpu"]) == [torch.device(accelerators, 0), CPU]


# The output device


def test_output_defaults_to_the_first_slot(accelerators: str) -> None:
    assert resolve_output(None, _named(accelerators, 2, 0)) == torch.device(accelerators, 2)
    assert resolve_output(None, [CPU, CPU]) == CPU


@pytest.mark.parametrize("cpu", [-1, "cpu", torch.device("cpu")], ids=repr)
def test_output_may_be_the_cpu(accelerators: str, cpu: object) -> None:
    assert resolve_output(cpu, _named(accelerators, 0, 1)) == CPU
    assert resolve_output(cpu, [CPU, CPU]) == CPU


def test_output_may_be_a_device_that_holds_no_slot(accelerators: str) -> None:
    slots = _named(accelerators, 0, 1)
    assert resolve_output(2, slots) == resolve_output(f"{accelerators}:2", slots) == torch.device(accelerators, 2)


def test_output_of_another_type_than_the_slots_is_refused(accelerators: str) -> None:
    with pytest.raises(ValueError, match=rf"output_device='{accelerators}:0' is of type '{accelerators}'.*'cpu'"):
        resolve_output(f"{accelerators}:0", [CPU, CPU])
    with pytest.raises(ValueError, match="output_device=0 is an accelerator, but the slots are on the cpu"):
        resolve_output(0, [CPU, CPU])


@pytest.mark.parametrize("index", [3, -2])
def test_output_that_does_not_exist_is_refused(accelerators: str, index: int) -> None:
    with pytest.raises(ValueError, match=rf"device {index} does not exist.*{accelerators}:2"):
        resolve_output(index, _named(accelerators, 0, 1))


@pytest.mark.parametrize("wrong", [True, -1.0, ["cpu"]], ids=repr)
def test_output_that_is_no_device_is_refused(accelerators: str, wrong: object) -> None:
    for slots in (_named(accelerators, 0, 1), [CPU, CPU]):
        with pytest.raises(TypeError, match=r"int, a string or a torch\.device"):
            resolve_output(wrong, slots)


# The machine


def test_the_machine_in_words(accelerators: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.what_exists() == f"this machine has {accelerators}:0, {accelerators}:1, {accelerators}:2 and cpu"
    _pretend(monkeypatch, None, count=0)
    assert devices.what_exists() == "this machine has no accelerator, only cpu"


def test_only_the_current_accelerator_type_is_counted(accelerators: str) -> None:
    assert devices.accelerator_type() == accelerators
    assert devices.device_count(accelerators) == 3
    assert devices.device_count("mtia") == devices.device_count("cpu") == 0


def test_attributes_show_indices_and_cpu_slots_as_devices(accelerators: str) -> None:
    assert [device_id(device) for device in _named(accelerators, 2, 0)] == [2, 0]
    assert [device_id(device) for device in (CPU, CPU)] == [CPU, CPU]


@every_kind
def test_a_slot_can_be_made_current(root: torch.device) -> None:
    with current_device_set(root):
        tensor = torch.zeros(1, device=root.type)
    assert tensor.device == root


def test_the_cpu_needs_no_context_and_asks_for_no_accelerator(no_accelerator: None) -> None:
    with current_device_set(CPU):
        assert torch.zeros(1).device == CPU


@pytest.mark.long
@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
def test_importing_touches_no_device() -> None:
    code = """
import torch
def touched(*args, **kwargs):
    raise AssertionError("a device was touched at import")
for name in ("current_accelerator", "device_count", "current_device_index", "device_index"):
    setattr(torch.accelerator, name, touched)
torch._C._accelerator_getDeviceIndex = torch._C._cuda_init = torch.cuda._lazy_init = touched
import dataparallel, dataparallel.devices, dataparallel.comm, dataparallel.autograd.functions
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100)
