"""Architectures that no one here wrote: both forms compute what one device computes of the same chunks.

The same chunks, because a kernel for the whole batch may round otherwise, and because batch normalisation in training
mode takes each chunk by itself.
"""

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("timm")

from architectures import ARCHITECTURES

from dataparallel import DataParallel
from dataparallel.composable import replicate

SAMPLES, SLOTS = 5, 2
TOLERANCE = 1e-9


def tensors(output):
    """The floating point tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    elif dataclasses.is_dataclass(output):
        output = list(vars(output).values())
    return [tensor for part in output for tensor in tensors(part)] if isinstance(output, (list, tuple)) else []


def loss_of(outputs):
    """A number in which every output of every sample has its own weight."""
    total = 0.0
    for place, output in enumerate(outputs, start=1):
        weights = torch.linspace(1, 2, output.numel(), dtype=output.dtype, device=output.device)
        total = total + (output * weights.view(output.shape)).sum() / (place * output.numel())
    return total


def chunk_by_chunk(model, batch):
    """Outputs of one device, joined as both forms join them."""
    chunks = zip(*(value.chunk(SLOTS) for value in batch.values()), strict=True)
    # Buffers that change are those of slot 0: the others have copies.
    models = [model, *(copy.deepcopy(model) for _ in range(SLOTS - 1))]
    for other in models[1:]:
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert ours is not theirs
    found = []
    for net, chunk in zip(models, chunks, strict=True):
        found.append(tensors(net(**dict(zip(batch, chunk, strict=True)))))
    joined = [
        torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
        for parts in zip(*found, strict=True)
    ]
    return joined, models


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request):
    return ARCHITECTURES[request.param]


@pytest.mark.parametrize("form", ["DataParallel", "replicate"])
@pytest.mark.slots(SLOTS)
def test_outputs_and_gradients(form, architecture, slots, root):
    torch.manual_seed(0)
    model = architecture.build().double().to(root).train()
    batch = {name: value.to(root) for name, value in architecture.batch(SAMPLES).items()}
    one = copy.deepcopy(model)
    wrapped = DataParallel(model, slots) if form == "DataParallel" else replicate(model, devices=slots)

    expected, parts = chunk_by_chunk(one, batch)
    loss_of(expected).backward()
    found = tensors(wrapped(**batch))
    loss_of(found).backward()

    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    assert max(map(relative, found, expected)) <= TOLERANCE
    # Each part has the gradients of its chunk.
    gradients = zip(*(part.parameters() for part in parts), strict=True)
    largest = max(p.grad.abs().max().item() for part in parts for p in part.parameters() if p.grad is not None)
    seen = 0
    for (name, parameter), copies in zip(model.named_parameters(), gradients, strict=True):
        given = [each.grad for each in copies if each.grad is not None]
        assert (parameter.grad is None) == (not given), name
        if given:
            seen += 1
            assert (parameter.grad - sum(given)).abs().max().item() <= TOLERANCE * largest, name
    assert seen > 0
    assert largest > 0
    for (name, buffer), of_one in zip(model.named_buffers(), one.buffers(), strict=True):
        torch.testing.assert_close(buffer, of_one, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
