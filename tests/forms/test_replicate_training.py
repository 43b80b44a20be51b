"""A training loop's uses of parameters and gradients work on a replicated module as on one device, in float64.

Loops with several modules or several calls are in test_replicate_loops.
"""

import pytest
import torch
from loops import SMALL, adamw, assert_same_loop, mean_square, waits
from persistent import Branched, kept_on_slots, numbers
from torch import Tensor, nn

from dataparallel.composable import register_forward_method, replicate
from dataparallel.testing.cases import numbers as batches_of
from dataparallel.testing.cases import seeded

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

STEPS = 4
net = seeded(Branched)


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("quietly", [True, False], ids=["no_sync", "each is summed"])
def test_three_micro_batches_make_one_step(slots, root, quietly):
    def loop(net):
        optimizer = adamw(net)
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(3):
                x = numbers(root, 2 * len(slots) + micro, seed=3 * step + micro)
                if quietly and micro < 2:
                    with waits(net):
                        mean_square(net(x)).backward()
                else:
                    mean_square(net(x)).backward()
            optimizer.step()

    assert_same_loop(loop, slots, net)


def test_set_requires_gradient_sync_is_no_sync_without_a_block(slots, root):
    def loop(net):
        optimizer = adamw(net)
        for step in range(3 * STEPS):
            if hasattr(net, "set_requires_gradient_sync"):
                net.set_requires_gradient_sync(step % 3 == 2)
            mean_square(net(numbers(root, 2 * len(slots) + 1, seed=step))).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_same_loop(loop, slots, net)


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("users", ["none", "the first", "the last", "all but the first", "all"])
def test_a_parameter_that_some_slots_use(slots, root, users):
    """If only other slots use it, it has a gradient. If no slot does, it has ``None``, and no weight decay."""
    using = {
        "none": [],
        "the first": [0],
        "the last": [len(slots) - 1],
        "all but the first": range(1, len(slots)),
        "all": range(len(slots)),
    }[users]

    def loop(net):
        optimizer = adamw(net)
        found = []
        for step in range(STEPS):
            x = numbers(root, 2 * len(slots), seed=step, positive=True)
            for slot in using if step % 2 == 0 else ():
                x[2 * slot, 0] *= -1
            optimizer.zero_grad()
            mean_square(net(x)).backward()
            found.append(net.branch.weight.grad)
            optimizer.step()
        return found

    assert_same_loop(loop, slots, net)


def test_layers_are_frozen_and_unfrozen_while_gradients_are_accumulated(slots, root):
    def loop(net):
        optimizer = adamw(net)
        for step in range(9):
            net.first.requires_grad_(step % 3 != 1)
            net.last.bias.requires_grad_(step % 2 == 0)
            mean_square(net(numbers(root, 2 * len(slots) + 1, seed=step))).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_same_loop(loop, slots, net)


class Tied(nn.Module):
    """One weight is used for embeddings and for scores, and one layer is in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.layer(self.embed(tokens)))))


@pytest.mark.parametrize("quietly", [True, False], ids=["no_sync", "each is summed"])
def test_tied_weights_stay_tied_and_get_one_sum(slots, root, quietly):
    def build():
        tied = seeded(Tied)()
        with torch.device(root):  # moving a module to a simulated device unties its weights
            there = Tied().double()
        there.load_state_dict(tied.state_dict())
        return there

    def loop(net):
        optimizer = adamw(net)
        for step in range(STEPS):
            tokens = torch.randint(7, (2 * len(slots) + 1, 5), generator=torch.Generator().manual_seed(step)).to(root)
            optimizer.zero_grad()
            with waits(net) if quietly else torch.enable_grad():
                mean_square(net(tokens)).backward()
            mean_square(net(tokens.flip(0))).backward()
            optimizer.step()
        assert net.head.weight is net.embed.weight

    assert_same_loop(loop, slots, build)


@pytest.mark.slots(2, 8)
def test_an_optimizer_in_backward(slots, root):
    """Each parameter's step happens once in a backward, with the complete sum, and frees its gradient."""

    def loop(net):
        taken = []
        for name, parameter in net.named_parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.01)

            def step(parameter, optimizer=optimizer, name=name):
                if parameter.grad is None:  # torch calls this too where a node has none for one of its inputs
                    return
                taken.append(name)
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for k in range(STEPS):
            x = numbers(root, 2 * len(slots) + 1, seed=k, positive=k == 2)
            mean_square(net(x)).backward()
            # Steps happen in the order in which sums arrive, which is not that of one device.
            assert all(parameter.grad is None for parameter in net.parameters())
        return sorted(taken)

    assert_same_loop(loop, slots, net)


