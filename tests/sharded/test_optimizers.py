"""torch's optimizers, their state, clipping and gradient scaling on sharded parameters: the same as on one device."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Shard, ShardedTensor
from dataparallel.sharded.placements import over_of
from dataparallel.testing.steps import assert_equal
from fake_machines import FakeOver, on_fake_machines, owners_of
from sharded_parameters import (
    FUSED,
    OF_WHOLE_MATRICES,
    OPTIMIZERS,
    SHAPES,
    STEPS,
    assert_same,
    assert_state_is_divided,
    divided,
    gradients,
    set_gradients,
    trained,
    trained_by_closure,
    whole_parameters,
)
from sharding import full, sharded

pytestmark = pytest.mark.slots(4)

OnOwners = Callable[[Callable[[Any], Any]], list[Any]]


FUSED_OPTIMIZERS = pytest.mark.devices("cpu", "cuda")  # sim has none


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [full(parameter.grad) for parameter in parameters if parameter.grad is not None]


@pytest.mark.slots(4, long=[2, 8])
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, {"foreach": foreach}) for name in OPTIMIZERS for foreach in (None, False, True)]
    + [pytest.param(name, {"fused": True}, marks=FUSED_OPTIMIZERS) for name in FUSED],
    ids=str,
)
def test_steps_equal_one_device_and_send_nothing(
    on_owners: OnOwners, root: torch.device, name: str, how: dict[str, Any]
) -> None:
    whole = whole_parameters(root)
    try:
        expected = trained(whole, OPTIMIZERS[name](whole, **how))
    except RuntimeError as error:
        if "supported devices" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} has no fused {name} for {root.type}")

    def steps(owners: Any) -> None:
        parameters = divided(whole_parameters(), owners)
        optimizer = OPTIMIZERS[name](parameters, **how)
        got = trained(parameters, optimizer)
        if (over := over_of(owners)) is not None:
            assert {*over.machines.calls} == {"objects"}  # type: ignore[attr-defined]  # of the comparison
        assert_same(got, expected, 1e-12 if "fused" in how else 0)
        assert_state_is_divided(parameters, optimizer)

    on_owners(steps)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Rprop"])
def test_steps_of_complex_parameters_equal_one_device_and_gather_nothing(slots: list, name: str, foreach: bool) -> None:
    torch.manual_seed(0)
    value, gradient = torch.randn(2, 7, 3, dtype=torch.complex128)
    parameters = [nn.Parameter(value.to(slots[0])), nn.Parameter(sharded(value, slots))]
    for parameter, divide in zip(parameters, (lambda x: x.to(slots[0]), lambda x: sharded(x, slots)), strict=True):
        optimizer = (OPTIMIZERS | OF_WHOLE_MATRICES)[name]([parameter], foreach=foreach)
        for step in range(STEPS):
            parameter.grad = divide(gradient * (step - 2))
            optimizer.step()
    assert_same([full(parameters[1])], parameters[:1])


@pytest.mark.parametrize("foreach", [False, True])
def test_one_optimizer_steps_parameters_of_all_kinds(on_owners: OnOwners, root: torch.device, foreach: bool) -> None:
    """Some over all owners, some over two devices of this machine, some on one device."""
    whole = whole_parameters(root)
    expected = trained(whole, torch.optim.AdamW(whole, lr=0.1, foreach=foreach))

    def steps(owners: Any) -> None:
        plain = whole_parameters(owners[0])
        kinds = plain, divided(plain, owners), divided(plain, owners[:2])  # a slice is of this machine
        mixed = [kinds[i % 3][i] for i in range(len(plain))]
        assert_same(trained(mixed, torch.optim.AdamW(mixed, lr=0.1, foreach=foreach)), expected)

    on_owners(steps)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.0, float("inf")])
def test_clipping_by_norm_equals_one_device(
    on_owners: OnOwners, root: torch.device, order: float, foreach: bool | None
) -> None:
    whole = whole_parameters(root)
    set_gradients(whole, 0)
    total = nn.utils.get_total_norm([p.grad for p in whole if p.grad is not None], order, foreach=foreach)
    norm = nn.utils.clip_grad_norm_(whole, 0.1, order, foreach=foreach)

    def clip(owners: Any) -> Tensor:
        parameters = divided(whole_parameters(), owners)
        set_gradients(parameters, 0)
        given = [p.grad for p in parameters if p.grad is not None]
        assert_same([nn.utils.get_total_norm(given, order, foreach=foreach)], [total])
        over = over_of(owners)
        before = 0 if over is None else len(over.machines.calls)  # type: ignore[attr-defined]
        got = nn.utils.clip_grad_norm_(parameters, 0.1, order, foreach=foreach)
        if over is not None and foreach is not False:
            assert len(over.machines.calls) == before + 1, "one message"  # type: ignore[attr-defined]
        assert type(got) is Tensor
        assert got.device == torch.device(owners[0])
        assert_same([got], [norm])
        assert_same(gradients_of(parameters), [p.grad for p in whole])  # type: ignore[misc]
        return got.cpu()

    first, *others = on_owners(clip)
    assert all(torch.equal(first, other) for other in others)


def test_a_norm_that_is_not_finite_is_an_error_on_every_machine(slots: list) -> None:
    """The gradient is wrong on the last machine only."""

    def clip(over: FakeOver) -> str:
        parameters = divided(whole_parameters(), owners_of(slots, over))
        set_gradients(parameters, 0)
        gradient = gradients(0)[0]
        gradient[7, 1] = float("nan")
        parameters[0].grad = sharded(gradient, owners_of(slots, over))
        with pytest.raises(RuntimeError, match="non-finite") as raised:
            nn.utils.clip_grad_norm_(parameters, 0.1, error_if_nonfinite=True)
        return str(raised.value)

    first, second = on_fake_machines(clip)
    assert first == second


def scaled_steps(parameters: list[nn.Parameter], optimizer: Any, root: Any, where: int) -> float:
    """Steps of which one has an infinity in this row. Returns the scale afterwards."""
    scaler = torch.amp.GradScaler(torch.device(root).type, init_scale=4.0, growth_interval=2)
    for step in range(STEPS):
        scaler.scale(torch.zeros((), device=root))
        set_gradients(parameters, step)
        if step == 2:
            gradient, first = gradients(step)[0], parameters[0]
            gradient[where, 1] = float("inf")
            is_divided = isinstance(first, ShardedTensor)
            first.grad = sharded(gradient, first.devices, Shard(0)) if is_divided else gradient.to(root)  # type: ignore[attr-defined]
        scaler.step(optimizer)
        scaler.update()
    return float(scaler.get_scale())


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=FUSED_OPTIMIZERS)])
@pytest.mark.parametrize("where", [0, 7])
def test_gradient_scaling_skips_a_step_with_an_infinity(
    on_owners: OnOwners, root: torch.device, where: int, fused: bool
) -> None:
    """In the first row, on the first owner; in the last, on the last one, of the last machine."""
    whole = whole_parameters(root)
    scale = scaled_steps(whole, torch.optim.AdamW(whole, lr=0.1, fused=fused), root, where)

    def steps(owners: Any) -> None:
        parameters = divided(whole_parameters(), owners)
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        assert scaled_steps(parameters, optimizer, owners[0], where) == scale
        assert_same([full(parameter) for parameter in parameters], whole)

    on_owners(steps)


# ---- optimizers that need whole matrices -----------------------------------------------------------------------------


@pytest.mark.slots(4, long=[2, 8])
@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("name", OF_WHOLE_MATRICES)
def test_those_that_need_whole_matrices_equal_one_device(on_owners: OnOwners, root: torch.device, name: str) -> None:
    expected = trained_by_closure(whole_parameters(root), name)

    def steps(owners: Any) -> None:
        parameters = divided(whole_parameters(), owners)
        assert_same(trained_by_closure(parameters, name), expected, 1e-9)
        assert all(isinstance(parameter, ShardedTensor) for parameter in parameters)

    on_owners(steps)


@pytest.mark.parametrize("name", ["Adafactor", "Adafactor, foreach", "Muon", "LBFGS"])
def test_without_gathers_they_are_refused(on_owners: OnOwners, name: str) -> None:
    def steps(owners: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
            trained_by_closure(divided(whole_parameters(), owners), name)

    on_owners(steps)


# ---- state that one device has saved ---------------------------------------------------------------------------------

NAMES = ["momentum", "amsgrad", "Adagrad", "centered", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD"]


def run_steps(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy, as from a file: torch's optimizers would share the counters that they load."""
    return copy.deepcopy(optimizer.state_dict())


