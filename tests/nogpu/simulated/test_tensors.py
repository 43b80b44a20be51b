"""Tensors on a simulated device: storages, views, copies, files, indexing, and which may meet in one operator."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from like_the_cpu import DEVICE, OTHER, assert_as_on_the_cpu, made, numbers

pytestmark = pytest.mark.devices("sim")


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("source", ["cpu", DEVICE], ids=str)
@pytest.mark.parametrize("target", ["cpu", DEVICE, OTHER], ids=str)
def test_what_was_saved_is_loaded_where_it_should_be(source: Any, target: Any) -> None:
    state = made(nn.Linear, 3, 2).to(source).state_dict()
    loaded = torch.load(saved(state), map_location=target)
    for name, value in state.items():
        assert loaded[name].device == torch.device(target)
        assert torch.equal(loaded[name].cpu(), value.cpu())
    assert torch.load(saved(state), map_location={str(source): str(target)})["bias"].device == torch.device(target)


def test_what_was_saved_goes_back_to_its_device() -> None:
    base = numbers(4).to(DEVICE)
    both = torch.load(saved({"base": base, "view": base[1:], "sparse": base.diag().to_sparse()}))
    assert all(value.device == DEVICE for value in both.values())
    both["base"].zero_()
    assert not both["view"].any(), "views that were saved together share their memory"
    module = torch.load(saved(made(nn.Linear, 3, 2).to(DEVICE)), weights_only=False)
    assert module.weight.device == DEVICE


def test_deep_copies_are_on_the_same_device_and_share_nothing() -> None:
    module = made(nn.Linear, 3, 2).to(DEVICE)
    base = numbers(4).to(DEVICE)
    again, pair = copy.deepcopy(module), copy.deepcopy([base, base[1:]])
    assert again.weight.device == pair[0].device == DEVICE
    assert again.weight.data_ptr() != module.weight.data_ptr()
    assert pair[0].untyped_storage().data_ptr() == pair[1].untyped_storage().data_ptr()
    pair[0].zero_()
    assert torch.equal(base.cpu(), numbers(4))


def test_storages() -> None:
    x = numbers(4).to(DEVICE)
    storage = x.untyped_storage()
    assert (storage.device, storage.nbytes()) == (DEVICE, 32)
    assert storage.cpu().tolist() == numbers(4).untyped_storage().tolist()
    assert storage.clone().device == DEVICE
    before = torch.sim.memory_allocated(DEVICE)
    storage.resize_(64)
    assert torch.sim.memory_allocated(DEVICE) == before + 32
    assert torch.equal(x.cpu(), numbers(4)), "what was there stays there"
    storage.resize_(0)
    assert torch.sim.memory_allocated(DEVICE) == before - 32
    storage.resize_(32)
    assert torch.equal(x.fill_(1).cpu(), torch.ones(4, dtype=torch.float64))
    other = numbers(4, seed=1).untyped_storage()
    storage.copy_(other)
    assert torch.equal(x.cpu(), numbers(4, seed=1))


def test_tensors_change_their_storage() -> None:
    x, y = numbers(4).to(DEVICE), numbers(2, 3, seed=1).to(DEVICE)
    x.set_(y.untyped_storage(), 1, (2, 2), (3, 1))
    assert torch.equal(x.cpu(), numbers(2, 3, seed=1)[:, 1:])
    x.zero_()
    assert not y[:, 1:].any()
    y.data = numbers(5).to(DEVICE)
    assert torch.equal(y.cpu(), numbers(5))
    x.set_(y)
    assert x.data_ptr() == y.data_ptr()
    x.set_()
    assert x.shape == (0,)
    x.resize_(3, 2).copy_(numbers(3, 2))
    assert torch.equal(x.cpu(), numbers(3, 2))
    x.resize_(1, 2)
    assert torch.equal(x.cpu(), numbers(3, 2)[:1])


def test_views_share_memory_and_gradients() -> None:
    def through_views(x: Tensor) -> list[Tensor]:
        y = x * 2
        y[0].mul_(3)
        y.t()[1].add_(x[:, 0])
        y.view(-1)[::2].zero_()
        y.unfold(1, 2, 1).diagonal(dim1=0, dim2=1).sin_()
        y.as_strided((2,), (1,), 3).exp_()
        return [y, *y.unbind(1), *y.split(1), y.expand(2, 3, 3), y.movedim(0, 1), y.narrow(1, 0, 2).contiguous()]

    assert_as_on_the_cpu(through_views, numbers(3, 3).requires_grad_())


def test_results_go_to_the_tensor_that_is_given_for_them() -> None:
    def into(x: Tensor) -> list[Tensor]:
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        alias = empty.view(0)
        torch.add(x, 1, out=empty)
        exact = torch.empty(3, 3, dtype=x.dtype, device=x.device)
        torch.mm(x, x, out=exact.t())
        values, indices = x.new_empty(0), torch.empty(0, dtype=torch.int64, device=x.device)
        torch.max(x, 1, out=(values, indices))
        assert values.shape == indices.shape == (3,)
        torch.cat([x, x], out=alias)
        return [exact, values, indices, alias]

    assert_as_on_the_cpu(into, numbers(3, 3))
    out = torch.empty(0, dtype=torch.float64, device=DEVICE)
    before = torch.sim.memory_allocated(DEVICE)
    torch.add(numbers(3).to(DEVICE), 1, out=out)
    assert torch.sim.memory_allocated(DEVICE) == before + 24


def test_indexing() -> None:
    def index(x: Tensor, values: Tensor) -> list[Tensor]:
        rows, mask = torch.tensor([2, 0, 2], device=x.device), x > 0
        y = x.clone()
        y[rows, 1] = values
        y[mask] = 0.5
        y = y.index_put((rows,), values.unsqueeze(1), accumulate=True)
        y.index_add_(0, rows, x)
        y.scatter_add_(0, rows.unsqueeze(1).expand(3, 3), x)
        return [x[rows], x[mask], x[mask.nonzero(as_tuple=True)], y, x.gather(1, rows.unsqueeze(1)), x[..., None, -1]]

    assert_as_on_the_cpu(index, numbers(3, 3).requires_grad_(), numbers(3, seed=1).requires_grad_())


def test_indices_may_be_on_the_cpu() -> None:
    x = numbers(3, 3).to(DEVICE)
    rows, mask = torch.tensor([2, 0]), numbers(3, 3) > 0
    assert torch.equal(x[rows].cpu(), numbers(3, 3)[rows])
    assert torch.equal(x[mask].cpu(), numbers(3, 3)[mask])
    x[rows] = 0
    x[torch.tensor([1])] += 1
    expected = numbers(3, 3)
    expected[rows] = 0
    expected[1] += 1
    assert torch.equal(x.cpu(), expected)


MIXTURES = {
    "add": lambda a, b: a + b,
    "in place": lambda a, b: a.add_(b),
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "foreach": lambda a, b: torch._foreach_add([a, a], [b, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "linear": nn.functional.linear,
    "convolution": lambda a, b: nn.functional.conv1d(a[None], b[None]),
    "out": lambda a, b: torch.add(a, 1, out=b),
    "attention": lambda a, b: nn.functional.scaled_dot_product_attention(a[None], b[None], a[None]),
    "index_select": lambda a, b: torch.index_select(a, 0, b.long()[0]),
    "lerp": lambda a, b: torch.lerp(a, a, b),
}


@pytest.mark.parametrize("other", [OTHER, "cpu"], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_tensors_of_two_devices_do_not_mix(name: str, other: torch.device | str) -> None:
    here, there = torch.ones(2, 2, device=DEVICE), torch.ones(2, 2, device=other)
    for a, b in ((here, there), (there, here)):
        with pytest.raises(RuntimeError, match=r"same device|should be the same"):
            MIXTURES[name](a, b)


def test_numbers_on_the_cpu_mix_with_every_device() -> None:
    x, number = torch.ones(2, device=DEVICE), torch.tensor(2.0)
    assert (x * number).tolist() == (number * x).tolist() == [2, 2]
    assert torch.where(x > 0, x, number).tolist() == [1, 1]
    assert torch._foreach_mul([x, x], number)[1].tolist() == [2, 2]
    x[0] = number
    assert x.add_(number).tolist() == [4, 3]
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.tensor(2.0, device=OTHER)


def test_copies_between_devices_keep_numbers_and_layout() -> None:
    x = numbers(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for there in (x.to(DEVICE), x.to(DEVICE).to(OTHER), x.pin_memory().to(OTHER, non_blocking=True)):
        assert there.stride() == x.stride()
        assert torch.equal(there.cpu(), x)
    assert x.to(DEVICE)[:, ::2].to(OTHER, torch.float32).dtype == torch.float32
    assert torch.equal(torch.empty(2, 4, 4, dtype=torch.float64).copy_(x.to(DEVICE)[:, 1]), x[:, 1])
    assert x.to("sim").device == torch.device("sim", torch.sim.current_device())


def test_host_memory_is_pinned_for_it() -> None:
    pinned = numbers(3).pin_memory()
    assert pinned.is_pinned()
    assert not numbers(3).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device=DEVICE, pin_memory=True)


def test_printing_names_the_device() -> None:
    x = torch.arange(3.0, device=DEVICE)
    assert repr(x) == "tensor([0., 1., 2.], device='sim:1')"
    assert "device='sim:1', requires_grad=True" in repr(nn.Parameter(x))
    assert f"{x[1]:.1f}" == "1.0"
    assert (x[2].item(), int(x[1]), bool(x[0]), x.tolist(), len(x)) == (2.0, 1, False, [0.0, 1.0, 2.0], 3)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype: torch.dtype) -> None:
    def use(x: Tensor) -> list[Tensor]:
        pairs = torch.view_as_real(x)
        again = torch.view_as_complex(pairs * 2)
        y = x.conj()
        z = x.clone()
        z.conj().mul_(2j)
        return [y @ x.mT, again, x.real * 2, x.imag.contiguous(), y.imag.clone(), x.abs(), z, y.resolve_conj()]

    assert_as_on_the_cpu(use, numbers(3, 3, dtype=dtype).requires_grad_())
    there = numbers(3, dtype=dtype).to(DEVICE)
    assert torch.equal(there.conj().cpu(), numbers(3, dtype=dtype).conj())
    assert torch.equal(there.conj().imag.to(OTHER).cpu(), numbers(3, dtype=dtype).conj().imag)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_small_dtypes(dtype: torch.dtype) -> None:
    x = numbers(3, 3).to(dtype)
    assert torch.equal(x.to(DEVICE).cpu().double(), x.double())
    assert torch.equal(x.to(DEVICE).float().cpu(), x.float())
    if dtype in (torch.float16, torch.bfloat16):
        assert_as_on_the_cpu(lambda x: [x @ x, x.softmax(0), nn.functional.layer_norm(x, (3,))], x.requires_grad_())


def test_uninitialised_modules_become_real_on_a_device() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    module.to_empty(device=DEVICE)
    assert module.weight.device == DEVICE
    module.reset_parameters()
    assert module(torch.ones(1, 3, device=DEVICE)).isfinite().all()


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x, i: torch.arange(5)[i],
        lambda x, i: torch.arange(5.0).index_put_((i,), x),
        lambda x, i: x.index_put_((i,), torch.ones(2)),
        lambda x, i: torch.zeros(()).add_(x[0]),
        lambda x, i: torch.sum(x, dim=0, out=torch.zeros(())),
    ],
    ids=[
        "indexed on the CPU",
        "written on the CPU",
        "values on the CPU",
        "number written on the CPU",
        "out on the CPU",
    ],
)
def test_what_is_written_or_indexed_is_on_the_device(mixed):
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        mixed(torch.ones(2, device=DEVICE), torch.tensor([0, 1], device=DEVICE))


def test_a_resize_to_the_same_shape_changes_nothing():
    tensor = torch.arange(6.0, device=DEVICE).view(2, 3).t()
    assert tensor.resize_(3, 2).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("place", [(-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2,), (1, 1))])
def test_a_place_outside_of_the_storage_is_refused(place):
    tensor = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError):
        tensor.set_(tensor.untyped_storage(), *place)
    assert tensor.tolist() == [1, 1, 1]


def test_a_tensor_stays_on_its_device_when_it_is_set():
    with pytest.raises(RuntimeError, match="different device"):
        torch.ones(3, device=DEVICE).set_(torch.ones(3, device=OTHER))
