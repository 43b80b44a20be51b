"""The copy of a module that a capture runs: what it shares with the module, and what it has for itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.replicas.graphs.pieces import CapturedPieces
from each_form import by_wrapper, replicated
from graphed_nets import SETTLE, Block, build, captured, inputs, reasons, step
from graphed_nets import Net as Blocks

on_cpu, on_cuda = pytest.mark.devices("cpu"), pytest.mark.devices("cuda")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.twice, self.none, self.scale = self.first, None, [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.twice(self.first(x)))) * self.scale[0]


def pieces_of(module: nn.Module) -> CapturedPieces:
    return CapturedPieces(module, lambda: None)


@on_cpu
def test_computes_the_same_with_leaves_of_its_own() -> None:
    module, x = Net(), torch.randn(4, 3)
    module.last.bias.requires_grad_(False)
    pieces = pieces_of(module)
    copy = pieces.copy
    assert copy.first is copy.twice
    torch.testing.assert_close(copy.eval()(x), module.eval()(x), rtol=0, atol=0)
    copy(x).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    for name, leaf in copy.named_parameters():
        parameter = module.get_parameter(name)
        assert type(leaf) is type(parameter)
        assert leaf.data_ptr() == parameter.data_ptr()
        assert (leaf is parameter) is (name == "last.bias")
        if leaf is not parameter:
            assert pieces.parameter_of[id(leaf)][0] is parameter
            assert leaf.grad is not None


@on_cpu
def test_shares_buffers_and_attributes_and_leaves_the_module_as_it_is() -> None:
    module = Net()
    before = [(vars(child).copy(), child._parameters.copy()) for child in module.modules()]
    copy = pieces_of(module).copy
    copy(torch.randn(4, 3))
    assert module.norm.num_batches_tracked == 1
    assert copy.norm.running_mean.data_ptr() == module.norm.running_mean.data_ptr()
    assert copy.scale is module.scale
    assert [(vars(child), child._parameters) for child in module.modules()] == before


@on_cpu
def test_is_gone_with_its_last_reference() -> None:
    module = Net()
    copy = pieces_of(module).copy
    copy(torch.randn(4, 3)).sum()
    gone = weakref.ref(copy.last)
    del copy
    assert gone() is None


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


@on_cuda
@pytest.mark.parametrize("kind", [Slotted, Bound, wrapped, in_place])
def test_ignored_modules_get_their_gradients(kind: Callable[[], Any], slots: list, root: torch.device) -> None:
    def trained(**options: Any) -> tuple[Any, list[Tensor | None]]:
        module: Any = build(root, lambda: nn.Sequential(Blocks(), kind()))
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


@on_cuda
def test_with_an_ignored_script_module_replicas_run_as_they_are(slots: list, root: torch.device) -> None:
    module: Any = build(root, lambda: nn.Sequential(Blocks(), torch.jit.script(nn.Linear(3, 3))))
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


@on_cuda
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


@on_cuda
def test_a_copy_that_a_checkpoint_holds_is_gone_with_the_capture(
    slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def noted(self: CapturedPieces, *arguments: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *arguments)

    begin = CapturedPieces.__init__
    monkeypatch.setattr(CapturedPieces, "__init__", noted)
    network: Any = by_wrapper(build(root, Parts), slots[:1], graphs=True)
    for _ in range(SETTLE):
        step(network, inputs(root))
    assert captured(network)
    del network
    gc.collect()
    assert [pieces() for pieces in made] == [None]
