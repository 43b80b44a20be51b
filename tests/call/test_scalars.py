"""``scalars=`` combines the scalars that replicas return, by the samples of their chunks, in every form."""

import copy

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from each_form import whole


class WithLoss(nn.Module):
    """It returns a loss of its own, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y):
        logits = self.layer(x)
        loss = nn.functional.mse_loss(logits, y)
        return {"loss": loss, "logits": logits, "right": (logits > y).sum(), "rows": logits.sum(dim=1)}


def build(root):
    torch.manual_seed(0)
    return WithLoss().double().to(root)


def batch(root, size):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, width, dtype=torch.float64, generator=generator).to(root) for width in (4, 2)]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [6, 7, 2, 1])
def test_a_mean_trains_as_one_device_does(form, slots, root, size):
    """Seven samples on three slots make uneven chunks, and two leave a slot out."""
    single = build(root)
    model = form(build(root), slots, scalars="mean")
    x, y = batch(root, size)
    output, expected = model(x, y), single(x, y)
    assert output["loss"].dim() == 0
    close(output["loss"], expected["loss"])
    close(output["logits"], expected["logits"])
    close(output["rows"], expected["rows"])
    output["loss"].backward()
    expected["loss"].backward()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        close(whole(ours.grad), theirs.grad)


def test_sums_of_a_loss_and_of_what_it_divides_by(form, slots, root):
    """A chunk in which nothing counts does no harm."""

    class Totals(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, y):
            return nn.functional.cross_entropy(self.layer(x), y, reduction="sum"), (y != -100).sum()

    torch.manual_seed(0)
    single = Totals().double().to(root)
    model = form(copy.deepcopy(single), slots, scalars="sum")
    x, _ = batch(root, 7)
    y = torch.tensor([2, -100, 0, -100, -100, -100, 1], device=root)
    (total, count), expected = model(x, y), nn.functional.cross_entropy(single.layer(x), y)
    close(total / count, expected)
    (total / count).backward()
    expected.backward()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        close(whole(ours.grad), theirs.grad)


def test_a_function_of_values_and_samples(form, slots, root):
    seen = []

    def largest(values, samples):
        seen.append((values.shape, samples))
        return values.max()

    x, y = batch(root, 7)
    output = form(build(root), slots, scalars=largest)(x, y)
    chunks = [build(root)(a, b)["loss"] for a, b in zip(x.split([3, 3, 1]), y.split([3, 3, 1]), strict=True)]
    close(output["loss"], max(chunks))
    assert seen == [(torch.Size([3]), (3, 3, 1))] * 2


def test_a_subclass_that_overrides_gather(slots, root):
    class Doubled(DataParallel):
        def gather(self, outputs, output_device):
            output = super().gather(outputs, output_device)
            return output["loss"] * 2

    x, y = batch(root, 7)
    close(Doubled(build(root), slots, scalars="mean")(x, y), build(root)(x, y)["loss"] * 2)


@pytest.mark.parametrize(("given", "error"), [("median", ValueError), (3, TypeError)])
def test_what_is_no_rule_is_refused(form, slots, root, given, error):
    with pytest.raises(error, match="expected 'mean', 'sum', a function or None"):
        form(build(root), slots, scalars=given)
