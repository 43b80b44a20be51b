"""What tests of the clocks share: a missing order, and the end of all waiting."""

import pytest
import torch

from like_the_cpu import DEVICE


def race():
    return pytest.raises(RuntimeError, match=r"^race: ")


def finish():
    """From here on memory of any stream may be freed."""
    torch.sim.synchronize(DEVICE)