@pytest.mark.parametrize("norm", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_(slots, root, norm, foreach):
    if foreach and root.type not in ("cpu", "cuda"):
        foreach = None  # torch knows such kernels for its own devices only

    def loop(net):
        optimizer = adamw(net)
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with waits(net):
                mean_square(net(numbers(root, 2 * len(slots) + 1, seed=100 + step))).backward()
            mean_square(net(numbers(root, 2 * len(slots) + 1, seed=step))).backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1e-2, norm_type=norm, foreach=foreach))
            optimizer.step()
        return norms

    assert_same_loop(loop, slots, net)


@pytest.mark.parametrize("where", ["in the summed pass", "in the pass before"])
def test_a_step_that_grad_scaler_skips_leaks_nothing(slots, root, where):
    """The scale is halved, the weights stay, and the step after it is that of one device."""

    def loop(net):
        optimizer = adamw(net)
        scaler = torch.amp.GradScaler(root.type, init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            factor = float("inf") if step in (1, 4) else 1.0
            early, late = (1.0, factor) if where == "in the summed pass" else (factor, 1.0)
            before = net.last.weight.detach().clone()
            with waits(net):
                scaler.scale(mean_square(net(numbers(root, 2 * len(slots), seed=step))) * early).backward()
            scaler.scale(mean_square(net(numbers(root, 2 * len(slots) + 1, seed=9 + step))) * late).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert torch.equal(net.last.weight, before) is (factor != 1.0)
        assert min(scales) < 1024.0
        return scales

    assert_same_loop(loop, slots, net)


def test_a_module_made_on_meta_is_filled_before_its_first_forward(slots, root):
    values = {name: value.to(root) for name, value in net().state_dict().items()}
    with torch.device("meta"):
        late = Branched().double()
    assert replicate(late, devices=slots, **SMALL) is late
    late.to_empty(device=root)
    late.load_state_dict(values)
    early = net().to(root)
    for module in (late, early):
        optimizer = adamw(module)
        for step in range(STEPS):
            optimizer.zero_grad()
            mean_square(module(numbers(root, 2 * len(slots) + 1, seed=step))).backward()
            optimizer.step()
    torch.testing.assert_close(late.state_dict(), early.state_dict(), rtol=0, atol=1e-9)


class Scored(Branched):
    """Trains through another method, which calls ``forward``."""

    def score(self, x: Tensor, *, sharp: float) -> dict[str, Tensor]:
        output = self(x)
        return {"output": output, "score": torch.sigmoid(sharp * output).sum(dim=1)}


@pytest.mark.slots(2, 8)
def test_a_registered_forward_method_trains(slots, root):
    """It alternates with ``forward``, and a step has gradients of both."""

    def loop(net):
        if hasattr(net, "no_sync"):
            register_forward_method(net, "score")
        optimizer = adamw(net)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = numbers(root, 2 * len(slots) + 1, seed=step)
            scored = net.score(x, sharp=2.0)
            assert scored["score"].shape == (len(x),)
            (mean_square(scored["score"]) + mean_square(scored["output"])).backward()
            mean_square(net(x)).backward()
            optimizer.step()

    assert_same_loop(loop, slots, seeded(Scored))


def test_nothing_waits_after_a_loop_of_steps(slots, root):
    module = replicate(net().to(root), devices=slots, **SMALL)
    for step in range(STEPS):
        (x,), _ = batches_of(4)(2 * len(slots), step)
        with waits(module):
            mean_square(module(x.to(root))).backward()
        assert kept_on_slots(module) > 0
        mean_square(module(x.to(root))).backward()
        assert kept_on_slots(module) == 0
