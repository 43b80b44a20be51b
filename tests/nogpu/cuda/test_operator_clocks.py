"""The clocks know what operators that only CUDA has read and write: an access without an order names its argument."""

import pytest
import torch

from nogpu.cuda import is_stand_in

pytestmark = [
    pytest.mark.devices("cuda"),
    pytest.mark.skipif(not is_stand_in(), reason="a GPU has no clocks"),
]

SEQUENCE = (1, 2, 4, 8)


def halves(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float16, device="cuda")


def floats(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def of_batch_norm() -> dict[str, torch.Tensor]:
    return {"input": floats(4, 3, 2), "mean": floats(3), "invstd": floats(3), "weight": floats(3)}


def of_attention() -> dict[str, torch.Tensor]:
    return {name: halves(*SEQUENCE) for name in ("query", "key", "value")}


NOTHING = dict.fromkeys(("cum_seq_q", "cum_seq_k"))

# Each operator with its tensors, which it reads unless `WRITTEN` has them, and with its other arguments.
OPERATORS = {
    "batch_norm_stats": lambda: ({"input": floats(4, 3, 2)}, {"eps": 1e-5}),
    "batch_norm_elemt": lambda: ({**of_batch_norm(), "bias": floats(3)}, {"eps": 1e-5}),
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
    "batch_norm_backward_reduce": lambda: (
        {**of_batch_norm(), "grad_out": floats(4, 3, 2)},
        {"input_g": True, "weight_g": True, "bias_g": True},
    ),
    "batch_norm_backward_elemt": lambda: (
        {**of_batch_norm(), "grad_out": floats(4, 3, 2), "sum_dy": floats(3), "sum_dy_xmu": floats(3)},
        {"count": torch.tensor([8], dtype=torch.int32, device="cuda")},
    ),
    "cudnn_batch_norm": lambda: (
        {"input": floats(4, 3, 2), "weight": floats(3), "running_mean": floats(3), "running_var": floats(3)},
        {"bias": floats(3), "training": True, "exponential_average_factor": 0.1, "epsilon": 1e-5},
    ),
    "_scaled_dot_product_flash_attention": lambda: (of_attention(), {}),
    "_scaled_dot_product_efficient_attention": lambda: (
        {**of_attention(), "attn_bias": halves(1, 2, 4, 4)},
        {"compute_log_sumexp": True},
    ),
    "_flash_attention_forward": lambda: (
        of_attention(),
        {**NOTHING, "max_q": 2, "max_k": 2, "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False},
    ),
    "mm.dtype": lambda: ({"self": halves(4, 4), "mat2": halves(4, 4)}, {"out_dtype": torch.float32}),
    "_fused_rms_norm": lambda: ({"input": floats(4, 3), "weight": floats(3)}, {"normalized_shape": [3], "eps": 1e-5}),
    "_masked_scale": lambda: ({"self": floats(4), "mask": floats(4)}, {"scale": 2.0}),
    "cudnn_grid_sampler": lambda: ({"self": floats(1, 1, 4, 4), "grid": floats(1, 2, 2, 2)}, {}),
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
