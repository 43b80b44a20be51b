"""The four stages: what a user overrides is called as torch calls it, whatever the engine would do."""

from typing import Any

import numpy
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


def test_a_dimension_is_any_integer(net: nn.Module, slots: list, x: Tensor) -> None:
    model = DataParallel(net, slots, dim=numpy.int64(0))  # type: ignore[arg-type]
    assert type(model.dim) is int
    torch.testing.assert_close(model(x), net(x))
    for wrong in (True, 0.0, "0"):
        with pytest.raises(TypeError, match=f"dim={wrong!r}: expected an int"):
            DataParallel(net, slots, dim=wrong)  # type: ignore[arg-type]
