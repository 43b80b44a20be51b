"""Over machines: what fails on one machine fails on all in the same step, changes no gradient, and ends the group."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from dataparallel.composable import fully_shard, replicate
from dataparallel.machines.errors import MachinesDiffer, PeerFailed
from machine_ranks import on_machines
from sharded_machines import EACH_SPREAD, SPREADS, over, ranks_of, slots_of, spread
from sharded_steps import whole


class Fault(Exception):
    """What a test raises."""


class Failing(torch.autograd.Function):
    """Raises in backward if it is told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Failing.fails:
            raise Fault("backward")
        return grad


def run(function: Callable[..., Any], way: str, *args: Any, **options: Any) -> list[Any]:
    return on_machines(function, way, *args, ranks=ranks_of(way), slots=slots_of(way), group_timeout=20, **options)


class Net(nn.Module):
    """Three units. ``fails_in`` says where its next step fails; ``swapped`` runs units in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 1)
        self.double()

    def units(self) -> list[nn.Module]:
        return [*self.layers]

    fails_in = ""
    swapped = False
    skipped = False

    def forward(self, x: Tensor, fails: str = "") -> Tensor:
        Failing.fails = Net.fails_in == "backward"
        layers = [self.layers[i] for i in ((1, 0, 2) if Net.swapped else (0, 1, 2))]
        for number, layer in enumerate(layers[: 2 if Net.skipped else 3]):
            if Net.fails_in == f"forward {number}":
                raise Fault("forward")
            x = torch.tanh(layer(x))
            if number == 1:
                x = Failing.apply(x)
        if Net.fails_in == "the last of forward":
            raise Fault("forward")
        return self.last(x)


def made(devices: list[Any], way: str) -> Any:
    return over(way, Net().to(devices[0]), devices)


def batch(devices: list[Any], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 10 + distributed.get_rank())
    return torch.randn(4, 5, dtype=torch.float64, generator=generator).to(devices[0])


def step(net: Any, devices: list[Any], seed: int) -> None:
    net(batch(devices, seed)).square().sum().backward()


def own_gradients(net: nn.Module) -> dict[str, Any]:
    """The parts that this machine has, because nothing can be gathered after a failure."""
    found: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        grad: Any = parameter.grad
        parts = [grad] if grad is None or type(grad) is Tensor else grad.shards
        found |= {f"{name} {i}": None if part is None else part.clone() for i, part in enumerate(parts)}
    return found


def raised(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours.values(), theirs.values(), strict=True)
    )


@dataclass
class Failed:
    """What a step has raised, and what the steps after it raise."""

    kind: type[BaseException]
    text: str
    later: list[str]


def a_step_that_fails(rank: int, devices: list[Any], way: str, where: str, waits: bool = False) -> Failed:
    """A step in which some ranks fail, soon on all of them. Gradients do not change in it. It ends the group.

    Args:
        waits: gradients of an earlier backward wait on the slots then.
    """
    net = made(devices, way)
    step(net, devices, 1)
    if waits:
        with net.no_sync():
            step(net, devices, 5)
    before, began = own_gradients(net), time.monotonic()
    fails = rank == distributed.get_world_size() - 1
    Net.fails_in = where if fails else ""
    if fails and where == "before the call":
        error = raised(lambda: net(batch(devices, 2), "what", "nobody", "expects"))
    else:
        error = raised(lambda: step(net, devices, 2))
    Net.fails_in = ""
    assert same(own_gradients(net), before)
    later = [str(raised(lambda: step(net, devices, 3))) for _ in range(2)]
    assert time.monotonic() - began < SOON
    assert same(own_gradients(net), before)
    assert error is not None
    return Failed(type(error), str(error), later)


SOON = 8.0
"""Seconds; the timeout of the group is 20."""


PLACES = ["forward 0", "forward 2", "the last of forward", "backward", "before the call"]
SMOKE = ("replicate", "forward 0")
CASES = [
    pytest.param(*case, marks=[pytest.mark.smoke] * (case == SMOKE))
    for case in itertools.product(["replicate", *SPREADS], PLACES)
]


def assert_all_say_the_same_later(of_ranks):
    """What the first failure was, and what to do."""
    texts = {text for each in of_ranks for text in each.later}
    assert len(texts) == 1, texts
    (text,) = texts
    assert re.match(r"rank \d failed", text)
    assert text.endswith("Start all processes again, from a checkpoint")
    return text


@pytest.mark.parametrize(("way", "where"), CASES)
def test_a_step_that_fails_on_one_machine_fails_on_all_and_ends_the_group(way, where):
    *others, failed = of_ranks = run(a_step_that_fails, way, where)
    if where == "before the call":
        assert failed.kind is TypeError
    else:
        assert (failed.kind, failed.text) == (Fault, where.split()[0].replace("the", "forward"))
    text = assert_all_say_the_same_later(of_ranks)
    assert ("TypeError" if where == "before the call" else "Fault") in text or "has failed" in text
    assert f"rank {len(others)} failed" in text
    for each in others:
        assert (each.kind, each.text) == (PeerFailed, text)


def a_hook_that_fails(rank: int, devices: list[Any], way: str, register: str) -> list[BaseException | None]:
    """The errors of four steps. In the first one, hooks on a parameter fail on the last rank, after the sums."""
    net = made(devices, way)
    step(net, devices, 1)

    def fail(_: Any) -> None:
        raise Fault("hook")

    if rank == distributed.get_world_size() - 1:
        getattr(net.layers[1].weight, register)(fail)
    began, errors = time.monotonic(), [raised(lambda: step(net, devices, 2)) for _ in range(4)]
    assert time.monotonic() - began < SOON
    return errors


@pytest.mark.parametrize(
    ("way", "register"),
    [
        ("replicate", "register_hook"),
        ("replicate", "register_post_accumulate_grad_hook"),
        ("1-D", "register_post_accumulate_grad_hook"),
        ("2-D", "register_hook"),
        ("hybrid", "register_hook"),
    ],
)
def test_a_parameters_hook_that_fails_on_one_machine_ends_the_group(way, register):
    *others, own = run(a_hook_that_fails, way, register)
    assert type(own[0]) is Fault
    for errors in others:  # they may have the gradients of the step in which it fails
        assert type(errors[0]) in (type(None), PeerFailed)
    later = [each for errors in (own, *others) for each in errors[1:]]
    assert {type(each) for each in later} == {PeerFailed}
    (text,) = {str(each) for each in later}
    assert text.startswith(f"rank {len(others)} failed: ")


@pytest.mark.parametrize("where", ["forward 2", "backward"])
def test_gradients_that_wait_are_still_there(where):
    run(a_step_that_fails, "replicate", where, waits=True)


def another_order(rank: int, devices: list[Any], way: str) -> Any:
    net = made(devices, way)
    Net.swapped = rank == 1
    error = raised(lambda: step(net, devices, 1))
    Net.swapped = False
    later = raised(lambda: step(net, devices, 2))
    clean = all(grad is None for grad in own_gradients(net).values())
    return type(error), str(error), str(later), clean


def test_units_in_another_order_are_an_error_on_each_machine():
    for kind, text, later, clean in on_machines(another_order, "1-D", group_timeout=20):
        assert kind is MachinesDiffer
        assert "layers.1" in text
        assert "layers.0" in text
        assert later == text
        assert text.endswith("Start all processes again, from a checkpoint")
        assert clean


def another_model(rank: int, devices: list[Any], way: str) -> Any:
    """The models differ, and then an option."""
    errors, is_first = [], rank == 0
    for net, option in ((nn.Linear(5, 4 + is_first), True), (nn.Linear(5, 4), is_first)):
        if way == "replicate":
            make = functools.partial(replicate, mesh=init_device_mesh("cpu", (2,)), average=option)
        else:
            make = functools.partial(fully_shard, reshard_after_forward=option, **spread(way))
        errors.append(raised(functools.partial(make, net, devices=devices)))
        assert type(net) is nn.Linear
    return [(type(error), str(error)) for error in errors]


@pytest.mark.parametrize("way", ["replicate", *SPREADS])
def test_what_differs_is_refused_and_named_on_each_machine(way):
    for (kind, text), (other_kind, other) in run(another_model, way):
        assert kind is other_kind is MachinesDiffer
        assert "weight" in text
        assert ("average" if way == "replicate" else "reshard_after_forward") in other


WRONG_OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (replicate, {"average": "no"}),
    (fully_shard, {"workers": True}),
    (fully_shard, {"reshard_after_forward": "no"}),
    (fully_shard, {"units": "all"}),
]


def a_wrong_option_on_rank_1(rank: int, devices: list[Any]) -> Any:
    errors = []
    for form, wrong in WRONG_OPTIONS:
        net, where = Net().to(devices[0]), {"devices": devices, "process_group": distributed.new_group()}
        errors.append(raised(functools.partial(form, net, **where, **(wrong if rank == 1 else {}))))
        assert type(net) is Net
        where["process_group"] = distributed.new_group()
        step(form(net, **where), devices, 1)
    return [(type(error), str(error)) for error in errors]


def test_a_wrong_option_on_one_machine_is_an_error_on_each_and_changes_nothing():
    first, second = on_machines(a_wrong_option_on_rank_1, ranks=2, slots=1, group_timeout=20)
    for (_, option), theirs, ours in zip(WRONG_OPTIONS, first, second, strict=True):
        (name,) = option
        assert theirs[0] is PeerFailed
        assert ours[0] in (TypeError, ValueError)
        assert name in theirs[1]
        assert name in ours[1]


def values_that_come_later(rank: int, devices: list[Any], way: str) -> Any:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    where = spread(way)
    for unit in (net[0], net):
        fully_shard(unit, devices=devices, **where)
    net.to_empty(device=devices[0])
    torch.manual_seed(rank)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        net(torch.zeros(2, 5, device=devices[0]))
    return whole(dict(net.named_parameters()))


@EACH_SPREAD
def test_all_have_the_same_values_also_if_they_come_after_the_form(way):
    ranks = SPREADS[way][0]
    first, *others = on_machines(values_that_come_later, way, ranks=ranks, slots=1)
    assert all(same(first, other) for other in others)


def another_group_below(rank: int, devices: list[Any]) -> Any:
    net = nn.Sequential(nn.Linear(5, 4))
    fully_shard(net[0], devices=devices)
    return str(raised(lambda: fully_shard(net, devices=devices, **spread("hybrid"))))


def test_a_tree_is_over_the_same_machines():
    for text in on_machines(another_group_below, slots=1):
        assert "'0' is spread over one machine" in text
