"""An optimizer in backward works on both composable forms as on one device, in float64."""

import pytest
import torch
from kept import Branched, numbers
from loops import FORMS, assert_same_loop, mean_square

from dataparallel.testing.cases import seeded

STEPS = 4


@pytest.mark.slots(2, 8)
@pytest.mark.parametrize("form", FORMS)
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

    assert_same_loop(loop, slots, seeded(Branched), form=form)
