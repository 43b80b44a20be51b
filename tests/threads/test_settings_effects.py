"""The effects of the caller's settings in replicas: numbers under autocast, modes and hooks that are called."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel

serial_or_not = pytest.mark.parametrize("serial", [False, True], ids=["workers", "serial"])


class NotesDtypes(nn.Module):
    """Linear, tanh, linear. Notes the dtypes of its first part, in recomputations too."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.reentrant = reentrant
        self.dtypes: list[torch.dtype] = []

    def part(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.dtypes.append(hidden.dtype)
        return torch.tanh(hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.second(self.part(x))
        return self.second(checkpoint(self.part, x, use_reentrant=self.reentrant))


def net(root: torch.device, reentrant: bool | None = None) -> NotesDtypes:
    torch.manual_seed(0)
    return NotesDtypes(reentrant).to(root)


def batch(root: torch.device) -> Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(1)).to(root).requires_grad_()


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@serial_or_not
def test_autocast_holds_in_backward_and_recomputation(
    reentrant: bool | None, serial: bool, slots: list, root: torch.device
) -> None:
    plain, x = net(root), batch(root)
    with torch.autocast(root.type, torch.bfloat16):
        torch.cat([plain(chunk) for chunk in x.chunk(len(slots))]).float().square().sum().backward()
    expected, x.grad = x.grad, None

    module = net(root, reentrant)
    with torch.autocast(root.type, torch.bfloat16):
        output = DataParallel(module, slots, serial=serial)(x)
    output.float().square().sum().backward()  # outside of the context, where the setting is off
    assert set(module.dtypes) == {torch.bfloat16}
    assert len(module.dtypes) == len(slots) * (1 if reentrant is None else 2)
    assert torch.equal(x.grad, expected)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2**-7, atol=2**-7)


@serial_or_not
def test_weights_that_were_cast_are_not_remembered(serial: bool, slots: list, root: torch.device) -> None:
    module = net(root)
    model, x = DataParallel(module, slots, serial=serial), batch(root)
    for _ in range(2):
        with torch.autocast(root.type, torch.bfloat16):
            output = model(x)
            assert torch.equal(output, torch.cat([module(chunk) for chunk in x.chunk(len(slots))]))
        with torch.no_grad():
            module.first.weight.mul_(2)


class Alone:
    """Notes if two threads were ever inside at the same time."""

    def __init__(self) -> None:
        self.inside = 0
        self.calls = 0
        self.crowded = False

    def __enter__(self) -> None:
        self.calls += 1
        self.inside += 1
        self.crowded |= self.inside > 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1


def function_mode(alone: Alone) -> TorchFunctionMode:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with alone:
                return function(*args, **(kwargs or {}))

    return Mode()


def saved_tensor_hooks(alone: Alone) -> contextlib.AbstractContextManager[Any]:
    def pack(tensor: Tensor) -> Tensor:
        with alone:
            return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class Slow(NotesDtypes):
    """So slow that other replicas would run at the same time if they could."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = Alone()

    def forward(self, x: Tensor) -> Tensor:
        with self.alone:
            time.sleep(0.02)
            return super().forward(x)


@pytest.mark.parametrize("make", [function_mode, saved_tensor_hooks])
@pytest.mark.parametrize("workers", [None, 3])
def test_modes_and_hooks_are_called_in_replicas_that_run_one_at_a_time(
    make: Callable[[Alone], Any], workers: int | None, slots: list, root: torch.device
) -> None:
    module, alone, x = Slow().to(root), Alone(), batch(root)
    expected = module(x)
    module.alone.calls = 0
    with make(alone):
        output = DataParallel(module, slots, workers=workers)(x)
    torch.testing.assert_close(output, expected)
    assert module.alone.calls == len(slots)
    assert alone.calls
    assert not alone.crowded
    assert not module.alone.crowded


@pytest.mark.parametrize("workers", [1, 3])
def test_settings_that_a_forward_leaves_switched_are_the_callers_again(workers: int, slots: list) -> None:
    settings: list[tuple] = []

    def read() -> tuple:
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        return torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_device().type, autocast

    class Leaving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            settings.append(read())
            torch.set_grad_enabled(False)
            torch.set_num_threads(3)
            torch.set_default_device("meta")
            torch.set_autocast_enabled("cpu", True)
            torch.set_autocast_cache_enabled(False)
            return x

    mine, x = read(), torch.zeros(6, 1)
    try:
        for _ in range(2):
            DataParallel(Leaving(), slots, workers=workers)(x)
        assert settings == [mine] * 6
        assert read() == mine
    finally:
        torch.set_default_device(None)
