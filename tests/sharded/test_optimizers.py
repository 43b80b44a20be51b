"""torch's optimizers, clipping, gradient scaling and averaging on sharded parameters: the same as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from dataparallel.sharded import Shard, ShardedTensor
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


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_one_device(slots: list, root: torch.device, name: str, foreach: bool | None) -> None:
    whole = whole_parameters(root)
    expected = trained(whole, OPTIMIZERS[name](whole, foreach=foreach))
    parameters = divided(whole_parameters(), slots)
    optimizer = OPTIMIZERS[name](parameters, foreach=foreach)
    assert_same(trained(parameters, optimizer), expected, 0)
    assert_state_is_divided(parameters, optimizer)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.devices("sim", "cuda")
def test_by_default_operators_work_on_lists(slots: list) -> None:
    parameters = divided(whole_parameters(), slots)
    optimizer = torch.optim.AdamW(parameters)
    set_gradients(parameters, 0)
    with Operators() as operators:
        optimizer.step()
    assert operators.names.count("_foreach_addcdiv_") == 1
    assert "addcdiv_" not in operators.names


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_equal_one_device(slots: list, root: torch.device, name: str) -> None:
    whole = whole_parameters(root)
    try:
        expected = trained(whole, OPTIMIZERS[name](whole, fused=True))
    except (NotImplementedError, RuntimeError):
        if root.type == "cpu":
            raise
        pytest.skip(f"{root.type} has no fused optimizers")
    parameters = divided(whole_parameters(), slots)
    optimizer = OPTIMIZERS[name](parameters, fused=True)
    assert_same(trained(parameters, optimizer), expected)
    assert_state_is_divided(parameters, optimizer)


@pytest.mark.parametrize("foreach", [False, True])
def test_plain_gradients_of_whole_parameters_are_divided(slots: list, root: torch.device, foreach: bool) -> None:
    """Autograd leaves one where the loss is a sum over a sharded parameter."""
    whole = whole_parameters(root)
    parameters = divided(whole, slots)
    optimizers = [torch.optim.Adam(these, lr=0.1, weight_decay=0.1, foreach=foreach) for these in (whole, parameters)]
    for these, optimizer in zip((whole, parameters), optimizers, strict=True):
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((parameter * 2).sum() for parameter in these).backward()  # type: ignore[union-attr]
            optimizer.step()
    assert_same([full(parameter) for parameter in parameters], whole)
    assert_state_is_divided(parameters, optimizers[1])


@pytest.mark.parametrize("foreach", [False, True])
def test_one_optimizer_steps_sharded_and_plain_parameters(
    make_slots: Callable[[int], list], root: torch.device, foreach: bool
) -> None:
    """Some over two devices, some over three, some on one."""
    whole = whole_parameters(root)
    expected = trained(whole, torch.optim.AdamW(whole, lr=0.1, foreach=foreach))
    plain = whole_parameters(root)
    two, three = divided(plain, make_slots(2)), divided(plain, make_slots(3))
    mixed = [(plain, two, three)[i % 3][i] for i in range(len(plain))]
    assert_same(trained(mixed, torch.optim.AdamW(mixed, lr=0.1, foreach=foreach)), expected)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.0, float("inf")])
def test_clipping_by_norm_equals_one_device(
    slots: list, root: torch.device, order: float, foreach: bool | None
) -> None:
    whole = whole_parameters(root)
    parameters = divided(whole, slots)
    norms = []
    for these in (whole, parameters):
        set_gradients(these, 0)
        norms.append(nn.utils.clip_grad_norm_(these, 0.1, order, foreach=foreach))
    assert type(norms[1]) is Tensor
    assert norms[1].device == root
    assert_same([norms[1]], [norms[0]])
    assert_same([full(p.grad) for p in parameters], [p.grad for p in whole])  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_by_value_equals_one_device(slots: list, root: torch.device, foreach: bool | None) -> None:
    whole = whole_parameters(root)
    parameters = divided(whole, slots)
    for these in (whole, parameters):
        set_gradients(these, 0)
        nn.utils.clip_grad_value_(these, 0.5, foreach=foreach)
    assert_same([full(p.grad) for p in parameters], [p.grad for p in whole], 0)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", [0, 7])
def test_gradient_scaling_skips_a_step_with_an_infinity(
    slots: list, root: torch.device, where: int, fused: bool
) -> None:
    """In the first row, on the first owner; in the last, on the last one."""
    found = []
    for these in (whole := whole_parameters(root), parameters := divided(whole, slots)):
        optimizer = torch.optim.AdamW(these, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(root.type, init_scale=4.0, growth_interval=2)
        for step in range(STEPS):
            scaler.scale(torch.zeros((), device=root))
            set_gradients(these, step)
            if step == 2:
                gradient = gradients(step)[0]
                gradient[where, 1] = float("inf")
                first = these[0]
                first.grad = (
                    sharded(gradient, slots, Shard(0)) if isinstance(first, ShardedTensor) else gradient.to(root)
                )
            scaler.step(optimizer)
            scaler.update()
        found.append(scaler.get_scale())
    assert found[0] == found[1]
    assert_same([full(parameter) for parameter in parameters], whole)


class Model(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)


@pytest.mark.parametrize("multi", [None, get_ema_multi_avg_fn(0.9)], ids=["mean", "ema"])
def test_averages_equal_one_device(slots: list, root: torch.device, multi: Any) -> None:
    averages = []
    for these in (whole := whole_parameters(root), divided(whole, slots)):
        model = Model(these)
        averaged = AveragedModel(model, multi_avg_fn=multi)
        for step in range(STEPS):
            averaged.update_parameters(model)
            with torch.no_grad():
                for parameter in these:
                    parameter.add_(step + 1)
        averages.append([full(parameter) for parameter in averaged.parameters()])
    assert_same(averages[1], averages[0])


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("name", OF_WHOLE_MATRICES)
def test_those_that_need_whole_matrices_equal_one_device(slots: list, root: torch.device, name: str) -> None:
    parameters = divided(whole_parameters(), slots)
    assert_same(trained_by_closure(parameters, name), trained_by_closure(whole_parameters(root), name), 1e-9)
    assert all(isinstance(parameter, ShardedTensor) for parameter in parameters)


@pytest.mark.parametrize("name", ["Adafactor", "Adafactor, foreach", "Muon", "LBFGS"])
def test_they_are_refused_without_gathers_and_change_nothing(slots: list, name: str) -> None:
    parameters = divided(whole_parameters(), slots)
    with pytest.raises((TypeError, RuntimeError), match=r"full_tensor\(\)"):
        trained_by_closure(parameters, name)


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("name", ["Adafactor", "Rprop", "Muon"])
def test_they_go_with_scaling_clipping_and_averages(slots: list, root: torch.device, name: str) -> None:
    found = []
    for these in (whole_parameters(root), divided(whole_parameters(), slots)):
        taken = [p for p in these if p.dim() == 2 or name != "Muon"]
        optimizer = OF_WHOLE_MATRICES[name](taken)
        scaler = torch.amp.GradScaler(root.type, init_scale=4.0, growth_interval=2)
        model = Model(these)
        averages = [AveragedModel(model, multi_avg_fn=multi) for multi in (None, get_ema_multi_avg_fn(0.9))]
        norms = []
        for step in range(STEPS):
            scaler.scale(torch.zeros((), device=root))
            set_gradients(these, step)
            if step == 2:
                taken[0].grad.mul_(float("inf"))  # type: ignore[union-attr]
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(taken, 0.1))
            scaler.step(optimizer)
            scaler.update()
            for averaged in averages:
                averaged.update_parameters(model)
        states = [full(p) for module in (model, *averages) for p in module.parameters()]
        found.append([*norms, *states, torch.tensor(scaler.get_scale())])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours.cpu(), expected.detach().cpu(), rtol=1e-9, atol=1e-9, equal_nan=True)
