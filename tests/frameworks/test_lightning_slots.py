"""`SlotsStrategy`: Lightning's trainer on slots does what it does on one device, in each of the three forms."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

from learner import EPOCHS, Learner, fit, loader, net, weights

from dataparallel.integrations.lightning import SlotsStrategy
from each_form import FORMS

# Lightning knows no device of the simulated type.
pytestmark = [pytest.mark.devices("cpu", "cuda"), pytest.mark.slots(3)]
all_forms = pytest.mark.parametrize("form", FORMS)


class Logger(Learner):
    """Logs in all steps, with other functions than the mean too. The last batch of an epoch is smaller."""

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, True, False, on_step=True, on_epoch=True)
        self.log("count", len(batch[0]), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log_dict({"largest": batch[0].max(), "smallest": -batch[0].min()}, reduce_fx=torch.max)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.log("validation", loss)
        self.log("weighted", loss, batch_size=int((batch[0] > 0).sum()))
        return loss

    def test_step(self, batch, index):
        assert batch[0].device == self.device == self.model[0].weight.device
        self.log("test", self.loss(batch), prog_bar=True)

    def on_train_batch_end(self, outputs, batch, index):
        self.seen = outputs


@pytest.fixture
def strategy(form, slots):
    return SlotsStrategy(slots, form, scalars="mean")


def fit_on_slots(learner, folder, strategy, **settings):
    return fit(learner, folder, accelerator="auto", devices="auto", strategy=strategy, **settings)


def assert_same_weights(learner, expected):
    torch.testing.assert_close(weights(learner), weights(expected), rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    learner = Logger(net())
    trainer = fit(learner, tmp_path_factory.mktemp("one"))
    trainer.logged = dict(trainer.callback_metrics)  # other calls of the trainer clear them
    return learner, trainer


@all_forms
class TestFit:
    def test_it_trains_and_logs_as_one_device(self, strategy, one_device, tmp_path):
        learner, (expected, of_one) = Logger(net()), one_device
        trainer = fit_on_slots(learner, tmp_path, strategy)
        assert_same_weights(learner, expected)
        metrics = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
        torch.testing.assert_close(metrics, of_one.logged, rtol=1e-6, atol=0)
        for name, value in expected.seen.items():  # what the last step has returned
            torch.testing.assert_close(learner.seen[name].cpu(), value)

    def test_the_batch_is_split(self, strategy, tmp_path):
        learner, sizes = Learner(net()), []
        learner.model[1].register_forward_hook(lambda module, args, output: sizes.append(len(output)))
        fit_on_slots(learner, tmp_path, strategy, limit_train_batches=1, limit_val_batches=0, max_epochs=1)
        assert sorted(sizes) == [2, 3, 3]

    def test_gradients_that_are_accumulated_wait_on_their_slots(self, form, strategy, tmp_path):
        class Accumulating(Learner):
            gradient = None

            def on_after_backward(self):
                if self.gradient is None:
                    gradient = self.model[0].weight.grad
                    self.gradient = torch.zeros(8, 4) if gradient is None else gradient.cpu().clone()

        settings = {"accumulate_grad_batches": 2, "max_epochs": 1, "gradient_clip_val": 0.1}
        one, several = Accumulating(net()), Accumulating(net())
        fit(one, tmp_path, **settings)
        fit_on_slots(several, tmp_path, strategy, **settings)
        assert torch.allclose(one.gradient, several.gradient.to(one.gradient)) == (form == "DataParallel")
        assert_same_weights(several, one)

    def test_a_checkpoint_is_that_of_one_device(self, form, slots, strategy, tmp_path):
        expected = Learner(net())
        fit(expected, tmp_path, max_epochs=EPOCHS + 1)
        fit_on_slots(Learner(net()), tmp_path, strategy).save_checkpoint(tmp_path / "checkpoint")
        plain = Learner(net())
        saved = torch.load(tmp_path / "checkpoint")
        assert saved["state_dict"].keys() == plain.state_dict().keys()
        moments = [value for values in saved["optimizer_states"][0]["state"].values() for value in values.values()]
        assert {type(value) for value in [*saved["state_dict"].values(), *moments]} == {torch.Tensor}
        fit(plain, tmp_path, tmp_path / "checkpoint", max_epochs=EPOCHS + 1)
        assert_same_weights(plain, expected)
        again = Learner(net())
        fit_on_slots(
            again, tmp_path, SlotsStrategy(slots, form), checkpoint=tmp_path / "checkpoint", max_epochs=EPOCHS + 1
        )
        assert_same_weights(again, expected)


@all_forms
class TestAfterTraining:
    def test_tests_and_predictions(self, strategy, one_device, tmp_path):
        learner, (expected, of_one) = Logger(net()), one_device
        trainer = fit_on_slots(learner, tmp_path, strategy)
        (found,), (tested,) = (
            one.test(model, loader(), verbose=False) for one, model in ((trainer, learner), (of_one, expected))
        )
        assert found == pytest.approx(tested, rel=1e-6)
        found, predicted = trainer.predict(learner, loader()), of_one.predict(expected, loader())
        torch.testing.assert_close([output.cpu() for output in found], predicted, rtol=1e-9, atol=1e-12)

    def test_another_trainer_goes_on_with_the_module(self, form, slots, strategy, one_device, tmp_path):
        learner = Logger(net())
        first = fit_on_slots(learner, tmp_path, strategy, max_epochs=1)
        fit_on_slots(learner, tmp_path, SlotsStrategy(slots, form), max_epochs=1)
        assert first.global_step == 3
        other = "replicate" if form == "DataParallel" else "DataParallel"
        with pytest.raises(RuntimeError, match="has the form and slots"):
            fit_on_slots(learner, tmp_path, SlotsStrategy(slots, other), max_epochs=1)


class Keeper(Learner):
    """Keeps what its steps compute, as Lightning's guide has it, until the epoch ends."""

    def __init__(self, model):
        super().__init__(model)
        self.kept, self.epochs = [], []

    def validation_step(self, batch, index):
        self.kept.append({"loss": self.loss(batch), "output": self(batch[0])})

    def on_validation_epoch_end(self):
        self.epochs.append([{name: value.cpu() for name, value in entry.items()} for entry in self.kept])
        self.kept.clear()


