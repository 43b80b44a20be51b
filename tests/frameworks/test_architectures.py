"""Architectures that no one here wrote: both forms compute what one device computes of the same chunks.

The same chunks, because a kernel for the whole batch may round otherwise, and because batch normalisation in training
mode takes each chunk by itself.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("timm")

from architectures import ARCHITECTURES

from dataparallel.testing.cases import seeded
from dataparallel.testing.parity import assert_same_step
from each_form import replicating_forms


def tensors(output):
    """The floating point tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    elif dataclasses.is_dataclass(output):
        output = list(vars(output).values())
    return [tensor for part in output for tensor in tensors(part)] if isinstance(output, (list, tuple)) else []


@replicating_forms
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.slots(2)
def test_outputs_gradients_and_buffers(form, name, slots):
    def build():
        """A wrapper's replicas return tensors only; replicated models join what the library returns."""
        model = seeded(ARCHITECTURES[name].build)().train()
        model.register_forward_hook(lambda module, args, output: tensors(output))
        return model

    batch = ((), ARCHITECTURES[name].batch(5))
    assert_same_step(build, batch, slots, by_chunks=True, wrap=lambda model, slots, dim: form(model, slots))
