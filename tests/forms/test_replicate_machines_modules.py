"""Over machines: buffers, ignored and tied parameters, frozen ones, evaluation, and modules with several parts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from over_machines import (
    adamw,
    assert_close,
    batch_of,
    build,
    gradients,
    loss_of,
    mean_over_ranks,
    over_machines,
    weights,
)
from torch import Tensor, nn

from dataparallel.composable import replicate
from machine_ranks import on_machines


class Norm(nn.Module):
    """Layers with running statistics."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.double().to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def train_norm(rank: int, devices: list[torch.device], is_torchs: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model: Any = Norm(torch.device("cpu") if is_torchs else devices[0])
    model = nn.parallel.DistributedDataParallel(model) if is_torchs else over_machines(model, devices)
    optimizer = adamw(model)
    for step in range(6):
        optimizer.zero_grad()
        if step == 4:  # a forward that waits while another one updates and sends the statistics
            loss_of(model(batch_of(rank, 9).to(devices[0])))
        loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
        optimizer.step()
    own = weights(model.module if is_torchs else model)
    model.eval()
    with torch.no_grad():
        return own, [model(batch_of(0, 0).to(devices[0])).cpu()]


@pytest.mark.not_detail("torch's wrapper crashes on gloo with it, before it trains")
def test_statistics_are_those_of_rank_0_as_under_torchs_wrapper() -> None:
    """With one slot for each machine, each normalises its whole batch."""
    (expected, _), _ = on_machines(train_norm, True, slots=1, kind="cpu")
    (first, _), (second, _) = on_machines(train_norm, False, slots=1)
    assert_close(first, expected)
    parameters = len([*Norm(torch.device("cpu")).parameters()])
    assert_close(second[:parameters], first[:parameters])


def buffers_begin(rank: int, devices: list[torch.device]) -> list[Any]:
    """Before a forward that is recorded rank 1 gets the buffers of rank 0; before another one it does not."""
    model = over_machines(Norm(devices[0]), devices).eval()
    x = batch_of(0, 0).to(devices[0])
    model.norm.running_mean.fill_(rank + 1)
    with torch.no_grad():
        model(x)
    without = model.norm.running_mean.cpu().clone()
    older = model(x)
    mean = model.norm.running_mean.cpu().clone()
    loss_of(older + model(x)).backward()
    return [without, mean]


def test_buffers_of_rank_0() -> None:
    for rank, (without, mean) in enumerate(on_machines(buffers_begin)):
        assert without.tolist() == [rank + 1.0] * 3
        assert mean.tolist() == [1.0] * 3


def evaluate_alone(rank: int, devices: list[torch.device]) -> list[Tensor]:
    model = over_machines(build(devices[0]), devices)
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
        optimizer.step()
        if rank == step % 2:
            with torch.no_grad():
                for number in range(3):
                    model(batch_of(rank, number).to(devices[0]))
    return weights(model)


def test_one_rank_may_evaluate_alone() -> None:
    model = build(torch.device("cpu"))
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        mean_over_ranks(model, [loss_of(model(batch_of(rank, step))) for rank in range(2)])
        optimizer.step()
    for found in on_machines(evaluate_alone):
        assert_close(found, weights(model))


def freeze(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (name.startswith("second") and step in (3, 4, 5)))


def change_gradients(rank: int, devices: list[torch.device]) -> list[Any]:
    model = over_machines(build(devices[0], seed=rank), devices)
    seen = []
    for step in range(9):
        freeze(model, step)
        if step == 5 and rank == 1:  # this rank alone sees a tree that the others never see
            model.first.weight.requires_grad_(False)
            with torch.no_grad():
                model(batch_of(rank, 0).to(devices[0]))
            model.first.weight.requires_grad_(True)
        model.zero_grad()
        loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
        seen.append(gradients(model))
    return seen


def test_requires_grad_may_change_between_steps() -> None:
    model = build(torch.device("cpu"))
    expected = []
    for step in range(9):
        freeze(model, step)
        model.zero_grad()
        mean_over_ranks(model, [loss_of(model(batch_of(rank, step))) for rank in range(2)])
        expected.append(gradients(model))
    for seen in on_machines(change_gradients):
        for ours, theirs in zip(seen, expected, strict=True):
            assert_close(ours, theirs)


