"""Models of many kinds whose replicas are captured as graphs, and a training with what users do meanwhile.

The GPTs and the ResNet are those of the tests of `fully_shard`, the BERT that of compiled replicas. Here are a plain
row of layers, recurrent layers, and a model with structures in and out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import compiled_models
import each_form
from dataparallel.composable import fully_shard
from dataparallel.forms import unit_choice
from dataparallel.testing.cases import Batch, generator, numbers, seeded, tokens
from dataparallel.testing.steps import mean_square_loss
from sharded_models import GPT, LENGTH, VOCABULARY, WIDTH, Apart, ResNet
from sharded_steps import Model, moved, on_device, whole


class Layer(nn.Module):
    """A linear layer, normalised over the batch, beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class SmoothLayer(Layer):
    """The samples of a batch do not influence each other, and forwards that fail change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


class Row(nn.Module):
    """Layers one after the other."""

    def __init__(self, kind: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Recurrent(nn.Module):
    """An LSTM and a GRU, each in a module of its own with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Reads(nn.LSTM), Reads(nn.GRU)])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.last(x[:, -1])


class Reads(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers, self.norm = kind(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.layers(x)[0])


class Structures(nn.Module):
    """Dicts, tuples, numbers and `None` go in and come out, of the model and of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Mixes() for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, pair: tuple[Tensor, Tensor], *, more: dict[str, Any], scale: float = 1.0) -> Any:
        state = {"x": pair[0], "y": pair[1], "shift": more["shift"], "nothing": None}
        for part in self.parts:
            state, total = part(state, scale=scale, weights=more["weights"])
        return {"logits": self.last(state["x"]), "pair": (state["y"], total), "nothing": state["nothing"]}


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any], *, scale: float, weights: Tensor | None) -> tuple[dict[str, Any], Tensor]:
        x = state["x"] + scale * self.into(state["y"]).tanh()
        y = state["y"] + self.out(x).sin() * (1.0 if weights is None else weights[:, None])
        return {"x": x, "y": y, "shift": state["shift"], "nothing": None}, (x + state["shift"]).sum(1)


def _structures(size: int, seed: int) -> Batch:
    random = generator(seed)
    x, y, shift = (torch.randn(size, WIDTH, dtype=torch.float64, generator=random) for _ in range(3))
    weights = torch.rand(size, dtype=torch.float64, generator=random) if seed % 2 else None
    return ((x, y),), {"more": {"shift": shift, "weights": weights}, "scale": 0.5}


_words = tokens(LENGTH, VOCABULARY)

MODELS: dict[str, Model] = {
    "row with batch norm": Model(seeded(Row), numbers(4)),
    "resnet": Model(seeded(ResNet, training=True), numbers(2, 8, 8)),
    "gpt": Model(seeded(Apart), _words),
    "gpt with tied weights": Model(seeded(GPT), _words),
    "bert": compiled_models.MODELS["bert"],
    "lstm and gru": Model(seeded(Recurrent), numbers(3, WIDTH)),
    "structures": Model(seeded(Structures), _structures),
}


def sharded(module: nn.Module, slots: list, **options: Any) -> Any:
    """With units that the library chooses, as many as in a large model, whose full parameters stay."""
    with patch.object(unit_choice, "_LEAST_BYTES", 1):
        return fully_shard(module, devices=slots, units="auto", reshard_after_forward=False, **options)


FORMS: dict[str, Any] = {
    "DataParallel": each_form.by_wrapper,
    "replicate": each_form.replicated,
    "fully_shard": sharded,
}


def made(model: Model, form: Callable[..., Any], slots: list, **options: Any) -> tuple[nn.Module, Any]:
    """The module, and what is called in its place."""
    source = on_device(model.build, torch.device(slots[0]))
    return source, form(source, slots, **options)


def values(source: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, whole and on the CPU."""
    found: dict[str, Tensor] = whole(dict(source.state_dict()))
    return found


def train(
    model: Model, form: Callable[..., Any], slots: list, steps: int, seed: int = 0, **options: Any
) -> tuple[Any, Any]:
    """Trains with all that a user does meanwhile. Returns what was computed, and the model.

    Gradients of two batches are summed in some steps, and one batch leaves a slot with fewer samples. There are
    evaluations, with and without grad mode, another learning rate, weights that are changed in place, and a state that
    is loaded. ``seed``: of the devices' generators.
    """
    source, network = made(model, form, slots, **options)
    torch.cuda.manual_seed_all(seed)  # after `seeded`, which sets it too
    root, count = torch.device(slots[0]), len(slots)
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.01)
    found: list[Any] = []

    def backward(number: int) -> None:
        args, kwargs = moved(model.batch(3 * count - (number == 9), number), root)
        loss = mean_square_loss(network(*args, **kwargs))
        loss.backward()
        found.append(whole(loss))

    saved = None
    for number in range(steps):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        backward(number)
        if number % 5 == 4:
            backward(number + 100)
        optimizer.step()
        if number % 3 == 2:
            network.eval()
            with torch.set_grad_enabled(number % 2 == 0):
                args, kwargs = moved(model.batch(3 * count, number), root)
                found.append(whole(network(*args, **kwargs)))
            network.train()
        if number == steps // 2:
            saved = copy.deepcopy(source.state_dict())
            optimizer.param_groups[0]["lr"] = 0.003
        if number == steps // 2 + 3:
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.mul_(0.9)
        if number == steps - 4:
            source.load_state_dict(saved)
    return {"computed": found, "state": values(source)}, network
