"""Where torch is set to swap the contents of parameters, conversions and loaded values reach every form.

A swapped parameter is the same object with another node in autograd's graph, perhaps with the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kept import loss
from torch import Tensor, nn

from each_form import Form, whole


@pytest.fixture(autouse=True)
def torch_swaps() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def build(root: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double().to(root)


def doubled(net: nn.Module) -> dict[str, Tensor]:
    return {name: each * 2 for name, each in net.state_dict().items()}


CHANGES: dict[str, Callable[[nn.Module, torch.device], object]] = {
    "to another dtype and back": lambda net, root: net.bfloat16().double(),
    "to where it is": lambda net, root: net.to(root),
    "load_state_dict": lambda net, root: net.load_state_dict(doubled(net)),
    "load_state_dict(assign=True)": lambda net, root: net.load_state_dict(doubled(net), assign=True),
}


def step(model: Callable, x: Tensor) -> None:
    loss(model(x)).backward()


def assert_equal_gradients(net: nn.Module, twin: nn.Module) -> None:
    for ours, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), expected.grad)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("steps", [0, 3])
def test_training_goes_on_as_on_one_device(form: Form, slots: list, root: torch.device, name: str, steps: int) -> None:
    net, twin = build(root), build(root)
    model = form(net, slots)
    x = torch.randn(2 * len(slots) + 1, 4, dtype=torch.float64, device=root)
    for called, owner in ((model, net), (twin, twin)):
        for _ in range(steps):
            step(called, x)
        CHANGES[name](owner, root)
        for _ in range(2):
            step(called, x)
    assert_equal_gradients(net, twin)