class TestModules:
    @all_forms
    @pytest.mark.slots(1, 3)
    def test_what_a_step_appends_to_a_list_is_that_of_the_batch(self, form, slots, tmp_path):
        learner, expected = Keeper(net()), Keeper(net())
        fit(expected, tmp_path)
        fit_on_slots(learner, tmp_path, SlotsStrategy(slots, form))
        assert [len(epoch) for epoch in learner.epochs] == [2, 3, 3]  # the first is Lightning's check before training
        torch.testing.assert_close(learner.epochs, expected.epochs, rtol=1e-9, atol=1e-12)

    @all_forms
    def test_a_value_may_be_logged_by_some_chunks_only(self, strategy, tmp_path):
        class Sometimes(Learner):
            def training_step(self, batch, index):
                if batch[0].abs().max() > largest:
                    self.log("seldom", batch[0].abs().max(), reduce_fx="max")
                return super().training_step(batch, index)

        x = next(iter(loader()))[0]
        largest = x.abs().max() * 0.999
        trainer = fit_on_slots(
            Sometimes(net()), tmp_path, strategy, limit_train_batches=1, max_epochs=1, limit_val_batches=0
        )
        assert trainer.callback_metrics["seldom"].item() == pytest.approx(x.abs().max().item())
        assert "loss" in trainer.callback_metrics

    @all_forms
    def test_the_trainers_sync_batchnorm_normalises_the_whole_batch(self, form, strategy, tmp_path):
        def with_batch_norm():
            model = net()
            return Learner(nn.Sequential(*model[:2], nn.BatchNorm1d(8).double(), model[2]))

        learner, expected = with_batch_norm(), with_batch_norm()
        fit(expected, tmp_path)
        fit_on_slots(learner, tmp_path, strategy, sync_batchnorm=True)
        assert_same_weights(learner, expected)

    @all_forms
    def test_a_step_may_return_a_sum(self, form, slots, tmp_path):
        class Sums(Learner):
            def loss(self, batch):
                return super().loss(batch) * batch[1].numel()

        with pytest.warns(UserWarning, match='pass scalars="mean".*scalars="sum" if a step returns a sum') as caught:
            SlotsStrategy(slots, form)
        assert [warning.filename for warning in caught] == [__file__]
        learner, expected = Sums(net()), Sums(net())
        fit(expected, tmp_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "SlotsStrategy")
            SlotsStrategy(slots[:1], form)
            strategy = SlotsStrategy(slots, form, scalars="sum")
        fit_on_slots(learner, tmp_path, strategy)
        assert_same_weights(learner, expected)

    def test_metrics_are_refused_in_a_step(self, slots, tmp_path):
        class Metric(Learner):
            def training_step(self, batch, index):
                self.log("loss", nn.Identity())

        with pytest.raises(TypeError, match=r"log\('loss'\): a Identity in a step that runs in a replica"):
            fit_on_slots(Metric(net()), tmp_path, SlotsStrategy(slots))

    def test_optimising_by_hand_is_refused(self, slots, tmp_path):
        learner = Learner(net())
        learner.automatic_optimization = False
        with pytest.raises(ValueError, match="cannot call manual_backward"):
            fit_on_slots(learner, tmp_path, SlotsStrategy(slots))

    def test_a_form_has_one_of_three_names(self, slots):
        with pytest.raises(ValueError, match="form='dp': expected 'replicate'"):
            SlotsStrategy(slots, "dp")

    def test_mixed_precision_reaches_the_replicas(self, slots, tmp_path):
        learner, seen = Learner(net().float()), []
        learner.model[2].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        batches = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 3)), batch_size=8)
        fit_on_slots(
            learner, tmp_path, SlotsStrategy(slots), batches=batches, limit_val_batches=0, precision="bf16-mixed"
        )
        assert {*seen} == {torch.bfloat16}
