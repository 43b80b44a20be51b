"""The bytes that a replicated module needs on each simulated device, exactly."""

import pytest
import torch
from torch import nn

from dataparallel.composable import replicate
from memory import allocated, nbytes

pytestmark = [pytest.mark.devices("sim")]

WIDTH, LAYERS = 64, 4
LAYER = WIDTH * WIDTH * 4
"""Bytes of a layer's weight, which fills a bucket."""
BUCKET_MB = LAYER / 2**20
ARRANGEMENTS = [[0, 1], [0, 1, 2], [*range(8)], [0, 0, 1, 1], [0, 0, 0]]
on_devices = pytest.mark.parametrize("indices", ARRANGEMENTS, ids=str)


@on_devices
@pytest.mark.parametrize("with_buffers", [False, True])
def test_each_other_device_holds_one_copy_and_all_is_given_back(indices, with_buffers):
    slots = [torch.device("sim", index) for index in indices]
    devices = [torch.device("sim", index) for index in sorted({*indices})]
    torch.manual_seed(0)
    before = allocated(devices)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, *([nn.BatchNorm1d(WIDTH)] if with_buffers else [])).to(slots[0])
    parameters, buffers = nbytes(model.parameters()), nbytes(model.buffers())
    x = torch.ones(2 * len(slots), WIDTH, device=slots[0])
    root = allocated(devices)[0]
    replicate(model, devices=slots, bucket_cap_mb=BUCKET_MB, first_bucket_mb=BUCKET_MB)
    for _ in range(4):
        model(x).sum().backward()
        model.zero_grad()
    # Parameters once for each device but the source's; buffers once for each slot but the first.
    expected = [root + buffers * (indices.count(0) - 1)]
    expected += [
        old + parameters + buffers * indices.count(device.index)
        for device, old in zip(devices[1:], before[1:], strict=True)
    ]
    assert allocated(devices, expected) == expected
    del model, layers, x
    assert allocated(devices, before) == before


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_peak_of_a_step_is_gradients_and_the_buckets_under_way(count):
    """Beside the replicas. The layers are wide, so that activations are freed when the last gradients arrive."""
    slots = [torch.device("sim", index) for index in range(count)]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(slots[0])
    replicate(model, devices=slots, bucket_cap_mb=BUCKET_MB, first_bucket_mb=BUCKET_MB)
    parameters = nbytes(model.parameters())
    x = torch.ones(2 * count, WIDTH, device=slots[0])
    for measured in (False, False, False, True):
        if measured:
            before = allocated(slots)
            for device in slots:
                torch.sim.reset_peak_memory_stats(device)
        model(x).sum().backward()
        model.zero_grad()
    assert allocated(slots, before) == before
    peaks = [torch.sim.max_memory_allocated(device) - old for device, old in zip(slots, before, strict=True)]
    activations = 20 * x.nbytes
    assert peaks[0] <= parameters + 4 * LAYER + activations
    assert max(peaks[1:]) <= parameters + activations
