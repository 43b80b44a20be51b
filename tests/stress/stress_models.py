"""The models of the stress test, and what they have to return: one of each form that all threads call at once.

The right results come from one device, and then from the form itself while nobody else calls it. These bits every later
call has to have, whatever other threads do at the same time.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from each_form import whole

CLOSE = 1e-9


class Child(nn.Module):
    """Refers to its parent, and has a method bound to the instance: each replica is a reference cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def with_shift_of_parent(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(self.linear(x)) + self.family[0].shift


class Family(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))
        self.child = Child()
        self.child.family = [self]
        self.child.forward = types.MethodType(with_shift_of_parent, self.child)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class Broken(ArithmeticError):
    """Raised by a replica whose samples ask for it."""


class Net(nn.Module):
    """A plain tree with a buffer that it writes to. Samples with a huge number make the replica fail."""

    def __init__(self, family: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.middle = Family() if family else nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.last = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if (x > 1e5).any():
            raise Broken("in forward")
        if self.training:
            self.calls += 1
        y = self.last(self.middle(torch.tanh(self.first(x)))) * self.scale
        if y.requires_grad and (x < -1e5).any():
            y.register_hook(_fail)
        return y


def _fail(gradient: Tensor) -> None:
    raise Broken("in backward")


def made(seed: int, root: torch.device, family: bool = False) -> Net:
    """The same weights for each seed, whatever other threads draw."""
    net = Net(family).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return net.to(root)


def samples(seed: int, count: int, root: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator, dtype=torch.float64).to(root)


def applied(form: str, net: nn.Module, slots: Sequence[torch.device]) -> Any:
    """The net in a form. A fully sharded net has three units."""
    if form == "DataParallel":
        return DataParallel(net, slots)
    if form == "replicate":
        return replicate(net, devices=slots)
    for unit in (net.first, net.middle):
        fully_shard(unit, devices=slots)
    return fully_shard(net, devices=slots)


FORMS = ("DataParallel", "replicate", "fully_shard")


def by_chunks(net: nn.Module, x: Tensor, slots: int) -> Tensor:
    """What one device computes of the chunks that the slots get."""
    return torch.cat([net(chunk) for chunk in x.chunk(slots)])


class SharedModel:
    """A model that any thread may call at any time, with its input and what it has to return.

    ``gradients`` is ``None`` if calls may not record: of a fully sharded model one thread alone runs backward, and a
    model that some thread has frozen records for none.
    """

    def __init__(
        self, form: str, seed: int, slots: Sequence[torch.device], family: bool = False, is_served: bool = False
    ) -> None:
        self.name = f"{form}{' of a family' if family else ''}{', served' if is_served else ''}"
        self.is_served = is_served
        root = slots[0]
        net, alone = made(seed, root, family).eval(), made(seed, root, family).eval()
        self.x = samples(seed, 3 * len(slots) + seed % 3, root)
        self.model = applied(form, net, slots)
        self.parameters = [*self.model.parameters()]
        expected = by_chunks(alone, self.x, len(slots))
        gradients = torch.autograd.grad(expected.square().sum(), [*alone.parameters()])
        with torch.no_grad():
            self.output = self.model(self.x).clone()
        self._assert_close(self.output, expected)
        self.gradients: list[Tensor] | None = None
        if form != "fully_shard" and not is_served:
            self.gradients = [*torch.autograd.grad(self.model(self.x).square().sum(), self.parameters)]
            for ours, theirs in zip(self.gradients, gradients, strict=True):
                self._assert_close(ours, theirs)

    def _assert_close(self, ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE, msg=lambda text: f"{self.name}: {text}")

    def call(self, record: bool, inference: bool) -> None:
        """Calls the model, with gradients if ``record``, and compares bits."""
        mode: AbstractContextManager[Any] = torch.inference_mode() if inference else torch.set_grad_enabled(record)
        with mode:
            output = self.model(self.x)
        same_bits(f"output of {self.name}", output, self.output)
        if record and not inference:
            assert self.gradients is not None
            found = torch.autograd.grad(output.square().sum(), self.parameters)
            for number, (ours, theirs) in enumerate(zip(found, self.gradients, strict=True)):
                same_bits(f"gradient {number} of {self.name}", ours, theirs)


def same_parameters(ours: nn.Module, theirs: nn.Module, where: str) -> None:
    """Fails with the name of a parameter that differs, and says ``where``. Ours may be sharded."""
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            whole(found).detach(),
            expected.detach(),
            rtol=0,
            atol=CLOSE,
            msg=lambda text, name=name: f"{name} of {where}: {text}",
        )


def same_bits(name: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        most = (found - expected).abs().max().item() if found.shape == expected.shape else "another shape"
        raise AssertionError(f"{name}: wrong bits, by {most}:\n{found}\ninstead of\n{expected}")
