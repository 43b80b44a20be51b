"""Training loops with several replicated modules, or several calls of one, equal one device, in float64."""

import pytest
import torch
from loops import adamw, assert_same_loop, mean_square, waits
from persistent import Branched, numbers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dataparallel.testing.cases import seeded

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

STEPS = 4
net = seeded(Branched)


def judge() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))()


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.parametrize("quietly", [True, False], ids=["no_sync", "each is summed"])
def test_a_gan_with_three_backwards_a_step(slots, root, quietly):
    """The judge gets real and made samples; the maker's pass leads through both, and the judge drops its gradients."""

    def verdict(judge, samples: Tensor, is_real: bool) -> Tensor:
        scores = judge(samples)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))

    def loop(maker, judge):
        of_maker, of_judge = adamw(maker), adamw(judge)
        losses = []
        for step in range(STEPS):
            real = numbers(root, 2 * len(slots) + 1, seed=step)[:, :2]
            made = maker(numbers(root, 2 * len(slots) + 1, seed=50 + step))
            of_judge.zero_grad()
            with waits(judge) if quietly else torch.enable_grad():
                losses.append(verdict(judge, real, True))
                losses[-1].backward()
            losses.append(verdict(judge, made.detach(), False))
            losses[-1].backward()
            of_judge.step()
            of_maker.zero_grad()
            # The next step throws away the judge's gradients of this pass.
            losses.append(verdict(judge, made, True))
            losses[-1].backward()
            of_maker.step()
        return losses

    assert_same_loop(loop, slots, net, judge)


class Checkpointed(Branched):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.parametrize("quietly", [True, False], ids=["no_sync", "each is summed"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_preferences_with_checkpoints(slots, root, where, reentrant, quietly):
    """DPO: a module and a frozen one see chosen and rejected samples; one backward leads through both calls."""
    policy = {True: CheckpointedReentrantly, False: Checkpointed}[reentrant] if where == "inside" else Branched

    def call(policy, x: Tensor) -> Tensor:
        return checkpoint(policy, x, use_reentrant=reentrant) if where == "around" else policy(x)

    def preference(policy, reference, seed: int) -> Tensor:
        chosen, rejected = (
            numbers(root, 2 * len(slots) + 1, seed=2 * seed + k).requires_grad_(reentrant) for k in range(2)
        )
        with torch.no_grad():
            known = reference(chosen) - reference(rejected)
        found = call(policy, chosen) - call(policy, rejected)
        return -F.logsigmoid((found - known).sum(dim=1)).mean()

    def loop(policy, reference):
        optimizer = adamw(policy)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with waits(policy) if quietly else torch.enable_grad():
                losses.append(preference(policy, reference, step))
                losses[-1].backward()
            losses.append(preference(policy, reference, 50 + step))
            losses[-1].backward()
            optimizer.step()
        return losses

    assert_same_loop(loop, slots, seeded(policy), net)


@pytest.mark.parametrize("first", [0, 1])
def test_two_modules_in_two_losses(slots, root, first):
    """Each loss depends on both modules; each has a backward, in either order, through a retained graph."""

    def loop(one, other):
        optimizers = [adamw(one), adamw(other)]
        for step in range(STEPS):
            x = numbers(root, 2 * len(slots) + 1, seed=step)
            a, b = one(x), other(one(x))
            losses = [mean_square(a) + mean_square(b), (a * b).mean()]
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses[first].backward(retain_graph=True)
            losses[1 - first].backward()
            for optimizer in optimizers:
                optimizer.step()

    def other() -> nn.Module:
        return seeded(nn.Linear, 2, 2)()

    assert_same_loop(loop, slots, net, other)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_the_steps(slots, root, context):
    """Also between a forward and its backward, and in another mode."""

    def loop(net):
        optimizer = adamw(net)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            value = mean_square(net(numbers(root, 2 * len(slots) + 1, seed=step)))
            with context():
                found.append(net.eval()(numbers(root, len(slots) - 1, seed=9)).clone())
            net.train()
            value.backward()
            optimizer.step()
        return found

    assert_same_loop(loop, slots, net)
