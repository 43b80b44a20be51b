"""Every module of torch computes on devices without hardware what it computes on the CPU: outputs, gradients, buffers.

The modules and their inputs are those of torch's own tests (``module_db``), without exception. They run in training
and, where that differs, in evaluation. Of a module with hundreds of inputs (losses have all combinations of their
options) every n-th runs. A module is made on the CPU and copied to the device. Both get the same seed before they run,
and so draw the same random numbers on a simulated device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from like_the_cpu import to_cpu
from selection import others_long

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
common_modules = pytest.importorskip("torch.testing._internal.common_modules")
# That import chooses torch's own hypothesis settings for the process. What is collected later needs ours.
hypothesis.settings.load_profile("dataparallel")
# It also forbids the process to set flags of torch.backends, which other tests set.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

pytestmark = pytest.mark.devices("sim", "stand-in")

MANY = 200  # inputs of one module are enough
# Modules that most models are made of, one for each way to compute.
SHORT = {
    nn.BatchNorm2d, nn.Conv2d, nn.CrossEntropyLoss, nn.Dropout, nn.Embedding, nn.GELU, nn.LSTM, nn.LayerNorm, nn.Linear,
    nn.MaxPool2d, nn.MultiheadAttention, nn.TransformerEncoderLayer,
}  # fmt: skip


def is_leaf(value: object) -> bool:
    return isinstance(value, PackedSequence)


def fresh_leaves(value: Any, device: torch.device | str) -> Any:
    """The same numbers in new leaf tensors on the device."""

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, PackedSequence):  # its batch sizes must be on the CPU
            return leaf._replace(data=fresh(leaf.data))
        return leaf

    return tree_map(fresh, value, is_leaf=is_leaf)


def tensors(value: Any) -> list[Tensor]:
    leaves = (leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in tree_leaves(value, is_leaf=is_leaf))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def run(module: nn.Module, args: Any, kwargs: Any, device: torch.device | str) -> dict[str, Any]:
    """Runs forward and backward, and returns outputs, gradients, parameters and buffers, and the CPU's generator."""
    args, kwargs = fresh_leaves((args, kwargs), device)
    torch.manual_seed(3)
    outputs = tensors(module(*args, **kwargs))
    state = torch.get_rng_state()
    differentiable = [output for output in outputs if output.requires_grad]
    torch.manual_seed(4)
    cotangents = [torch.randn(each.shape, dtype=each.dtype).to(each.device) for each in differentiable]
    if differentiable:
        torch.autograd.backward(differentiable, cotangents)
    return {
        "generator": state,
        "outputs": outputs,
        "input gradients": [leaf.grad for leaf in tensors((args, kwargs))],
        "parameters": dict(module.named_parameters()),
        "parameter gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }


def assert_same(on_device: dict[str, Any], on_cpu: dict[str, Any], dtype: torch.dtype) -> None:
    for part in [*on_cpu][1:]:
        torch.testing.assert_close(
            tree_map(to_cpu, on_device[part]),
            tree_map(to_cpu, on_cpu[part]),
            equal_nan=True,
            # In float32 the CPU's own results differ as much from run to run, because it sums in another order.
            **({"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}),
            msg=lambda message, part=part: f"{part}: {message}",
        )


def samples(
    info: Any, dtype: torch.dtype, training: bool, device: torch.device
) -> Iterator[tuple[nn.Module, nn.Module, Any, Any]]:
    """For each input: a new module on the CPU, its copy on the device, and the arguments."""
    torch.manual_seed(1)
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    inputs = [sample for sample in inputs if sample.forward_input is not None]
    for sample in inputs[:: len(inputs) // MANY + 1]:

        def build(sample: Any = sample) -> nn.Module:
            torch.manual_seed(2)
            return info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)

        on_cpu = build().to(dtype)
        on_device = copy.deepcopy(on_cpu).to(device)
        yield on_cpu, on_device, sample.forward_input.args, sample.forward_input.kwargs


def every_module(test: Callable[..., None]) -> Callable[..., None]:
    infos = sorted(common_modules.module_db, key=lambda info: info.name)
    short = [info for info in infos if info.module_cls in SHORT]
    return pytest.mark.parametrize("info", others_long(infos, short), ids=[info.formatted_name for info in infos])(test)


@pytest.mark.parametrize(
    "dtype", others_long([torch.float32, torch.float64], [torch.float32]), ids=["float32", "float64"]
)
@every_module
def test_a_module_on_a_device_is_the_module_on_the_cpu(info: Any, dtype: torch.dtype, slots: list) -> None:
    device = torch.device(slots[-1])
    if dtype not in info.supported_dtypes("cpu"):
        pytest.skip(f"torch has no {info.name} in {dtype}")
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for on_cpu, on_device, args, kwargs in samples(info, dtype, training, device):
            expected, found = run(on_cpu, args, kwargs, "cpu"), run(on_device, args, kwargs, device)
            torch.manual_seed(3)
            if device.type == "sim" or torch.equal(expected["generator"], torch.get_rng_state()):  # or it has drawn
                assert_same(found, expected, dtype)
            assert all(tensor.device == device for tensor in (*on_device.parameters(), *on_device.buffers()))
