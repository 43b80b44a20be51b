"""Tensors on a simulated device: files, indices, copies, sparse ones, and which may meet in one operator."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from like_the_cpu import DEVICE, OTHER, made, numbers

pytestmark = [pytest.mark.devices("sim"), pytest.mark.filterwarnings("ignore:Sparse")]


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
    "cat": lambda a, b: torch.cat([a, b]),
    "foreach": lambda a, b: torch._foreach_add([a, a], [b, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "linear": nn.functional.linear,
    "convolution": lambda a, b: nn.functional.conv1d(a[None], b[None]),
    "out": lambda a, b: torch.add(a, 1, out=b),
    "attention": lambda a, b: nn.functional.scaled_dot_product_attention(a[None], b[None], a[None]),
    "index_select": lambda a, b: torch.index_select(a, 0, b.long()[0]),
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


def test_printing_names_the_device() -> None:
    x = torch.arange(3.0, device=DEVICE)
    assert "[0., 1., 2.], device='sim:1', requires_grad=True" in repr(nn.Parameter(x))
    assert f"{x[1]:.1f}" == "1.0"


WRITTEN_OR_INDEXED = {
    "indexed on the CPU": lambda x, i: torch.arange(5)[i],
    "written on the CPU": lambda x, i: torch.arange(5.0).index_put_((i,), x),
    "values on the CPU": lambda x, i: x.index_put_((i,), torch.ones(2)),
    "number written on the CPU": lambda x, i: torch.zeros(()).add_(x[0]),
    "out on the CPU": lambda x, i: torch.sum(x, dim=0, out=torch.zeros(())),
}


@pytest.mark.parametrize("name", WRITTEN_OR_INDEXED)
def test_what_is_written_or_indexed_is_on_the_device(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        WRITTEN_OR_INDEXED[name](torch.ones(2, device=DEVICE), torch.tensor([0, 1], device=DEVICE))


INDICES = torch.tensor([[0, 2, 0, 1], [1, 0, 1, 2]])


def coo(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDICES.to(values.device), values, (3, 4))


def test_sparse_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(coo(numbers(4).to(DEVICE)), coo(numbers(4).to(OTHER)))
    with pytest.raises(RuntimeError, match="same device"):
        torch.sparse.mm(coo(numbers(4).to(DEVICE)), numbers(4, 2))
