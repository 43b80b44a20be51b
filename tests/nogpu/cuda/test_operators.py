"""What programs use of torch.cuda's operators, beside the CPU: forwards and backwards.

On a stand-in many of these are no kernels of the CPU: attention, recurrent layers, parts of batch norm. `test_op_db`
has the rest of torch's operators.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from like_the_cpu import assert_as_on_the_cpu
from nogpu.cuda import is_stand_in

pytestmark = pytest.mark.devices("cuda")

BACKENDS = {
    SDPBackend.MATH: "_scaled_dot_product_attention_math",
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
}


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.device_count() - 1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---- recurrent layers


def test_dropout_between_recurrent_layers_is_repeated_by_a_seed(device):
    layer = nn.LSTM(5, 32, 2, dropout=0.5).to(device)
    x = torch.randn(3, 2, 5, device=device)

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return layer(x)[0]

    first = run()
    assert torch.equal(run(), first)
    assert not torch.equal(layer(x)[0], first)


# ---- attention


def attention(backend, **options):
    def attend(query, key, value):
        if not query.is_cuda:
            return F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, **options)

    return attend


def qkv() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 9, 16, dtype=torch.float16).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_by_each_kernel(device, backend, is_causal):
    with torch.profiler.profile() as profile:
        assert_as_on_the_cpu(
            attention(backend, is_causal=is_causal), *qkv(), device=device, rtol=3e-2, atol=3e-2, check_dtype=False
        )
    assert f"aten::{BACKENDS[backend]}" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend is not SDPBackend.MATH])
def test_backwards_drops_what_forwards_dropped(device, backend):
    query, key = (torch.randn(1, 2, 16, 16, dtype=torch.float16, device=device) for _ in range(2))
    value = torch.eye(16, dtype=torch.float16, device=device).expand(1, 2, 16, 16).contiguous().requires_grad_()
    with sdpa_kernel(backend):
        weights = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    slope = torch.randn_like(weights)
    weights.backward(slope)
    assert 0.2 < (weights == 0).float().mean() < 0.8
    torch.testing.assert_close(value.grad, weights.detach().transpose(-2, -1) @ slope, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_of_nested_tensors(device, dtype):
    lengths = (3, 7, 1)
    rows = [torch.randn(length, 4, 8).requires_grad_() for length in lengths]

    def attend(*rows):
        nested = torch.nested.as_nested_tensor(
            [row.to(dtype) if row.is_cuda else row for row in rows], layout=torch.jagged
        )
        heads = nested.transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).values()

    off = 2e-2 if dtype is torch.float16 else 1e-4
    assert_as_on_the_cpu(attend, *rows, device=device, rtol=off, atol=off, check_dtype=False)


# ---- layers of cuDNN and norms


def test_the_parts_of_synchronised_batch_norm(device):
    """As `torch.nn.SyncBatchNorm` puts them together, here of two processes' inputs."""
    parts = [torch.randn(4, 5, 3, device=device), torch.randn(2, 5, 3, device=device)]
    whole = torch.cat(parts).requires_grad_()
    layer = nn.BatchNorm1d(5).to(device)
    with torch.no_grad():
        layer.weight.uniform_()
    expected = layer(whole)
    slope = torch.randn_like(expected)
    expected.backward(slope)

    stats = [torch.batch_norm_stats(part, 1e-5) for part in parts]
    counts = torch.tensor([12.0, 6.0], device=device)
    running = torch.zeros(5, device=device), torch.ones(5, device=device)
    means, invstds = (torch.stack(column) for column in zip(*stats, strict=True))
    mean, invstd = torch.batch_norm_gather_stats_with_counts(parts[0], means, invstds, *running, 0.1, 1e-5, counts)
    torch.testing.assert_close(running, (layer.running_mean, layer.running_var))
    found = [torch.batch_norm_elemt(part, layer.weight, layer.bias, mean, invstd, 1e-5) for part in parts]
    torch.testing.assert_close(torch.cat(found), expected)

    slopes = slope.split([4, 2])
    sums = [
        torch.batch_norm_backward_reduce(grad, part, mean, invstd, layer.weight, True, True, True)
        for grad, part in zip(slopes, parts, strict=True)
    ]
    sum_dy, sum_dy_xmu, weight_grad, bias_grad = (sum(column) for column in zip(*sums, strict=True))
    torch.testing.assert_close((weight_grad, bias_grad), (layer.weight.grad, layer.bias.grad))
    grads = [
        torch.batch_norm_backward_elemt(grad, part, mean, invstd, layer.weight, sum_dy, sum_dy_xmu, counts.int())
        for grad, part in zip(slopes, parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(grads), whole.grad)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_with_channels_last(device, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(4, 6, 3, stride=2, groups=2).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    assert_as_on_the_cpu(nn.Module.__call__, layer, x, device=device, rtol=1e-4, atol=1e-4)
    assert layer.to(device)(x.to(device)).is_contiguous(memory_format=torch.channels_last)


# ---- products, amp


@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_products_into_a_wider_dtype(device, name):
    shape = (3, 4, 4) if name == "bmm" else (4, 4)
    left, right = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    found = getattr(torch, name)(left, right, out_dtype=torch.float32)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, left.float() @ right.float())


def test_dropout_in_one_kernel(device):
    x = torch.randn(1000, device=device)
    kept, mask = torch._fused_dropout(x, 0.25)
    assert 0.15 < mask.float().mean() < 0.35
    torch.testing.assert_close(kept, x * mask * 4)
    torch.testing.assert_close(torch._masked_scale(x, mask, 4.0), kept)


@pytest.mark.parametrize("write", [torch._foreach_copy_, torch._foreach_mul_], ids=["copy", "multiply"])
def test_a_write_to_a_list_is_seen_by_autograd(device, write):
    """No kernel of autograd's counts it, so the kernel itself does."""
    written, read = ([torch.ones(3, device=device) for _ in range(2)] for _ in range(2))
    write(written, read)
    assert [tensor._version for tensor in written + read] == [1, 1, 0, 0]


# ---- layouts and libraries


def test_what_is_not_computed_names_itself(device):
    if not is_stand_in():
        pytest.skip("a GPU computes every kernel")
    with pytest.raises(RuntimeError, match=r"does not compute aten::_convert_weight_to_int4pack"):
        torch._convert_weight_to_int4pack(torch.zeros(64, 64, dtype=torch.uint8, device=device), 2)
