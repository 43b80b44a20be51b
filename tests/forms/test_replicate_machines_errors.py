"""Over machines: if one rank fails, all ranks raise, no ``.grad`` is changed, and the next step is undisturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from over_machines import adamw, assert_close, batch_of, build, gradients, loss_of, over_machines, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.machines.errors import MachinesError, PeerFailed
from machine_ranks import on_machines


class Fails(RuntimeError):
    """What the tests' model raises."""


class Failing(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Fails("in backward")


class Awkward(nn.Module):
    """Fails where it is told to, before or behind its layers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.net = build(device)
        self.head = nn.Linear(2, 2, dtype=torch.float64).to(device)

    def forward(self, x: Tensor, fails: str = "") -> Tensor:
        if fails == "forward":
            raise Fails("in forward")
        y = self.net(x)
        if fails == "late":
            y = Failing.apply(y)
        y = self.head(y)
        return Failing.apply(y) if fails == "early" else y


PLACES = ["forward", "early", "late", "before the call", "outside, behind it"]


def fail_once(rank: int, devices: list[torch.device], place: str, culprits: list[int], wait: bool) -> dict[str, Any]:
    """Step 3 fails; a twin that skips this step shows what an undisturbed run has."""
    torch.manual_seed(rank)
    model = over_machines(Awkward(devices[0]), devices)
    optimizer = adamw(model)
    raised, changed = "", []
    for step in range(6):
        optimizer.zero_grad()
        x = batch_of(rank, step).to(devices[0]).requires_grad_(place == "outside, behind it")
        if step != 3:
            loss_of(model(x)).backward()
            optimizer.step()
            continue
        if wait:
            with model.no_sync():
                loss_of(model(x)).backward()
        before = gradients(model)
        fails = rank in culprits
        try:
            if fails and place == "before the call":
                model(x, "what", "nobody", "expects")
            where = place if fails and place in ("forward", "early", "late") else ""
            loss_of(model(Failing.apply(x) if fails and place == "outside, behind it" else x, where)).backward()
        except Fails as error:
            raised = f"Fails: {error}"
        except TypeError as error:
            raised = f"TypeError: {error}"
        except PeerFailed as error:
            raised = f"PeerFailed: {error}"
        changed = [a is not None or b is not None for a, b in zip(before, gradients(model), strict=True)]
        assert_close(gradients(model), before)
        if wait:  # what was kept before is still there
            loss_of(model(x)).backward()
            optimizer.step()
    return {"raised": raised, "weights": weights(model), "changed": changed}


def undisturbed(rank: int, devices: list[torch.device], wait: bool) -> list[Tensor]:
    torch.manual_seed(rank)
    model = over_machines(Awkward(devices[0]), devices)
    optimizer = adamw(model)
    for step in range(6):
        optimizer.zero_grad()
        if step == 3 and not wait:
            continue
        for _ in range(2 if step == 3 else 1):
            loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("place", [pytest.param(PLACES[0], marks=pytest.mark.smoke), *PLACES[1:4]])
def test_all_ranks_raise_and_go_on(place: str, wait: bool) -> None:
    expected = on_machines(undisturbed, wait)
    found = on_machines(fail_once, place, [1], wait)
    kind = "TypeError" if place == "before the call" else "Fails"
    assert found[1]["raised"].startswith(kind)
    assert found[0]["raised"].startswith("PeerFailed")
    assert "rank 1" in found[0]["raised"]
    for of_rank, theirs in zip(found, expected, strict=True):
        assert_close(of_rank["weights"], theirs)


@pytest.mark.parametrize("place", PLACES[:3])
def test_all_ranks_may_fail_at_once(place: str) -> None:
    expected = on_machines(undisturbed, False)
    found = on_machines(fail_once, place, [0, 1], False)
    for of_rank, theirs in zip(found, expected, strict=True):
        assert of_rank["raised"].startswith("Fails")
        assert_close(of_rank["weights"], theirs)


def fail_behind_the_module(rank: int, devices: list[torch.device]) -> str:
    """The error is in what the input was computed from, when all sums have been launched."""
    model = over_machines(build(devices[0]), devices)
    for step in range(2):
        loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
    before = gradients(model)
    x = batch_of(rank, 3).to(devices[0]).requires_grad_()
    try:
        loss_of(model(Failing.apply(x) if rank == 1 else x)).backward()
    except (Fails, PeerFailed) as error:
        assert_close(gradients(model), before)
        return type(error).__name__
    return "nothing"


def test_an_error_behind_the_module_is_one_of_all_ranks_on_the_cpu() -> None:
    assert on_machines(fail_behind_the_module, kind="cpu") == ["PeerFailed", "Fails"]


def refuse(rank: int, devices: list[torch.device]) -> list[str]:
    model = over_machines(build(devices[0]), devices)
    x = batch_of(rank, 0).to(devices[0])
    found = []
    loss_of(model(x)).backward()
    before = gradients(model)
    with pytest.raises(RuntimeError, match="create_graph=True") as raised:
        loss_of(model(x)).backward(create_graph=True)
    found.append(str(raised.value))
    assert_close(gradients(model), before)
    model.zero_grad()
    loss_of(model(x)).backward()
    assert_close(gradients(model), before)
    return found


def test_a_backward_that_is_recorded_is_refused() -> None:
    on_machines(refuse)


class Checkpointed(nn.Module):
    """Its layers are checkpointed inside the replicas."""

    def __init__(self, device: torch.device, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = build(device), use_reentrant
        self.head = nn.Linear(2, 2, dtype=torch.float64).to(device)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant:
            x = x.requires_grad_()
        return self.head(checkpoint(self.net, x, use_reentrant=self.use_reentrant))


def checkpoints(rank: int, devices: list[torch.device], use_reentrant: bool) -> str | list[Any]:
    torch.manual_seed(0)
    model = over_machines(Checkpointed(devices[0], use_reentrant), devices)
    x = batch_of(rank, 0).to(devices[0])
    if not use_reentrant:
        for _ in range(2):
            model.zero_grad()
            loss_of(model(x)).backward()
        return gradients(model)
    try:
        loss_of(model(x)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_reentrant_checkpoints_inside_are_refused() -> None:
    sentences = on_machines(checkpoints, True)
    assert any("use_reentrant=False" in sentence for sentence in sentences), sentences
    assert all(sentences)


def test_other_checkpoints_inside() -> None:
    torch.manual_seed(0)
    model = Checkpointed(torch.device("cpu"), False)
    (sum(loss_of(model(batch_of(rank, 0))) for rank in range(2)) / 2).backward()
    for found in on_machines(checkpoints, False):
        assert_close(found, gradients(model))


def sparse(rank: int, devices: list[torch.device]) -> str:
    torch.manual_seed(0)
    model = over_machines(nn.Sequential(nn.Embedding(4, 3, sparse=True)).double().to(devices[0]), devices)
    try:
        model(torch.arange(4, device=devices[0])).sum().backward()
    except (TypeError, MachinesError) as error:
        return str(error)
    return ""


def test_sparse_gradients_are_refused_by_name() -> None:
    sentences = on_machines(sparse)
    assert any("'0.weight'" in sentence and "sparse=False" in sentence for sentence in sentences), sentences
    assert all(sentences)
