"""What tests of the clocks share: the error of a missing order, and the end of all work."""

import pytest
import torch

from like_the_cpu import DEVICE


def race():
    return pytest.raises(RuntimeError, match=r"^race: ")


def finish():
    """Waits for all streams, so that memory of any stream may be freed."""
    torch.sim.synchronize(DEVICE)
