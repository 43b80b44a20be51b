"""Lightning's `Trainer` around a module that holds one of the forms, or that is replicated itself."""

import copy

import pytest
import torch
from torch import nn

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
class TestFit:
    def test_it_trains_as_one_device(self, make, slots, one_device, tmp_path):
        learner, (expected, of_one) = make(slots), one_device
        before = copy.deepcopy(weights(learner))
        trainer = fit(learner, tmp_path)
        torch.testing.assert_close(weights(learner), expected.state_dict(), rtol=1e-9, atol=1e-12)
        assert not any(torch.equal(value, before[name]) for name, value in weights(learner).items())
        for name in ("loss", "validation"):
            torch.testing.assert_close(trainer.callback_metrics[name].cpu(), of_one.callback_metrics[name])

    def test_batches_are_split(self, make, slots, tmp_path):
        learner, sizes = make(slots), []
        (last,) = [module for module in learner.modules() if isinstance(module, nn.Tanh)]
        last.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
        fit(learner, tmp_path, limit_train_batches=1, limit_val_batches=0)
        assert sorted(sizes) == sorted([len(chunk) for chunk in torch.arange(8).chunk(len(slots))] * EPOCHS)

    def test_predictions(self, make, slots, one_device, tmp_path):
        learner, (expected, of_one) = make(slots), one_device
        trainer = fit(learner, tmp_path)
        found = trainer.predict(learner, loader())
        expected = of_one.predict(expected, loader())
        torch.testing.assert_close([output.cpu() for output in found], expected, rtol=1e-9, atol=1e-12)


@all_ways
def test_training_goes_on_from_a_checkpoint(make, slots, tmp_path):
    expected = Learner(net())
    fit(expected, tmp_path, max_epochs=EPOCHS + 1)
    fit(make(slots), tmp_path).save_checkpoint(tmp_path / "checkpoint")
    again = make(slots)
    fit(again, tmp_path, tmp_path / "checkpoint", max_epochs=EPOCHS + 1)
    torch.testing.assert_close(weights(again), expected.state_dict(), rtol=1e-9, atol=1e-12)


def test_the_state_of_a_replicated_learner_is_that_of_a_plain_one(slots, tmp_path):
    learner = replicated_itself(slots)
    fit(learner, tmp_path).save_checkpoint(tmp_path / "checkpoint")
    plain = Learner(net())
    plain.load_state_dict(torch.load(tmp_path / "checkpoint")["state_dict"])
    torch.testing.assert_close(plain.state_dict(), weights(learner))


def test_a_loader_may_send_ahead(slots, one_device, tmp_path):
    learner = with_a_wrapper(slots)
    fit(learner, tmp_path, batches=prefetch(loader(), learner.model))
    torch.testing.assert_close(weights(learner), one_device[0].state_dict(), rtol=1e-9, atol=1e-12)
