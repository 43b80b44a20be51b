"""One test for each row of the table: a replica sees the caller's setting and leaves nothing behind, or is refused.

Settings of the process are shared by all. The effects of carried settings: ``test_settings_effects``.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dataparallel import DataParallel, parallel_apply
from dataparallel.threads import settings
from dataparallel.threads.settings import CARRIED, REFUSED, TRANSLATED
from probe import Probe, intra_op_threads

serial_or_not = pytest.mark.parametrize("serial", [False, True], ids=["workers", "serial"])


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def pack(tensor: Tensor) -> Tensor:
    return tensor


VARIABLE = contextvars.ContextVar("variable", default="default")


@contextlib.contextmanager
def variable_set() -> Iterator[None]:
    token = VARIABLE.set("the caller's")
    yield
    VARIABLE.reset(token)


@contextlib.contextmanager
def default_device_set(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


def autocast_now() -> tuple:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def function_modes() -> list:
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


def dispatch_modes() -> list:
    return [type(mode).__name__ for mode in _python_dispatch._get_current_dispatch_mode_stack()]


def saved_tensor_hooks() -> tuple:
    disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
    return _autograd._top_saved_tensors_default_hooks(True), disabled


def torch_function() -> tuple:
    return torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()


@dataclass(frozen=True)
class Row:
    """How a user changes a setting, how it is read, and the value that replicas then read."""

    name: str
    change: Callable[[], contextlib.AbstractContextManager[Any]]
    read: Callable[[], Any]
    expected: Any = field(default=True)
    note: str = ""


ROWS = [
    Row("inference mode", torch.inference_mode, torch.is_inference_mode_enabled),
    Row("grad mode", torch.no_grad, torch.is_grad_enabled, False),
    Row("grad mode", torch.inference_mode, torch.is_grad_enabled, False, "in inference mode"),
    Row(
        "forward-mode gradients",
        lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
        torch._C._is_fwd_grad_enabled,
        False,
    ),
    Row(
        "multithreaded backward",
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
        False,
    ),
    Row(
        "view replay",
        lambda: torch.autograd._force_original_view_tracking(True),
        torch._C._is_view_replay_enabled,
    ),
    Row("autocast", lambda: torch.autocast("cpu"), autocast_now, (True, torch.bfloat16, True)),
    Row(
        "autocast",
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        autocast_now,
        (True, torch.float16, False),
        "dtype and cache",
    ),
    Row("torch function", torch._C.DisableTorchFunctionSubclass, torch_function, (False, False), "of subclasses"),
    Row("torch function", torch._C.DisableTorchFunction, torch_function, (False, True), "all"),
    Row("torch function modes", FunctionMode, function_modes, ["FunctionMode"]),
    Row("torch dispatch modes", DispatchMode, dispatch_modes, ["DispatchMode"]),
    Row(
        "saved-tensor hooks",
        lambda: torch.autograd.graph.saved_tensors_hooks(pack, pack),
        saved_tensor_hooks,
        ((pack, pack), None),
    ),
    Row(
        "saved-tensor hooks",
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        saved_tensor_hooks,
        (None, "not here"),
        "disabled",
    ),
    Row("default device", lambda: default_device_set("meta"), torch.get_default_device, torch.device("meta")),
    Row("default device", lambda: torch.device("meta"), torch.get_default_device, torch.device("meta"), "with"),
    Row("intra-op threads", lambda: intra_op_threads(3), torch.get_num_threads, 3),
    Row("context variables", variable_set, VARIABLE.get, "the caller's"),
]

NEED_AN_ACCELERATOR = {"current device", "current stream"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.note}".strip())
@serial_or_not
def test_replicas_see_it_and_leave_nothing_behind(row: Row, serial: bool, slots: list) -> None:
    probe = Probe(row.read)
    here = row.read()
    baseline = probe.run(slots, serial)
    assert row.expected not in baseline
    with row.change():
        assert row.read() == row.expected
        for _ in range(2):
            assert probe.run(slots, serial) == [row.expected] * len(slots)
        assert row.read() == row.expected
    assert row.read() == here
    assert probe.run(slots, serial) == baseline


def test_every_row_has_a_test() -> None:
    rows = {setting.name for setting in (*CARRIED, *TRANSLATED)} | {"context variables"}
    # What the host has waited for is tested with devices that watch it.
    assert {row.name for row in ROWS} | NEED_AN_ACCELERATOR == rows - {"what the host has waited for"}


@serial_or_not
def test_a_failing_replica_leaves_nothing_behind_either(serial: bool, slots: list) -> None:
    class Failing(Probe):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            if self.fails:
                raise ValueError("as asked")
            return x

    for row in ROWS:
        probe = Failing(row.read)
        baseline = probe.run(slots, serial)
        probe.fails = True
        with row.change(), pytest.raises(ValueError, match="as asked"):
            probe.run(slots, serial)
        probe.fails = False
        assert probe.run(slots, serial) == baseline, row.name


def test_a_default_device_equal_to_the_root_becomes_the_slots() -> None:
    (row,) = (setting for setting in TRANSLATED if setting.name == "default device")
    slots = [torch.device("cpu"), torch.device("meta")]
    for change in (lambda: default_device_set("cpu"), lambda: torch.device("cpu")):
        with change():
            value = row.read(slots)
        end = row.hold(value, slots, slots[1])
        assert end is not None
        try:
            assert torch.get_default_device() == slots[1]
        finally:
            end()
        assert torch.get_default_device() == slots[0]
    assert row.hold(row.read(slots), slots, slots[1]) is None


@serial_or_not
def test_current_device_and_stream_are_the_slots(serial: bool, slots: list) -> None:
    devices = [torch.device(slot) for slot in slots]
    if devices[0].type == "cpu":
        pytest.skip("the CPU has neither a current device nor streams")
    probe = Probe(lambda: (torch.accelerator.current_device_index(), torch.accelerator.current_stream()))
    with contextlib.ExitStack() as stack:
        streams = {device: torch.Stream(device) for device in {*devices}}
        for stream in streams.values():
            stack.enter_context(stream)
        torch.accelerator.set_device_index(devices[0].index)
        seen = sorted(probe.run(slots, serial), key=lambda pair: pair[0])
    assert seen == sorted(((device.index, streams[device]) for device in devices), key=lambda pair: pair[0])
    default = {device: torch.accelerator.current_stream(device) for device in devices}
    assert all(stream == default[devices[0]] for index, stream in probe.run(slots, serial) if index == devices[0].index)


def attribute(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


OF_THE_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "cuDNN": (lambda: torch.backends.cudnn.enabled, attribute(torch.backends.cudnn, "enabled"), False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", OF_THE_PROCESS)
@serial_or_not
def test_settings_of_the_process_need_nothing(name: str, serial: bool, slots: list) -> None:
    read, change, value = OF_THE_PROCESS[name]
    before = read()
    assert before != value
    probe = Probe(read)
    change(value)
    try:
        assert probe.run(slots, serial) == [value] * len(slots)
    finally:
        change(before)
    assert probe.run(slots, serial) == [before] * len(slots)


def capture(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        call(x)


def in_dual_level(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        call(x)


def cached(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.nn.utils.parametrize.cached():
        call(x)


class Calls(nn.Module):
    """What is exported is a module."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        vars(self)["call"] = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


