"""Operators that need several parts gather them and compute once, as on plain tensors; or they are refused by name."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor, allow_gathers
from dataparallel.sharded.operators import gathered
from sharding import full, sharded

OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "mm": lambda x: x @ x.T,
    "addmm": lambda x: torch.addmm(x @ x.T, x, x.T, beta=2, alpha=3),
    "mv": lambda x: x @ x[0],
    "cat": lambda x: torch.cat([x, x[1:3]]),
    "sum": lambda x: x.sum(0),
    "norm": lambda x: torch.norm(x, dim=0, keepdim=True),
    "max": lambda x: x.max(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0, descending=True),
    "softmax": lambda x: x.softmax(0),
    "svd": lambda x: torch.linalg.svdvals(x),
    "index": lambda x: x[torch.tensor([3, 0, 6], device=x.device)],
    "rows and rows": lambda x: x[0:3] + x[4:7],
    "broadcast": lambda x: x + x.sum(1)[:, None],
    "diagonal": lambda x: x.diagonal() * 2,
    "a view of columns": lambda x: x.T.reshape(-1) + 1,
    "dot": lambda x: torch.dot(x.view(-1), x.view(-1)),
    "out of a plain one": lambda x: x + torch.ones(2, 7, 4, dtype=x.dtype, device=x.device),
}
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "index_put_": lambda x: x.index_put_((torch.tensor([3, 0], device=x.device),), x[1:3].clone()),
    "a mask of rows": lambda x: x.__setitem__(x[:, 0] > 2, -1.0),
    "a mask": lambda x: x.__setitem__(x > 9, -1.0),
    "addmm_": lambda x: x.addmm_(x, x.T @ x),
    "cumsum_": lambda x: x.cumsum_(0),
    "add_ other rows": lambda x: x[0:3].add_(x[4:7]),
    "out=": lambda x: torch.mm(x.clone(), x.T @ x, out=x),
    "_foreach_add_ of other rows": lambda x: torch._foreach_add_([x[0:3], x[3:4]], [x[4:7], x[3:4] * 2]),
}


def values() -> Tensor:
    return torch.arange(28.0, dtype=torch.float64).view(7, 4).sin() * 10


def assert_alike(ours: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        for one, other in zip(ours, expected, strict=True):
            assert_alike(one, other)
    elif expected is not None:
        assert isinstance(ours, ShardedTensor) == (expected.dim() > 0)
        torch.testing.assert_close(full(ours), expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slots(6)
@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_sharded_and_those_of_plain_tensors(on_owners: Any, name: str, placement: Any) -> None:
    """On each machine too."""
    expected = OPERATORS[name](values())
    on_owners(lambda owners: assert_alike(OPERATORS[name](sharded(values(), owners, placement)), expected))


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in ("svd", "sort", "max")])
def test_gradients_are_those_of_plain_tensors(slots: list, name: str) -> None:
    leaves = values().requires_grad_(), sharded(values(), slots).requires_grad_()
    for leaf in leaves:
        OPERATORS[name](leaf).square().sum().backward()
    assert isinstance(leaves[1].grad, ShardedTensor)
    assert_alike(leaves[1].grad, leaves[0].grad)


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_they_write_to_is_divided_again(slots: list, name: str, placement: Any) -> None:
    whole, divided = values(), sharded(values(), slots, placement)
    parts = divided.shards
    for x in (whole, divided):
        IN_PLACE[name](x)
    assert_alike(divided, whole)
    assert all(a is b for a, b in zip(divided.shards, parts, strict=True))


@pytest.mark.usefixtures("gathers")
def test_plain_tensors_are_written_to(slots: list, root: torch.device) -> None:
    plain, other = torch.zeros(7, 4, dtype=torch.float64, device=root), sharded(values(), slots)
    plain += other
    torch.add(other, plain, out=plain)
    torch._foreach_add_([plain, plain], [other, other])
    torch.testing.assert_close(plain.cpu(), 4 * values())


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.native_dropout(x, 0.5, True),
        lambda x: x[1:].bernoulli(),
        lambda x: x.squeeze_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.as_strided((2,), (1,)),
        lambda x: x[1:].t_(),
    ],
)
def test_some_are_refused_all_the_same(slots: list, operator: Callable[[Tensor], Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
        operator(sharded(values(), slots))


def test_one_warning_names_each_operator(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_warned", set())
    monkeypatch.delenv("DATAPARALLEL_GATHERS", raising=False)
    allow_gathers(None)
    x = sharded(values(), slots)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            x.sum(0)
            x.cumsum(0)
    assert [str(each.message).partition(" ")[0] for each in seen] == ["aten.sum.dim_IntList", "aten.cumsum.default"]
    assert {each.filename for each in seen} == {__file__}
    allow_gathers(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.prod(0)


def test_by_default_they_gather_where_no_graph_is_recorded(slots: list) -> None:
    allow_gathers(None)
    x = sharded(values(), slots).requires_grad_()
    with pytest.raises(
        NotImplementedError, match=r"aten\.mm.*full_tensor\(\).*for its gradient call .*allow_gathers\(True\)"
    ):
        x @ values().T
    allow_gathers(True)
    (x @ values().T.to(slots[0])).sum().backward()
    assert_alike(x.grad, values().sum(0).expand(len(values()), -1))
    allow_gathers(None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_alike(x @ x.T, values() @ values().T)


def test_the_environment_makes_them_errors_and_the_call_takes_precedence(
    slots: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = sharded(values(), slots)
    monkeypatch.setenv("DATAPARALLEL_GATHERS", "off")
    allow_gathers(None)
    with pytest.raises(NotImplementedError, match=r"aten\.sum\.dim_IntList.*full_tensor\(\)"):
        x.sum(0)
    allow_gathers(True)
    x.sum(0)


@pytest.mark.usefixtures("gathers")
def test_gathered_tensors_are_freed_without_the_collector(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def noted(tensor: ShardedTensor, *args: Any, of_class: Any = ShardedTensor.full_tensor) -> Tensor:
        full: Tensor = of_class(tensor, *args)
        made.append(weakref.ref(full))
        return full

    monkeypatch.setattr(ShardedTensor, "full_tensor", noted)
    x = sharded(values(), slots)
    gc.disable()
    try:
        torch.cat([x, x[1:3] @ x.T @ x])
        assert len(made) > 2
        assert [each for each in made if each() is not None] == []
    finally:
        gc.enable()


INITIALISERS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "eye_": ((3, 7), nn.init.eye_),
    "dirac_": ((6, 3, 3, 3), lambda x: nn.init.dirac_(x, 2)),
    "sparse_": ((6, 4), lambda x: nn.init.sparse_(x, 0.3)),
    "orthogonal_, fewer rows": ((3, 7), nn.init.orthogonal_),
    "orthogonal_, fewer columns": ((7, 3), lambda x: nn.init.orthogonal_(x, 2.0)),
    "orthogonal_ of more dimensions": ((4, 3, 3, 3), nn.init.orthogonal_),
}


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_that_need_the_whole_equal_one_device(
    slots: list, root: torch.device, name: str, placement: Any
) -> None:
    shape, initialise = INITIALISERS[name]
    found = []
    for x in (torch.zeros(shape, device=root), sharded(torch.zeros(shape), slots, placement)):
        torch.manual_seed(3)
        if root.type != "cpu":
            torch.get_device_module(root).manual_seed_all(3)
        initialise(nn.Parameter(x))
        found.append(full(x).cpu())
    torch.testing.assert_close(found[1], found[0])


def test_a_matrix_is_turned_in_place(slots: list) -> None:
    """A module's parameter keeps its shape: the parts of a unit have places of their own."""
    turned = sharded(values(), slots, Shard(0))
    shards = turned.shards
    assert turned.t_() is turned
    assert torch.equal(full(turned), values().t())
    for shard in shards:
        shard.add_(1)
    assert torch.equal(full(turned), values().t() + 1)
    turned[0].zero_()
    assert not full(turned)[0].any()
    parameter = nn.Parameter(sharded(values(), slots, Shard(0)))
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"t_.default does not work on sharded tensors that are param"),
    ):
        parameter.t_()
    assert torch.equal(full(parameter), values())
