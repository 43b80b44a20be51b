"""A capture runs a copy of the module: ignored modules and checkpoints inside of it get their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from each_form import by_wrapper, replicated
from graphed_nets import SETTLE, Block, Net, build, captured, inputs, reasons, step

pytestmark = pytest.mark.devices("cuda")


class Slotted(nn.Linear):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Bound(nn.Linear):
    """Calls a method of the object that it was when it was made."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.method = super().forward

    def forward(self, x: Tensor) -> Tensor:
        return self.method(x)


def wrapped() -> Any:
    return torch.compile(nn.Linear(3, 3), backend="aot_eager")


def in_place() -> nn.Module:
    module = nn.Linear(3, 3)
    module.compile(backend="aot_eager")
    return module


@pytest.mark.parametrize("kind", [Slotted, Bound, wrapped, in_place])
def test_ignored_modules_get_their_gradients(kind: Callable[[], Any], slots: list, root: torch.device) -> None:
    def trained(**options: Any) -> tuple[Any, list[Tensor | None]]:
        module: Any = build(root, lambda: nn.Sequential(Net(), kind()))
        network, x = replicated(module, slots[:1], ignored_modules=[module[1]], **options), inputs(root)
        for _ in range(SETTLE):
            module.zero_grad()
            step(network, x)
        return network, [parameter.grad for parameter in module.parameters()]

    expected = trained()[1]
    network, found = trained(graphs=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    leads_past = "it uses a tensor that needs a gradient and is neither an argument nor its own parameter"
    assert reasons(network) == ({leads_past} if kind in (Bound, wrapped) else set())


def test_with_an_ignored_script_module_replicas_run_as_they_are(slots: list, root: torch.device) -> None:
    module: Any = build(root, lambda: nn.Sequential(Net(), torch.jit.script(nn.Linear(3, 3))))
    network, x = replicated(module, slots[:1], ignored_modules=[module[1]], graphs=True), inputs(root)
    for _ in range(SETTLE):
        torch.testing.assert_close(step(network, x), module(x).square().mean().detach(), rtol=1e-9, atol=1e-9)
    assert captured(network) == 0
    assert reasons(network) == {"one of its ignored modules is a ScriptModule"}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(4, 6), nn.ModuleList([Checkpointed() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x


def test_a_checkpoint_in_a_part_converts_weights_itself(slots: list, root: torch.device) -> None:
    """Under autocast it would find what the forward has converted, in memory that later captures use again."""

    def gradients(**options: Any) -> list[Tensor]:
        module = build(root, Parts).float()
        network, x = by_wrapper(module, slots[:1], **options), inputs(root).float()
        for _ in range(SETTLE):
            module.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = network(x).float().square().mean()
            loss.backward()
        assert not options or captured(network)
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    torch.testing.assert_close(gradients(graphs=True), gradients(), rtol=1e-5, atol=1e-6)
