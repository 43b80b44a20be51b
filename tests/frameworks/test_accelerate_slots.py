"""`integrations.accelerate.Accelerator`: a loop that accelerate prepares, with a model in each of the three forms.

Also with accelerate's own class, which knows no forms.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import extract_model_from_parallel
from tiny import gpt2, tokens

from dataparallel.integrations.accelerate import Accelerator
from each_form import FORMS

all_forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def accelerator(root):
    return Accelerator(cpu=root.type != "cuda", gradient_accumulation_steps=2)


class Run:
    """A prepared model, optimizer and loader, the last of whose batches is smaller."""

    def __init__(self, accelerator, form=None, slots=None):
        model = gpt2() if form is None else FORMS[form](gpt2().to(slots[0]), slots)
        loader = DataLoader(tokens(19), batch_size=5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.accelerator, self.first_gradients = accelerator, None
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)

    def train(self):
        for ids in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(ids))
                self.note_gradients()
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def loss(self, ids):
        logits = self.model(input_ids=ids).logits
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device), reduction="mean"
        )

    def note_gradients(self):
        if self.first_gradients is None:
            gradient = next(self.model.parameters()).grad
            self.first_gradients = torch.zeros(()) if gradient is None else gradient.detach().cpu().clone()

    def state(self):
        model = self.accelerator.get_state_dict(self.model)
        return {name: value.cpu().clone() for name, value in model.items()}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.fixture
def expected(accelerator):
    return Run(accelerator).train()


@all_forms
class TestAccelerator:
    def test_it_trains_as_one_device_and_gradients_wait_until_the_last_batch_of_a_step(
        self, accelerator, form, slots, expected
    ):
        run = Run(accelerator, form, slots).train()
        assert_same(run.state(), expected.state())
        is_complete = run.first_gradients.shape == expected.first_gradients.shape and torch.allclose(
            run.first_gradients, expected.first_gradients
        )
        assert is_complete == (form == "DataParallel")

    def test_a_saved_state_is_that_of_one_device(self, accelerator, form, slots, expected, tmp_path):
        expected.train()
        accelerator.free_memory()
        Run(accelerator, form, slots).train()
        accelerator.save_state(str(tmp_path))
        saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)["state"]
        assert {type(value) for values in saved.values() for value in values.values()} == {torch.Tensor}
        # The names of a wrapper's state are the wrapper's.
        for on in [(form, slots), *[()] * (form != "DataParallel")]:
            accelerator.free_memory()
            again = Run(accelerator, *on)
            accelerator.load_state(str(tmp_path))
            assert_same(again.train().state(), expected.state())

    def test_outputs_are_gathered_for_metrics(self, accelerator, form, slots):
        run = Run(accelerator, form, slots)
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(run.model(input_ids=ids).logits) for ids in run.loader]
        assert [len(each) for each in found] == [5, 5, 5, 4]


@all_forms
def test_a_part_of_the_model_may_have_the_form(accelerator, form, slots, expected):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = FORMS[form](gpt2().to(slots[0]), slots)

        def forward(self, **batch):
            return self.inner(**batch)

    run = Run(accelerator, form, slots)
    run.model = accelerator.prepare(Outer())
    run.optimizer = accelerator.prepare(torch.optim.Adam(run.model.parameters(), lr=0.01))
    run.train()
    found = run.state()
    prefix = "inner.module." if form == "DataParallel" else "inner."
    assert_same({name.removeprefix(prefix): value for name, value in found.items()}, expected.state())


@pytest.mark.parametrize("form", ["DataParallel", "replicate"])
@pytest.mark.slots(1, 2, 3)
class TestAccelerateItself:
    @pytest.fixture
    def settings(self, root):
        return {"cpu": root.type != "cuda", "device_placement": root.type == "cuda"}

    def test_it_trains_as_one_device(self, form, slots, settings, root):
        accelerator = accelerate.Accelerator(**settings, gradient_accumulation_steps=2)
        found, expected = Run(accelerator, form, slots), Run(accelerator)
        for run in (found, expected):
            run.model.to(root)
            run.loader = [ids.to(root) for ids in run.loader]
            run.train()
        assert_same(accelerator.unwrap_model(found.model).state_dict(), expected.model.state_dict())

    @pytest.mark.devices("cpu", "cuda")  # a type that accelerate does not know has no autocast of its own there
    def test_mixed_precision_is_put_around_the_model_and_taken_off(self, form, slots, settings, root):
        plain, seen, ids = gpt2().float().to(root), [], tokens(7).to(root)
        expected = plain(input_ids=ids).logits
        plain.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model = accelerate.Accelerator(**settings, mixed_precision="bf16").prepare(FORMS[form](plain, slots))
        found = model(input_ids=ids).logits
        assert found.dtype == torch.float32
        assert not torch.equal(found, expected)
        assert seen == [torch.bfloat16] * len(slots)
        unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=False)
        torch.testing.assert_close(unwrapped(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
