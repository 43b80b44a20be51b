"""Random small models and random steps, captured beside the same ones without graphs: the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from each_form import Form, graphing_forms, whole
from graphed_nets import gradients

pytestmark = [pytest.mark.devices("cuda"), graphing_forms]

LAYERS = ("linear", "norm", "dropout", "checkpoint", "drawing checkpoint", "buffer", "view", "scale", "list", "flag")
OUTPUTS = ("tensor", "heads", "dict", "dataclass", "object", "twice", "input", "parameter")
STEPS = (
    *(
        "train",
        "train",
        "train",
        "one head",
        "evaluate",
        "toggle",
        "size",
        "freeze",
        "save",
        "load",
        "hold",
        "two",
        "twice",
    ),
    *("penalty", "scale", "list", "flag", "clip", "seed", "input", "deterministic"),
)


@dataclass
class Output:
    first: Tensor
    second: Tensor


class Model(nn.Module):
    def __init__(self, layers: list[str], output: str) -> None:
        super().__init__()
        self.kinds, self.output = tuple(layers), output
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in layers)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)
        self.table = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("count", torch.zeros(4))
        self.config, self.sizes, self.flag = SimpleNamespace(scale={"of": [1.0]}), [1, 2], False

    def forward(self, x: Tensor) -> Any:
        given = x
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "linear":
                x = layer(x)
            elif kind == "norm":
                x = self.norm(x)
            elif kind == "dropout":
                x = self.drop(x)
            elif kind == "checkpoint":
                x = checkpoint(layer, x, use_reentrant=False)
            elif kind == "drawing checkpoint":
                x = checkpoint(lambda x, layer=layer: self.drop(layer(x)), x, use_reentrant=False)
            elif kind == "buffer":
                with torch.no_grad():
                    self.count.add_(x.mean(0))
                x = x + self.count.clone()
            elif kind == "view":
                x = x + self.table[1:3].sum(0)
            elif kind == "scale":
                x = x * self.config.scale["of"][0]
            elif kind == "list":
                x = x + sum(self.sizes)
            elif self.flag:
                x = layer(x).sin()
        first = self.first(x)
        return {
            "tensor": lambda: first,
            "heads": lambda: (first, self.second(x)),
            "dict": lambda: {"a": first, "n": len(self.kinds), "b": [self.second(x)]},
            "dataclass": lambda: Output(first, self.second(x)),
            "object": lambda: SimpleNamespace(a=first),
            "twice": lambda: (first, first),
            "input": lambda: (first, given),
            "parameter": lambda: (first, self.table),
        }[self.output]()


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (list, tuple)):
        return [each for item in output for each in tensors_of(item)]
    if isinstance(output, dict):
        return tensors_of([*output.values()])
    return tensors_of([*vars(output).values()]) if hasattr(output, "__dict__") else []


class Training:
    def __init__(self, form: Form, slots: list, spec: tuple[list[str], str], graphs: bool) -> None:
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        self.root = torch.device(slots[0])
        self.module: Any = Model(*spec).double().to(self.root)
        self.network = form(self.module, slots, graphs=graphs)
        # With a large eps a gradient that is zero but for rounding, as that of a bias before a norm, is no step.
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.05, eps=1e-3)
        self.samples, self.needs_grad, self.random = 4 * len(slots), False, torch.Generator().manual_seed(0)
        self.saved, self.held, self.found = None, list[Tensor](), list[Any]()

    def call(self) -> list[Tensor]:
        found = [each.to(self.root) for each in tensors_of(self.network(self.inputs()))]
        # A parameter that is returned is the user's own without graphs, and changes later.
        return [each.clone() for each in found] if self.module.output == "parameter" else found

    def inputs(self) -> Tensor:
        # Checkpoints on several devices set the host's generator.
        x = torch.randn(self.samples, 4, dtype=torch.double, generator=self.random)
        return x.to(self.root).requires_grad_(self.needs_grad)

    def loss(self, heads: int | None = None) -> Tensor:
        outputs = [each for each in self.call() if each.requires_grad][:heads]
        return torch.stack([each.square().mean() for each in outputs]).sum()

    def finish(self, loss: Tensor, again: bool = False) -> None:
        if loss.requires_grad:
            loss.backward(retain_graph=again)
        if again and loss.requires_grad:
            loss.backward()
        self.found += [loss, *gradients(self.module)]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, kind: str) -> None:
        module = self.module
        if kind in ("train", "one head"):
            self.finish(self.loss(1 if kind == "one head" else None))
        elif kind == "evaluate":
            with torch.no_grad():
                self.found += self.call()
        elif kind == "toggle":
            self.network.train(not self.network.training)
        elif kind == "size":
            self.samples = self.samples * 2 if self.samples < 20 else self.samples // 4
        elif kind == "freeze":
            module.first.requires_grad_(not module.first.weight.requires_grad)
        elif kind == "save":
            self.saved = {name: value.clone() for name, value in module.state_dict().items()}
        elif kind == "load" and self.saved is not None:
            module.load_state_dict(self.saved)
        elif kind == "hold":
            self.held += self.call()
        elif kind == "two":
            self.finish(self.loss() + self.loss())
        elif kind == "twice":
            self.finish(self.loss(), again=True)
        elif kind == "penalty":
            self.penalty()
        elif kind == "scale":
            module.config.scale["of"][0] += 0.5
        elif kind == "list":
            module.sizes.append(1)
        elif kind == "flag":
            module.flag = not module.flag
        elif kind == "clip":
            with torch.no_grad():
                module.table.clamp_(-1, 1)
        elif kind == "seed":
            torch.cuda.manual_seed_all(5)
        elif kind == "deterministic":
            torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
        elif kind == "input":
            self.needs_grad = not self.needs_grad

    def penalty(self) -> None:
        """A capture that was made for steps without penalties refuses this one."""
        x = self.inputs().detach().requires_grad_()
        output = tensors_of(self.network(x))[0]
        try:
            (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            grad.square().sum().backward()
            self.found.append(("penalty", gradients(self.module)))
        except RuntimeError as error:
            assert "a captured backward cannot be differentiated" in str(error)  # noqa: PT017
            self.found.append(("penalty", None))
        self.optimizer.zero_grad()

    def run(self, steps: list[str]) -> list[Any]:
        try:
            for kind in steps:
                self.step(kind)
        finally:
            torch.use_deterministic_algorithms(False)
        return [*self.found, *self.held, *map(whole, self.module.state_dict().values())]


def check(form: Form, slots: list, layers: list[str], output: str, steps: list[str]) -> None:
    expected, found = (
        Training(form, slots, (["linear", *layers], output), graphs).run(steps) for graphs in (False, True)
    )
    # Gradients of two graphs are added in the order of these graphs, and those of two pieces in the order of pieces.
    uses_of_table = layers.count("view") + (output == "parameter")
    exact = "two" not in steps and layers.count("norm") < 2 and uses_of_table < 2

    def same(old: Tensor | None, new: Tensor | None) -> bool:
        if old is None or new is None:
            return old is new
        return torch.equal(old, new) if exact else torch.allclose(old, new, rtol=1e-9, atol=1e-9)

    for old, new in zip(expected, found, strict=True):
        if isinstance(old, tuple):
            assert new[1] is None or all(map(same, old[1], new[1]))
        else:
            assert same(old, new), (old, new)


@pytest.mark.slots(1, 2)
@pytest.mark.parametrize("examples", [12, pytest.param(500, marks=[pytest.mark.long, pytest.mark.watchdog(3600)])])
def test_captured_models_compute_the_same_bits(examples: int, form: Form, slots: list) -> None:
    @settings(max_examples=examples)
    @given(
        layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4),
        output=st.sampled_from(OUTPUTS),
        repeated=st.sampled_from(["train", "evaluate", "one head", "two"]),
        steps=st.lists(st.sampled_from(STEPS), max_size=16),
    )
    def check_examples(layers: list[str], output: str, repeated: str, steps: list[str]) -> None:
        check(form, slots, layers, output, [repeated] * 4 + steps)

    check_examples()
