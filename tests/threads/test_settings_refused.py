"""Settings of the process, which replicas share, and states that cannot be extended to them: one test for each row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, parallel_apply
from dataparallel.threads import settings
from dataparallel.threads.settings import REFUSED
from probe import Probe

serial_or_not = pytest.mark.parametrize("serial", [False, True], ids=["workers", "serial"])


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


def test_every_row_has_a_test() -> None:
    assert set(REFUSALS) == {name for name, _, _ in REFUSED}


@serial_or_not
def test_a_transform_inside_the_forward_is_fine(serial: bool, slots: list, root: torch.device) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.func.grad(lambda t: t.square().sum()))(x)

    x = torch.randn(7, 3, device=root)
    torch.testing.assert_close(DataParallel(Square(), slots, serial=serial)(x), 2 * x)
