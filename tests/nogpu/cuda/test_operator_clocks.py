"""The clocks know what operators that only CUDA has read and write: an access without an order names its argument.

Their schemas say it, except for running statistics. So a few operators stand for all.
"""

import pytest
import torch

from nogpu.cuda import is_stand_in

pytestmark = [
    pytest.mark.devices("cuda"),
    pytest.mark.skipif(not is_stand_in(), reason="a GPU has no clocks"),
]


def halves(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float16, device="cuda")


def floats(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


# Each operator with its tensors, which it reads unless `WRITTEN` has them, and with its other arguments.
OPERATORS = {
    "batch_norm_elemt": lambda: (
        {"input": floats(4, 3, 2), **{name: floats(3) for name in ("weight", "bias", "mean", "invstd")}},
        {"eps": 1e-5},
    ),
    "batch_norm_gather_stats_with_counts": lambda: (
        {
            "mean": floats(2, 3),
            "invstd": floats(2, 3),
            "counts": floats(2),
            "running_mean": floats(3),
            "running_var": floats(3),
        },
        {"input": floats(4, 3, 2), "momentum": 0.1, "eps": 1e-5},
    ),
    "cudnn_batch_norm": lambda: (
        {"input": floats(4, 3, 2), "weight": floats(3), "running_mean": floats(3), "running_var": floats(3)},
        {"bias": floats(3), "training": True, "exponential_average_factor": 0.1, "epsilon": 1e-5},
    ),
    "_scaled_dot_product_efficient_attention": lambda: (
        {**{name: halves(1, 2, 4, 8) for name in ("query", "key", "value")}, "attn_bias": halves(1, 2, 4, 4)},
        {"compute_log_sumexp": True},
    ),
    "mm.dtype": lambda: ({"self": halves(4, 4), "mat2": halves(4, 4)}, {"out_dtype": torch.float32}),
}

WRITTEN = {"running_mean", "running_var"}


def find(name: str):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@pytest.mark.parametrize("name", OPERATORS)
def test_each_read_waits_for_a_write(name):
    tensors, others = OPERATORS[name]()
    for argument, tensor in tensors.items():
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            tensor.add_(0)
        verb = "writes" if argument in WRITTEN else "reads"
        operator = name.partition(".")[0]
        with pytest.raises(RuntimeError, match=f"race: aten::{operator} {verb} its argument '{argument}'"):
            find(name)(**tensors, **others)
        torch.cuda.current_stream().wait_stream(other)
        find(name)(**tensors, **others)


def test_a_layer_of_cudnn_waits_for_its_weights():
    layer = torch.nn.LSTM(4, 4, device="cuda")
    x = floats(2, 1, 4)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        layer.weight_hh_l0.add_(0)
    with pytest.raises(RuntimeError, match="race: "):
        layer(x)
    torch.cuda.synchronize()
