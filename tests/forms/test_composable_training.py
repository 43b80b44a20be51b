"""A training loop's uses of parameters and gradients work on both composable forms as on one device, in float64."""

import pytest
import torch
from kept import Branched, numbers
from loops import FORMS, adamw, assert_same_loop, mean_square, waits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dataparallel.testing.cases import seeded

STEPS = 4
net = seeded(Branched)


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


quietly_or_not = pytest.mark.parametrize("quietly", [True, False], ids=["no_sync", "each is summed"])


@pytest.mark.slots(2, 8)
def test_an_optimizer_in_backward(slots, root, form):
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

    assert_same_loop(loop, slots, net, form=form)


def judge() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))()


@pytest.mark.slots(3, long=[2, 8])
@quietly_or_not
def test_a_gan_with_three_backwards_a_step(slots, root, form, quietly):
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

    assert_same_loop(loop, slots, net, judge, form=form)


class Checkpointed(Branched):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


@pytest.mark.slots(3, long=[2, 8])
@quietly_or_not
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(
    ("form", "where"), [("replicate", "inside"), ("replicate", "around"), ("fully_shard", "inside")]
)
def test_preferences_with_checkpoints(slots, root, form, where, reentrant, quietly):
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

    assert_same_loop(loop, slots, seeded(policy), net, form=form)
