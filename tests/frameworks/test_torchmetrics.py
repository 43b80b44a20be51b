"""A metric of torchmetrics inside of a model: each replica has copies of it, so it does not count."""

import pytest
import torch

pytest.importorskip("torchmetrics")

import torchmetrics
from either_form import both_forms, in_form
from torch import nn


def data(root):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 4, dtype=torch.float64, generator=generator)
    return x.to(root), torch.randint(3, (11,), generator=generator).to(root)


class Counting(nn.Module):
    """A model with a metric of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3).double()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def forward(self, x, labels):
        logits = self.linear(x)
        self.accuracy.update(logits.detach(), labels)
        return logits


@both_forms
@pytest.mark.slots(2, 3)
def test_a_metric_inside_of_the_model_does_not_count(form, slots, root):
    """Its states are attributes, no buffers: replicas share those of the module, and none of them leads back to it."""
    model, (x, labels) = Counting().to(root), data(root)
    wrapped = in_form(form, model, slots)
    if root == torch.device("cpu"):
        wrapped(x, labels)
        source = wrapped.module if form == "DataParallel" else wrapped
        assert not source.accuracy.update_called
        assert source.accuracy.tp.sum() == 0
    else:
        with pytest.raises(RuntimeError, match="different devices"):
            wrapped(x, labels)
