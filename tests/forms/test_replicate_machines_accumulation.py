"""Over machines: gradients that wait, and backwards over several forwards, are those of one device."""

from __future__ import annotations

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
from torch import Tensor

from machine_ranks import on_machines

PATTERNS = [(True,) * 3, (False, False, True), (False, True, False, True), (True, False, True)]


def accumulate(rank: int, devices: list[torch.device], pattern: tuple[bool, ...]) -> tuple[list[Any], list[Tensor]]:
    model = over_machines(build(devices[0], seed=rank), devices)
    optimizer = adamw(model)
    seen = []
    for round in range(5):
        optimizer.zero_grad(set_to_none=round % 2 == 0)
        for micro, is_on in enumerate(pattern):
            model.set_requires_gradient_sync(is_on)
            loss_of(model(batch_of(rank, 7 * round + micro).to(devices[0]))).backward()
        seen.append(gradients(model))
        optimizer.step()
    return seen, weights(model)


def accumulate_on_one(ranks: int, pattern: tuple[bool, ...]) -> tuple[list[Any], list[Tensor]]:
    model = build(torch.device("cpu"))
    optimizer = adamw(model)
    seen = []
    for round in range(5):
        optimizer.zero_grad(set_to_none=round % 2 == 0)
        for micro, _ in enumerate(pattern):
            mean_over_ranks(model, [loss_of(model(batch_of(rank, 7 * round + micro))) for rank in range(ranks)])
        seen.append(gradients(model))
        optimizer.step()
    return seen, weights(model)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_accumulated_gradients_are_those_of_one_device(pattern: tuple[bool, ...]) -> None:
    expected_gradients, expected = accumulate_on_one(2, pattern)
    for seen, found in on_machines(accumulate, pattern):
        for ours, theirs in zip(seen, expected_gradients, strict=True):
            assert_close(ours, theirs)
        assert_close(found, expected)


def keep(rank: int, devices: list[torch.device]) -> list[Any]:
    model = over_machines(build(devices[0], seed=rank), devices)
    x = batch_of(rank, 0).to(devices[0])
    loss_of(model(x)).backward()
    before = gradients(model)
    with model.no_sync():
        loss_of(model(x)).backward()
    kept = gradients(model)
    model.zero_grad()
    with model.no_sync():
        loss_of(model(x)).backward()
    alone = gradients(model)
    return [[a if b is None else a + b for a, b in zip(before, alone, strict=True) if a is not None], kept, alone]


def test_until_they_are_summed_grad_has_what_it_had_and_those_of_slot_0() -> None:
    for rank, (expected, kept, alone) in enumerate(on_machines(keep)):
        assert_close([grad for grad in kept if grad is not None], expected)
        model, x = build(torch.device("cpu")), batch_of(rank, 0)
        first, *others = x.chunk(2)
        loss_of(torch.cat([model(first), *(model(chunk).detach() for chunk in others)])).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        shown = [torch.zeros_like(zeros) if grad is None else grad for zeros, grad in zip(found, alone, strict=True)]
        assert_close(shown, found)


def throw_away(rank: int, devices: list[torch.device]) -> list[Any]:
    model = over_machines(build(devices[0], seed=rank), devices)
    x = batch_of(rank, 0).to(devices[0])
    found = []
    for set_to_none in (True, False):
        with model.no_sync():
            loss_of(model(x)).backward()
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(x)).backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


def test_gradients_that_are_thrown_away_are_not_sent() -> None:
    model = build(torch.device("cpu"))
    mean_over_ranks(model, [loss_of(model(batch_of(rank, 0))) for rank in range(2)])
    expected = gradients(model)
    for first, second in on_machines(throw_away):
        assert_close(first, expected)
        assert_close([grad for grad in second if grad is not None], [grad for grad in expected if grad is not None])