REFUSALS: dict[str, dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]]] = {
    "functorch transform": {
        "vmap": lambda call, x: torch.func.vmap(call)(x),
        "grad": lambda call, x: torch.func.grad(lambda t: call(t).sum())(x),
        "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
        "functionalize": lambda call, x: torch.func.functionalize(call)(x),
    },
    "forward-mode level": {"dual level": in_dual_level},
    "cached parametrizations": {"cached": cached},
    "CUDA graph capture": {"graph": capture},
    "jit trace": {"trace": lambda call, x: torch.jit.trace(call, x)},
    "export": {"export": lambda call, x: torch.export.export(Calls(call), (x,), strict=False)},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("name", "how"), [(name, how) for name, hows in REFUSALS.items() for how in hows])
@serial_or_not
def test_what_is_refused_says_so_and_runs_nothing(name: str, how: str, serial: bool, slots: list) -> None:
    probe = Probe()
    model = DataParallel(probe, slots, serial=serial)
    x = torch.ones(3, 3, 2, device=slots[0])
    (sentence,) = (sentence for row, _, sentence in REFUSED if row == name)

    def directly(t: Tensor) -> Tensor:
        return parallel_apply([probe, probe], [t, t], devices=slots[:2], serial=serial)[0]

    for call in (model, directly):
        with pytest.raises(RuntimeError) as caught:
            REFUSALS[name][how](call, x)
        assert str(caught.value) == f"replicas cannot run here: {sentence}"
        assert probe.seen == []
    settings.refuse_what_cannot_be_shared()
    torch.testing.assert_close(model(x), x)


def test_every_row_that_is_refused_has_a_test() -> None:
    assert set(REFUSALS) == {name for name, _, _ in REFUSED}


@serial_or_not
def test_a_transform_inside_the_forward_is_fine(serial: bool, slots: list, root: torch.device) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.func.grad(lambda t: t.square().sum()))(x)

    x = torch.randn(7, 3, device=root)
    torch.testing.assert_close(DataParallel(Square(), slots, serial=serial)(x), 2 * x)
