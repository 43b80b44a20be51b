"""Lightning's `Trainer` around a module that holds one of the forms, or that is replicated itself."""

import copy

import pytest
import torch

pytest.importorskip("lightning")

from learner import EPOCHS, Learner, fit, loader, net, weights

from dataparallel import DataParallel, prefetch
from dataparallel.composable import replicate


def with_a_wrapper(slots):
    return Learner(DataParallel(net().to(slots[0]), slots))


def with_a_replicated_model(slots):
    return Learner(replicate(net().to(slots[0]), devices=slots))


def replicated_itself(slots):
    return replicate(Learner(net()).to(slots[0]), devices=slots)


# Lightning's trainer moves the module to the CPU: it knows no device of the simulated type.
pytestmark = pytest.mark.devices("cpu", "cuda")
all_ways = pytest.mark.parametrize("make", [with_a_wrapper, with_a_replicated_model, replicated_itself])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """A learner trained on the whole batches, on the CPU, with its trainer."""
    learner = Learner(net())
    return learner, fit(learner, tmp_path_factory.mktemp("one"))


@all_ways
@pytest.mark.slots(1, 2, 3)
def test_it_trains_as_one_device_and_goes_on_from_a_checkpoint(make, slots, one_device, tmp_path):
    learner, (expected, of_one) = make(slots), one_device
    before = copy.deepcopy(weights(learner))
    trainer = fit(learner, tmp_path)
    torch.testing.assert_close(weights(learner), expected.state_dict(), rtol=1e-9, atol=1e-12)
    assert not any(torch.equal(value, before[name]) for name, value in weights(learner).items())
    for name in ("loss", "validation"):
        torch.testing.assert_close(trainer.callback_metrics[name].cpu(), of_one.callback_metrics[name])
    trainer.save_checkpoint(tmp_path / "checkpoint")
    again, longer = make(slots), Learner(net())
    fit(again, tmp_path, tmp_path / "checkpoint", max_epochs=EPOCHS + 1)
    fit(longer, tmp_path, max_epochs=EPOCHS + 1)
    torch.testing.assert_close(weights(again), longer.state_dict(), rtol=1e-9, atol=1e-12)


def test_a_loader_may_send_ahead(slots, one_device, tmp_path):
    learner = with_a_wrapper(slots)
    fit(learner, tmp_path, batches=prefetch(loader(), learner.model))
    torch.testing.assert_close(weights(learner), one_device[0].state_dict(), rtol=1e-9, atol=1e-12)