def change_copies(rank: int, devices: list[torch.device]) -> list[Any]:
    """Between a backward that keeps and one that sums, the copies are made anew."""
    model = over_machines(build(devices[0], seed=rank), devices)
    x = batch_of(rank, 0).to(devices[0])
    with model.no_sync():
        loss_of(model(x)).backward()
    model.unused.weight.requires_grad_(False)
    loss_of(model(x)).backward()  # learns the order: the next forward has other buckets
    with model.no_sync():
        loss_of(model(x)).backward()
    loss_of(model(x)).backward()
    return gradients(model)


def test_gradients_that_wait_outlive_the_copies() -> None:
    model = build(torch.device("cpu"))
    for _ in range(4):
        mean_over_ranks(model, [loss_of(model(batch_of(rank, 0))) for rank in range(2)])
    for found in on_machines(change_copies):
        assert_close(found, gradients(model))


def two_forwards(rank: int, devices: list[torch.device]) -> list[Any]:
    model = over_machines(build(devices[0], seed=rank), devices)
    seen = []
    for step in range(4):
        model.zero_grad()
        one = loss_of(model(batch_of(rank, step).to(devices[0])))
        two = loss_of(model(batch_of(rank, step + 5).to(devices[0])))
        (one + two).backward()
        seen.append(gradients(model))
    for step in range(2):  # the backwards in another order than the forwards
        model.zero_grad()
        one = loss_of(model(batch_of(rank, step).to(devices[0])))
        two = loss_of(model(batch_of(rank, step + 5).to(devices[0])))
        two.backward()
        one.backward()
        seen.append(gradients(model))
    return seen


def test_two_forwards_before_a_backward() -> None:
    model = build(torch.device("cpu"))
    expected = []
    for step in (0, 1, 2, 3, 0, 1):
        model.zero_grad()
        for number in (step, step + 5):
            mean_over_ranks(model, [loss_of(model(batch_of(rank, number))) for rank in range(2)])
        expected.append(gradients(model))
    for seen in on_machines(two_forwards):
        for ours, theirs in zip(seen, expected, strict=True):
            assert_close(ours, theirs)


def older_copies(rank: int, devices: list[torch.device]) -> list[Any]:
    """One backward goes over a forward from before the order was learnt, and over one from after it."""
    model = over_machines(build(devices[0], seed=rank), devices)
    x = batch_of(rank, 0).to(devices[0])
    older = loss_of(model(x))
    loss_of(model(x)).backward()
    newer = loss_of(model(x))
    (older + newer).backward()
    after = gradients(model)
    loss_of(model(x)).backward()
    return [after, gradients(model)]


def test_one_backward_over_copies_that_were_made_at_different_times() -> None:
    model = build(torch.device("cpu"))
    expected = []
    for times in (3, 1):
        for _ in range(times):
            mean_over_ranks(model, [loss_of(model(batch_of(rank, 0))) for rank in range(2)])
        expected.append(gradients(model))
    for found in on_machines(older_copies):
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs)


def ask_for_gradients(rank: int, devices: list[torch.device]) -> list[Any]:
    model = over_machines(build(devices[0], seed=rank), devices)
    x = batch_of(rank, 0).to(devices[0]).requires_grad_()
    used = [*model.first.parameters(), *model.branch.parameters()]
    found = torch.autograd.grad(loss_of(model(x)), used)
    # A backward that does not lead to parameters is no business of other machines.
    (of_input,) = torch.autograd.grad(loss_of(model(x)), [x]) if rank == 0 else (None,)
    loss_of(model(x)).backward(inputs=used)
    return [[grad.cpu() for grad in found], gradients(model), None if of_input is None else of_input.cpu()]


def test_gradients_that_are_asked_for() -> None:
    model = build(torch.device("cpu"))
    used = [*model.first.parameters(), *model.branch.parameters()]
    x = batch_of(0, 0).requires_grad_()
    losses = [loss_of(model(x)), loss_of(model(batch_of(1, 0)))]
    *expected, of_input = torch.autograd.grad(sum(losses) / 2, [*used, x])
    for rank, (found, grads, of_x) in enumerate(on_machines(ask_for_gradients)):
        assert_close(found, expected)
        assert_close([grad for grad in grads if grad is not None], expected)
        if rank == 0:
            assert_close([of_x], [2 * of_input])