class Tied(nn.Module):
    """One weight in two places, one module in two places, a complex parameter, one in another order of memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.again = self.second
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.conv = nn.Conv2d(1, 2, 2).double().to(memory_format=torch.channels_last)
        self.single = nn.Parameter(torch.randn(3))
        for name in ("first", "second", "conv"):
            getattr(self, name).to(device)
        self.second.weight = self.first.weight
        self.turn, self.single = nn.Parameter(self.turn.to(device)), nn.Parameter(self.single.to(device))

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(torch.tanh(self.second(torch.tanh(self.first(x)))))
        y = (y * self.turn).abs()
        return self.conv(y.view(-1, 1, 2, 2)).flatten(1) * self.single.double().sum()


def train_tied(rank: int, devices: list[torch.device]) -> list[Any]:
    model = over_machines(Tied(devices[0]), devices)
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
    return gradients(model)


def test_tied_weights_and_several_dtypes() -> None:
    model = Tied(torch.device("cpu"))
    mean_over_ranks(model, [loss_of(model(batch_of(rank, 2))) for rank in range(2)])
    for found in on_machines(train_tied):
        for ours, theirs in zip(found, gradients(model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6 if theirs.dtype == torch.float32 else 0, atol=1e-9)


def ignore(rank: int, devices: list[torch.device]) -> dict[str, Any]:
    """What is ignored belongs to each rank alone. On slots of one device, all of them may share it."""
    model = build(devices[0], seed=rank)
    before = [each.detach().cpu().clone() for each in (*model.branch.parameters(), model.last.bias)]
    over_machines(model, devices[:1], ignored_modules=[model.branch], ignored_params=[model.last.bias])
    x = batch_of(0, 0).to(devices[0]) * (rank + 1)
    loss_of(model(x)).backward()
    after = [each.detach().cpu() for each in (*model.branch.parameters(), model.last.bias)]
    assert_close(after, before)
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_ignored_parameters_are_not_sent() -> None:
    first, second = on_machines(ignore)
    for name, grad in first.items():
        is_ignored = name.startswith("branch") or name == "last.bias"
        assert torch.equal(grad, second[name]) is not is_ignored, name


def two_modules(rank: int, devices: list[torch.device]) -> list[Any]:
    """Two towers in one backward. Where each device has a thread, another tower is ready first on each rank."""
    nets = [build(device, seed=rank) for device in devices]
    nets[rank].first.register_full_backward_hook(lambda *_: time.sleep(0.2))
    one, two = (over_machines(net, [device]) for net, device in zip(nets, devices, strict=True))
    for step in range(4):
        for model in (one, two):
            model.zero_grad()
        outputs = [
            model(batch_of(rank, step).to(at)).to(devices[0]) for model, at in zip((one, two), devices, strict=True)
        ]
        loss_of(outputs[0] + outputs[1]).backward()
    return [gradients(one), gradients(two)]


def test_two_modules_in_one_backward() -> None:
    model = build(torch.device("cpu"))
    mean_over_ranks(model, [loss_of(2 * model(batch_of(rank, 3))) for rank in range(2)])
    expected = [None if grad is None else grad / 2 for grad in gradients(model)]
    for one, two in on_machines(two_modules):
        assert_close(one, expected)
        assert_close(two, expected)


def synchronised_norm(rank: int, devices: list[torch.device]) -> list[str]:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Norm(devices[0]))
    with pytest.raises(ValueError, match="SyncBatchNorm and 2 slots") as raised:
        over_machines(model, devices)
    over_machines(model, devices[:1]).eval()
    loss_of(model(batch_of(rank, 0).to(devices[0]))).backward()
    return [str(raised.value)]


def test_synchronised_norms_need_one_slot_for_each_process() -> None:
    on_machines(synchronised_norm)


def arguments(rank: int, devices: list[torch.device]) -> list[str]:
    group = torch.distributed.group.WORLD
    sentences = []
    # Rank 1 alone passes something wrong: both raise, and what comes next works.
    with pytest.raises((TypeError, RuntimeError)) as raised:
        replicate(build(devices[0]), devices=devices, process_group=group, dim=None if rank else 0)
    sentences.append(str(raised.value))
    with pytest.raises(RuntimeError) as raised:
        over_machines(build(devices[0]), devices, average=rank == 0)
    sentences.append(str(raised.value))
    module = nn.Linear(2, 2 + rank).to(devices[0])
    with pytest.raises(RuntimeError) as raised:
        over_machines(module, devices)
    sentences.append(str(raised.value))
    assert type(module) is nn.Linear
    with pytest.raises(ValueError, match="not both"):
        replicate(build(devices[0]), devices=devices, device_id=devices[0], process_group=group)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = build(devices[0], seed=rank)
    assert replicate(model, device_id=devices[0], mesh=mesh) is model
    loss_of(model(batch_of(rank, 0).to(devices[0]))).backward()
    return sentences


def test_wrong_arguments_are_errors_of_all_ranks() -> None:
    first, second = on_machines(arguments)
    assert "dim=None" in second[0]
    assert "rank 1" in first[0]
    assert "average" in first[1]
    assert first[1] == second[1]
    assert "weight" in first[2]
    assert first[2] == second[2]
