"""torch's optimizers, clipping and gradient scaling on parameters over machines: the same as on one device."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Shard, ShardedTensor
from fake_machines import FakeOver, on_fake_machines, owners_of
from sharded_parameters import (
    FUSED,
    OF_WHOLE_MATRICES,
    OPTIMIZERS,
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

pytestmark = [pytest.mark.slots(4), pytest.mark.usefixtures("one_intra_op_thread")]


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [full(parameter.grad) for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("machines", [2, 4])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_one_device_and_send_nothing(
    slots: list, root: torch.device, name: str, foreach: bool | None, machines: int
) -> None:
    whole = whole_parameters(root)
    expected = trained(whole, OPTIMIZERS[name](whole, foreach=foreach))

    def steps(over: FakeOver) -> None:
        parameters = divided(whole_parameters(), owners_of(slots, over))
        optimizer = OPTIMIZERS[name](parameters, foreach=foreach)
        got = trained(parameters, optimizer)
        assert {*over.machines.calls} == {"objects"}  # of the comparison
        assert_same(got, expected, 0)
        assert_state_is_divided(parameters, optimizer)

    on_fake_machines(steps, machines)


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_equal_one_device(slots: list, root: torch.device, name: str) -> None:
    if root.type == "sim":
        pytest.skip("sim has no fused optimizers")
    whole = whole_parameters(root)
    expected = trained(whole, OPTIMIZERS[name](whole, fused=True))

    def steps(over: FakeOver) -> None:
        parameters = divided(whole_parameters(), owners_of(slots, over))
        optimizer = OPTIMIZERS[name](parameters, fused=True)
        assert_same(trained(parameters, optimizer), expected)
        assert_state_is_divided(parameters, optimizer)

    on_fake_machines(steps)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.0, float("inf")])
def test_clipping_by_norm_equals_one_device(
    slots: list, root: torch.device, order: float, foreach: bool | None
) -> None:
    whole = whole_parameters(root)
    set_gradients(whole, 0)
    total = nn.utils.get_total_norm([p.grad for p in whole if p.grad is not None], order, foreach=foreach)
    norm = nn.utils.clip_grad_norm_(whole, 0.1, order, foreach=foreach)

    def clip(over: FakeOver) -> Tensor:
        parameters = divided(whole_parameters(), owners_of(slots, over))
        set_gradients(parameters, 0)
        given = [p.grad for p in parameters if p.grad is not None]
        assert_same([nn.utils.get_total_norm(given, order, foreach=foreach)], [total])
        got = nn.utils.clip_grad_norm_(parameters, 0.1, order, foreach=foreach)
        assert type(got) is Tensor
        assert_same([got], [norm])
        assert_same(gradients_of(parameters), [p.grad for p in whole])  # type: ignore[misc]
        return got.cpu()

    first, second = on_fake_machines(clip)
    assert torch.equal(first, second)


def test_clipping_has_the_bits_of_as_many_owners_on_one_machine(slots: list) -> None:
    parameters = divided(whole_parameters(), slots)
    set_gradients(parameters, 0)
    expected = nn.utils.clip_grad_norm_(parameters, 0.1)

    def clip(over: FakeOver) -> None:
        over_machines = divided(whole_parameters(), owners_of(slots, over))
        set_gradients(over_machines, 0)
        assert torch.equal(nn.utils.clip_grad_norm_(over_machines, 0.1).cpu(), expected.cpu())

    on_fake_machines(clip)


def test_clipping_a_list_sends_one_message(slots: list) -> None:
    def clip(over: FakeOver) -> None:
        parameters = divided(whole_parameters(), owners_of(slots, over))
        set_gradients(parameters, 0)
        nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True)
        assert len(over.machines.calls) == 1

    on_fake_machines(clip)


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


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_by_value_equals_one_device(slots: list, root: torch.device, foreach: bool | None) -> None:
    whole = whole_parameters(root)
    set_gradients(whole, 0)
    nn.utils.clip_grad_value_(whole, 0.5, foreach=foreach)

    def clip(over: FakeOver) -> None:
        parameters = divided(whole_parameters(), owners_of(slots, over))
        set_gradients(parameters, 0)
        nn.utils.clip_grad_value_(parameters, 0.5, foreach=foreach)
        assert_same(gradients_of(parameters), [p.grad for p in whole], 0)  # type: ignore[misc]

    on_fake_machines(clip)


def scaled_steps(parameters: list[nn.Parameter], optimizer: Any, root: torch.device, where: int) -> float:
    """Steps of which one has an infinity in this row. Returns the scale afterwards."""
    scaler = torch.amp.GradScaler(root.type, init_scale=4.0, growth_interval=2)
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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", [0, 7])
def test_gradient_scaling_skips_a_step_with_an_infinity_on_one_machine(
    slots: list, root: torch.device, where: int, fused: bool
) -> None:
    """In the first row, on the first machine; in the last, on the last one."""
    if fused and root.type == "sim":
        pytest.skip("sim has no fused optimizers")
    whole = whole_parameters(root)
    scale = scaled_steps(whole, torch.optim.AdamW(whole, lr=0.1, fused=fused), root, where)

    def steps(over: FakeOver) -> None:
        owners = owners_of(slots, over)
        parameters = divided(whole_parameters(), owners)
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        assert scaled_steps(parameters, optimizer, owners[0], where) == scale
        assert_same([full(parameter) for parameter in parameters], whole)

    on_fake_machines(steps)


def test_one_optimizer_steps_parameters_of_all_kinds(slots: list, root: torch.device) -> None:
    """Some over machines, some over the devices of each machine, some on one device."""
    whole = whole_parameters(root)
    expected = trained(whole, torch.optim.AdamW(whole, lr=0.1, foreach=True))

    def steps(over: FakeOver) -> None:
        owners = owners_of(slots, over)
        plain = whole_parameters(owners[0])
        kinds = plain, divided(plain, tuple(owners)), divided(plain, owners)
        mixed = [kinds[i % 3][i] for i in range(len(plain))]
        assert_same(trained(mixed, torch.optim.AdamW(mixed, lr=0.1, foreach=True)), expected)

    on_fake_machines(steps)


@pytest.mark.parametrize(
    "make", [torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS], ids=lambda o: o.__name__
)
def test_other_optimizers_are_right_or_refused(slots: list, root: torch.device, make: Any) -> None:
    def steps(these: list[nn.Parameter]) -> list[Tensor]:
        optimizer = make(these)
        for step in range(STEPS):
            set_gradients(these, step)
            optimizer.step(*([lambda: 1.0] if make is torch.optim.LBFGS else []))
        return [full(parameter) for parameter in these]

    def on_machine(over: FakeOver) -> None:
        try:
            got = steps(divided(whole_parameters(), owners_of(slots, over)))
        except TypeError as error:
            assert "full_tensor()" in str(error)  # noqa: PT017
        else:
            assert_same(got, steps(whole_parameters(root)))

    on_fake_machines(on_machine)


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("name", OF_WHOLE_MATRICES)
def test_those_that_need_whole_matrices_equal_one_device(slots: list, root: torch.device, name: str) -> None:
    expected = trained_by_closure(whole_parameters(root), name)

    def steps(over: FakeOver) -> None:
        parameters = divided(whole_parameters(), owners_of(slots, over))
        assert_same(trained_by_closure(parameters, name), expected, 1e-9)

    on_fake_machines(steps)


@pytest.mark.parametrize("foreach", [False, True])
def test_state_that_is_loaded_whole_is_divided(slots: list, root: torch.device, foreach: bool) -> None:
    whole = whole_parameters(root)
    optimizer = torch.optim.AdamW(whole, lr=0.1, foreach=foreach)
    trained(whole, optimizer)
    saved, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in whole]
    expected = trained(whole, optimizer)

    def steps(over: FakeOver) -> None:
        parameters = divided(values, owners_of(slots, over))
        resumed = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)
        resumed.load_state_dict(copy.deepcopy(saved))  # machines share no memory
        assert_same(trained(parameters, resumed), expected)
        assert_state_is_divided(parameters, resumed)

    on_fake_machines(steps)
