"""Models with several outputs and losses: gradients of one device, and as few full units as with one loss."""

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from dataparallel.sharded.units.slot_unit import SlotUnit
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines
from sharded_chains import assert_same_results
from sharded_steps import on_device, sharded

WIDTH = 6


class Block(nn.Module):
    """A residual layer with a router, which has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.router(x).softmax(-1)
        return {"x": x + torch.tanh(self.linear(x)), "scores": scores, "chosen": scores.argmax(-1)}


class Routed(nn.Module):
    """Blocks, and a head. Returns the head's output, the scores of all blocks, and what they have chosen."""

    def __init__(self, blocks: int = 6, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.use_reentrant = use_reentrant

    def units(self) -> list[Any]:
        return [*self.blocks]

    def forward(self, x: Tensor) -> Any:
        scores, chosen = [], []
        for block in self.blocks:
            run = block if self.use_reentrant is None else partial(checkpoint, block, use_reentrant=self.use_reentrant)
            of_block = run(x)
            x = of_block["x"]
            x *= 1.5  # in place
            scores.append(of_block["scores"])
            chosen.append(of_block["chosen"])
        return self.head(x), scores, torch.stack(chosen, 1)


def pair(slots: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
    build = seeded(Routed, *args)
    return sharded(on_device(build, slots[0]), slots, **options), on_device(build, slots[0])


def batch(slots: Any) -> Tensor:
    (x,), _ = numbers(WIDTH)(2 * len(slots) + 1, 0)
    return x.to(slots[0])


def losses(model: Any, x: Tensor) -> list[Tensor]:
    """Of each output that has a gradient."""
    y, scores, _ = model(x)
    return [y.square().mean(), *(score.square().mean() * (3 + at) for at, score in enumerate(scores))]


class TestResultsAreThoseOfOneDevice:
    def test_with_all_losses(self, slots):
        def use(model: Any) -> Any:
            x = batch(slots).requires_grad_()
            found = losses(model, x)
            sum(found).backward()
            return [*found, x.grad]

        assert_same_results(pair(slots), use)

    @pytest.mark.parametrize("order", [[6, 0, 3], [0, 6], [2, 5, 1, 0, 3, 4, 6]], ids=str)
    def test_with_a_backward_for_each_loss(self, order, slots):
        def use(model: Any) -> Any:
            x = batch(slots).requires_grad_()
            found = losses(model, x)
            for at in order:
                found[at].backward(retain_graph=at != order[-1])
            return x.grad

        assert_same_results(pair(slots), use)

    @pytest.mark.parametrize("at", [0, 1, 4, 6])
    def test_with_one_loss_only(self, at, slots):
        """Parameters that it does not need have no gradient."""

        def use(model: Any) -> Any:
            losses(model, batch(slots))[at].backward()

        assert_same_results(pair(slots), use)

    def test_of_one_output_for_the_input_only(self, slots):
        def use(model: Any) -> Any:
            x = batch(slots).requires_grad_()
            return torch.autograd.grad(losses(model, x)[3], x)

        assert_same_results(pair(slots), use)

    @pytest.mark.slots(2)
    def test_differentiated_again(self, slots):
        def use(model: Any) -> Any:
            x = batch(slots).requires_grad_()
            (of_x,) = torch.autograd.grad(sum(losses(model, x)), x, create_graph=True)
            return [of_x, *torch.autograd.grad(of_x.square().sum(), x)]

        assert_same_results(pair(slots), use)

    @pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
    def test_with_checkpoints(self, use_reentrant, slots):
        def use(model: Any) -> Any:
            x = batch(slots).requires_grad_()
            sum(losses(model, x)).backward()
            return x.grad

        assert_same_results(pair(slots, 3, use_reentrant), use)

    @pytest.mark.slots(2)
    def test_compiled(self, slots):
        def use(model: Any) -> Any:
            sum(losses(model, batch(slots))).backward()

        assert_same_results(pair(slots, 2, compile={"backend": "aot_eager"}), use)


class Gives(nn.Module):
    """Returns what a function makes of its parameters."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight, self.linear = function, nn.Parameter(torch.randn(4, WIDTH)), nn.Linear(WIDTH, 1)

    def units(self) -> list[Any]:
        return [self.linear]

    def forward(self, x: Tensor) -> Any:
        return self.function(self)


OF_PARAMETERS = {
    "one": lambda m: m.weight,
    "a view": lambda m: m.weight[1:],
    "a transpose": lambda m: m.weight.t(),
    "without a graph": lambda m: m.weight.detach(),
    "data": lambda m: {"data": m.weight.data},
    "several": lambda m: (m.weight, m.weight, m.weight.sum(1)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("below", [False, True], ids=["the root", "a unit below"])
@pytest.mark.parametrize("kind", OF_PARAMETERS)
def test_parameters_that_are_outputs_keep_their_values(kind, below, mode, slots):
    """The memory of the full ones is freed."""

    def build() -> Any:
        return Gives(OF_PARAMETERS[kind])

    several, one = (on_device(seeded(lambda: Around(build()) if below else build()), slots[0]) for _ in range(2))
    sharded(several, slots)
    x = torch.ones(1, WIDTH, dtype=torch.float64, device=slots[0])  # for one replica
    with mode():
        found, expected = several(x), one(x)
        several.reshard()
        several(x)
        assert_equal(found, expected, "output", atol=0)


class Around(nn.Module):
    """Holds a unit."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(WIDTH, 1)

    def units(self) -> list[Any]:
        return [self.inner]

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Counted:
    """How many units a slot has full at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
        self.full, self.most, lock = [0] * slots, [0] * slots, threading.Lock()
        fill, free = SlotUnit._fill, SlotUnit.free

        def filled(slot_unit: SlotUnit, *args: Any) -> None:
            fill(slot_unit, *args)
            with lock:
                self.full[slot_unit.slot] += 1
                self.most[slot_unit.slot] = max(self.most[slot_unit.slot], self.full[slot_unit.slot])

        def freed(slot_unit: SlotUnit) -> None:
            was_full = slot_unit.is_full
            free(slot_unit)
            if was_full and not slot_unit.is_full:
                with lock:
                    self.full[slot_unit.slot] -= 1

        monkeypatch.setattr(SlotUnit, "_fill", filled)
        monkeypatch.setattr(SlotUnit, "free", freed)


@pytest.mark.parametrize("of_scores", [list, sum], ids=["each score an output", "their sum an output"])
def test_a_loss_for_each_block_fills_no_more_units_at_a_time(of_scores, slots, monkeypatch):
    class Returned(Routed):
        def forward(self, x: Tensor) -> Any:
            y, scores, _ = super().forward(x)
            return y, of_scores(scores)

    model = sharded(on_device(seeded(Returned, 10), slots[0]), slots)
    counted = Counted(monkeypatch, len(slots))
    for _ in range(3):
        y, scores = model(batch(slots))
        loss = y.square().mean() + sum(score.mean() for score in (scores if of_scores is list else [scores]))
        counted.most[:] = counted.full
        loss.backward()
        assert max(counted.most) <= 3


class Towers(nn.Module):
    """Two outputs that share nothing, as of a generator and a discriminator, or of a policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def with_units(model: Towers, slots: Any) -> Any:
    for tower in (model.a, model.b):
        fully_shard(tower, devices=slots)
    return fully_shard(model, devices=slots)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(DataParallel, id="DataParallel"),
        pytest.param(lambda model, slots: replicate(model, devices=slots), id="replicate"),
        pytest.param(with_units, id="fully_shard"),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_losses_that_share_nothing_have_backwards_of_their_own(first, form, slots):
    """One after the other, without ``retain_graph``; what the other loss needs has no gradient before."""
    found = []
    for use in (lambda model: form(model, slots), lambda model: model):
        model = on_device(seeded(Towers), slots[0])
        called = use(model)
        outputs = called(batch(slots))
        for at in (first, 1 - first):
            outputs[at].square().mean().backward()
            grads = [parameter.grad for parameter in model.parameters()]
            found.append([None if g is None else g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads])
    assert_equal(found[:2], found[2:], "gradients", atol=1e-9)
    assert None in found[0]
    assert None not in found[1]


class Deep(nn.Module):
    """Two towers of units, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def trained_with_a_late_gradient(rank: int, devices: list[Any]) -> list[Tensor]:
    """The gradients. On one machine the gradient of the first output comes late, on the other that of the second."""
    model, mesh = on_device(seeded(Deep), devices[0]), init_device_mesh("cpu", (2,))
    for unit in (*model.a, *model.b, model):
        fully_shard(unit, devices=devices, mesh=mesh)
    for _ in range(2):
        outputs = [*model(batch(devices))]
        outputs[rank] = outputs[rank] * 1
        outputs[rank].grad_fn._set_sequence_nr(0)  # after all other nodes that are ready in this thread
        outputs[rank].register_hook(lambda grad: time.sleep(0.2))
        sum(output.square().mean() for output in outputs).backward()
    return [parameter.grad.full_tensor("cpu") for parameter in model.parameters()]


def test_machines_gather_in_one_order_whichever_gradient_comes_first():
    first, second = on_machines(trained_with_a_late_gradient)
    assert_equal(first, second, "gradients", atol=1e-9)
