"""Recordings with the clocks and without them, for the tests of this folder."""

import pytest
import torch

from like_the_cpu import DEVICE, OTHER


@pytest.fixture(params=[True, False], ids=["clocks", "no clocks"])
def with_and_without_clocks(request):
    with torch.sim.clocks(request.param):
        yield
        torch.sim.synchronize(DEVICE)
        torch.sim.synchronize(OTHER)
