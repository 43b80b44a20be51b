"""The four stages: what a user overrides is called as torch calls it, whatever the engine would do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel


@pytest.fixture
def net(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(root)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.randn(9, 4).to(root)


@pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply"])
def test_a_stage_may_assign_what_later_stages_read(name: str, net: nn.Module, slots: list, x: Tensor) -> None:
    class Assigns(DataParallel):
        def assign(self) -> None:
            self.output_device = torch.device("cpu")
            self.dim = 1

    def stage(self: Any, *args: Any) -> Any:
        found = getattr(super(Assigns, self), name)(*args)
        self.assign()
        return found

    setattr(Assigns, name, stage)
    output = Assigns(net, slots)(x)
    assert output.device.type == "cpu"
    assert output.shape == (3, 3 * len(slots))
