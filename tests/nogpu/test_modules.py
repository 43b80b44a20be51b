"""Modules that keep buffers, or are more than one of torch's operators, compute on a device what they do on the CPU.

Outputs, gradients and buffers are compared, in training, in evaluation, and without gradients, where torch has faster
kernels for some. `test_op_db` has the operators that all other modules are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence

from like_the_cpu import assert_as_on_the_cpu, made, numbers

pytestmark = pytest.mark.devices("sim", "stand-in")


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def of_itself(module: nn.Module, x: Tensor) -> Any:
    return module(x, x, x)


def packed(module: nn.Module, x: Tensor) -> Any:
    return module(pack_padded_sequence(x, torch.tensor([6, 2, 1])))[0].data


# How a module is made, how it is called, and the shape of what it is called with.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(3), call, (4, 3, 5, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), call, (4, 3, 5)),
    "spectral norm": (lambda: spectral_norm(nn.Linear(5, 4)), call, (3, 5)),
    "rnn": (lambda: nn.RNN(5, 4, nonlinearity="relu"), call, (6, 3, 5)),
    "lstm": (lambda: nn.LSTM(5, 4, 2, bidirectional=True), call, (6, 3, 5)),
    "lstm with a projection": (lambda: nn.LSTM(5, 4, proj_size=2, batch_first=True), call, (6, 3, 5)),
    "gru": (lambda: nn.GRU(5, 4, 2, bias=False), packed, (6, 3, 5)),
    "lstm cell": (lambda: nn.LSTMCell(5, 4), call, (3, 5)),
    "attention": (lambda: nn.MultiheadAttention(8, 2), of_itself, (5, 3, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), call, (3, 5, 8)),
}


@pytest.mark.parametrize("mode", ["training", "evaluation", "without gradients"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_on_a_device_is_the_module_on_the_cpu(name: str, mode: str, slots: list) -> None:
    build, function, shape = MODULES[name]
    module = made(build).train(mode == "training")
    with torch.set_grad_enabled(mode != "without gradients"):
        assert_as_on_the_cpu(function, module, numbers(*shape).requires_grad_(), device=torch.device(slots[-1]))