def on_one_device(name: str, device: Any, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has made two steps."""
    one = OPTIMIZERS[name](whole_parameters(device), **options)
    run_steps(one, range(2))
    one.load_state_dict(saved(one))  # which casts counters
    return one


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of the parameters, on the CPU."""
    return [full(parameter) for parameter in optimizer.param_groups[0]["params"]]


def over_shards(slots: Any, name: str, one: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
    """An optimizer over sharded parameters that have the values of ``one``."""
    return OPTIMIZERS[name](divided(values(one), slots), **options)


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return [
        {name: full(value) if isinstance(value, Tensor) else value for name, value in of_one.items()}
        for of_one in optimizer.state_dict()["state"].values()
    ]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_one_device_is_divided_at_the_first_step(name: str, foreach: bool, on_owners: OnOwners) -> None:
    one = on_one_device(name, "cpu", foreach=foreach)  # torch leaves steps where they are, and machines differ
    loaded, before = saved(one), [value.clone() for value in values(one)]
    run_steps(one, range(2, 5))

    def resume(owners: Any) -> None:
        several = OPTIMIZERS[name](divided(before, owners), foreach=foreach)
        several.load_state_dict(copy.deepcopy(loaded))  # machines share no memory
        run_steps(several, range(2, 5))
        assert_equal(values(several), values(one), "parameters", atol=1e-12)
        assert_equal(state_of(several), state_of(one), "state", atol=1e-12)

    on_owners(resume)


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "NAdam"])
def test_later_loads_are_divided_at_once(name: str, slots: list) -> None:
    one = on_one_device(name, slots[0])
    several = over_shards(slots, name, one)
    run_steps(several, range(1))
    with torch.no_grad():
        for parameter, value in zip(several.param_groups[0]["params"], values(one), strict=True):
            parameter.copy_(value)
    several.load_state_dict(saved(one))
    alike = [
        value.devices == parameter.devices and value.placement == parameter.placement
        for parameter, of_one in several.state.items()
        for value in of_one.values()
        if isinstance(value, ShardedTensor)
    ]
    assert all(alike)
    assert len(alike) == len(SHAPES) * {"momentum": 1, "amsgrad": 3, "NAdam": 2}[name]
    for optimizer in (several, one):
        run_steps(optimizer, range(2, 4))
    assert_equal(values(several), values(one), "parameters", atol=1e-12)


def test_state_with_other_owners_is_divided_anew(make_slots: Callable[[int], list]) -> None:
    """Sharded state that was saved with another number of devices."""
    one = on_one_device("AdamW", make_slots(4)[0])
    several = over_shards(make_slots(4), "AdamW", one)
    several.load_state_dict(saved(one))
    run_steps(several, range(2, 3))
    fewer = over_shards(make_slots(2), "AdamW", several)
    fewer.load_state_dict(saved(several))
    run_steps(one, range(2, 4))
    run_steps(fewer, range(3, 4))
    assert_equal(values(fewer), values(one), "parameters", atol=1e-12)
