"""torchao's quantised weights consist of other tensors. They serve, and adapters beside them are trained."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from dataparallel import DataParallel
from dataparallel.composable import fully_shard
from each_form import replicating_forms

CONFIGS = {
    "int8": lambda: Int8WeightOnlyConfig(version=2),
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "float8": lambda: Float8WeightOnlyConfig(),
    "int8 inputs": lambda: Int8DynamicActivationInt8WeightConfig(version=2),
    "int8 inputs, int8 groups": lambda: Int8DynamicActivationIntxWeightConfig(),
}


class Adapted(nn.Module):
    """A frozen layer, and two small trained ones beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.fixture(params=CONFIGS)
def net(request, root):
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(), nn.Tanh(), Adapted()).to(root)
    quantize_(net, CONFIGS[request.param](), filter_fn=lambda module, name: name.endswith("base"))
    assert hasattr(net[0].base.weight, "__tensor_flatten__")
    return net


@pytest.fixture
def x(slots, root):
    return torch.randn(2 * len(slots) + 1, 64, generator=torch.Generator().manual_seed(1)).to(root)


def train(model, parameters, x):
    optimizer = torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


@replicating_forms
def test_it_serves_loads_a_state_dict_and_has_adapters_trained(form, net, slots, x, without_graph):
    model = form(copy.deepcopy(net), slots)
    for _ in range(2):
        with without_graph():
            torch.testing.assert_close(model(x), net(x))
        for each in (model.module if isinstance(model, DataParallel) else model, net):
            each.load_state_dict({name: copy.deepcopy(value) for name, value in net.state_dict().items()})
    torch.testing.assert_close(train(model, model.parameters(), x), train(net, net.parameters(), x))


def test_fully_shard_refuses_it_by_name(net, slots):
    with pytest.raises(TypeError, match=r"'0.base.weight' is a \w+Tensor, which stands for other tensors"):
        fully_shard(net, devices=slots)
