"""Reference counts show who holds an object, or are not trusted; then calls share nothing that forward could hold.

The trial at import notices an interpreter that does not count all holders. Tests that nothing is used again while
somebody else holds it are in replicas/test_kept_replicas_held, test_kept_tensors and test_cycles_held.
"""

import gc
import sys
import sysconfig
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel import DataParallel, _torch, ownership
from dataparallel.composable import replicate
from memory import allocated
from nets import HELD, HOLDS, Net, build, forget, samples
from processes import run_script
from selection import others_long

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

once = pytest.mark.devices("cpu")  # it is not about devices


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str | None]:
    """The trial, whatever the environment of the tests says."""
    monkeypatch.delenv(ownership.VARIABLE, raising=False)
    monkeypatch.setattr(ownership, "why_not_trusted", lambda: None)
    return ownership.try_counts


@once
def test_counts_are_trusted_here(trial: Callable) -> None:
    assert trial() is None


@pytest.mark.long
@once
@pytest.mark.parametrize("value", others_long(["0", "no", "False", "off"], ["0"]))
def test_reuse_can_be_turned_off(value: str) -> None:
    script = "from dataparallel import ownership; print(ownership.are_counts_trusted(), ownership.why_not_trusted())"
    assert run_script(script, DATAPARALLEL_REUSE=value).split("\n")[0] == f"False DATAPARALLEL_REUSE={value} says so"


@once
@pytest.mark.parametrize("value", ["", "1", "yes"])
def test_else_counts_are_tried(value: str, trial: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ownership.VARIABLE, value)
    monkeypatch.setattr(ownership, "references", lambda objects: [2 for _ in objects])
    assert trial() == "they miss a list that holds a Identity"


@once
@pytest.mark.parametrize(
    "around", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta"), torch.autograd.graph.save_on_cpu]
)
def test_it_does_not_matter_where_the_package_is_imported(around: Callable, trial: Callable) -> None:
    with around():
        assert trial() is None


@once
def test_the_trial_leaves_nothing_to_the_collector(trial: Callable) -> None:
    trial()
    gc.collect()
    gc.disable()
    try:
        trial()
        assert gc.collect() == 0
    finally:
        gc.enable()


def blind_to(*blind: type) -> Callable[[Any], int]:
    """A count that leaves out holders of these kinds, as an interpreter would that lets them borrow."""

    def getrefcount(item: Any) -> int:
        hidden = [holder for holder in gc.get_referrers(item) if type(holder) in blind]
        return sys.getrefcount(item) - len(hidden)

    return getrefcount


LIARS: dict[str, tuple[Callable[[Any], int], str]] = {
    "always the same": (lambda item: 2, "a list that holds a Identity"),
    "not of cells": (blind_to(types.CellType), "a closure that holds a Identity"),
    "not of frames": (blind_to(types.GeneratorType, types.FrameType), "a suspended frame that holds a Identity"),
    "not of methods": (blind_to(types.MethodType), "a bound method that holds a Identity"),
    "never the same": (lambda item, calls=[]: calls.append(0) or len(calls), "a list that holds a Identity"),
}


@once
@pytest.mark.parametrize(("liar", "unnoticed"), LIARS.values(), ids=LIARS.keys())
def test_counts_that_miss_a_holder_are_not_trusted(
    liar: Callable, unnoticed: str, trial: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "sys", types.SimpleNamespace(getrefcount=liar))
    assert trial() == f"they miss {unnoticed}"


@once
@pytest.mark.parametrize(
    ("name", "liar", "unnoticed"),
    [
        ("are_weakly_held", lambda objects: False, "a weak reference that holds a Tensor"),
        ("holders_of_memory", lambda tensor: (1, 1), "a view that holds the memory of a tensor"),
        ("references_inside", lambda holders: Counter(), "a suspended frame that holds a Identity of a circle"),
    ],
)
def test_numbers_from_torch_and_from_the_collector_are_tried_too(
    name: str, liar: Callable, unnoticed: str, trial: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, name, liar)
    assert trial() == f"they miss {unnoticed}"


@once
def test_a_torch_that_has_not_what_is_asked_for(trial: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "use_count", lambda tensor: tensor._no_such_count())
    assert f"with torch {torch.__version__}: AttributeError" in trial()
    assert "_no_such_count" in trial()


@once
def test_without_a_global_lock_counts_are_not_trusted(trial: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED"))
    assert "global lock" in trial()


@once
@pytest.mark.usefixtures("untold")
def test_every_question_is_answered_by_no_then() -> None:
    tensors = [torch.ones(2)]
    assert not ownership.are_counts_trusted()
    assert not ownership.Holders(tensors).are_unchanged()
    assert not ownership.MemoryHolders(tensors).are_unchanged()
    assert not ownership.are_in_one_list_only(tensors)


class Circular(Net):
    def __init__(self) -> None:
        super().__init__()
        self.linear.above = [self]


@pytest.fixture(params=[Net, Circular], ids=["plain", "circular"])
def net(request: pytest.FixtureRequest, root: torch.device) -> Any:
    yield build(root, request.param)
    forget()


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return samples(root)


@pytest.mark.usefixtures("untold")
def test_each_call_has_replicas_and_copies_of_its_own(net: Net, wrapped: DataParallel, call: Callable) -> None:
    HOLDS.append(lambda replica: replica)
    HOLDS.append(lambda replica: replica.linear.weight)
    for _ in range(3):
        call()
    assert len({*map(id, HELD)}) == len(HELD) == 2 * 3 * 3


KEEPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "the replica": (lambda replica: replica, lambda kept: kept.linear.weight),
    "a method": (lambda replica: replica.linear.forward, lambda kept: kept.__self__.weight),
    "a registry": (lambda replica: replica.linear._parameters, lambda kept: kept["weight"]),
    "a parameter": (lambda replica: replica.linear.weight, lambda kept: kept),
    "a buffer": (lambda replica: replica.shift, lambda kept: kept),
    "a view": (lambda replica: replica.linear.weight.detach()[1:], lambda kept: kept),
}


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize(("keep", "value"), KEEPS.values(), ids=KEEPS.keys())
def test_what_forward_has_kept_stays_what_it_is(
    keep: Callable, value: Callable, net: Net, wrapped: DataParallel, call: Callable, x: Tensor
) -> None:
    HOLDS.append(keep)
    call()
    HOLDS.clear()
    # Tensors on the device of the root share the memory of the module.
    before = [(kept, value(kept).clone()) for kept in HELD if value(kept).device.index]
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = tensor.data * 3
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(call(), net(x), rtol=0, atol=1e-9)
        gc.collect()
    assert len(HELD) == 3
    assert all(value(kept).numel() for kept in HELD)
    assert all(torch.equal(value(kept), expected) for kept, expected in before)


@pytest.mark.usefixtures("untold")
def test_the_stage_alone_does_so_too(net: Net, wrapped: DataParallel, slots: list, without_graph: Callable) -> None:
    """It does not say when its replicas are not needed any more."""
    before = net.linear.weight.detach().clone()
    with without_graph():
        first = wrapped.replicate(net, slots)
        net.linear.weight.data = before * 2
        second = wrapped.replicate(net, slots)
    assert not {*map(id, first)} & {*map(id, second)}
    elsewhere = [replica.linear.weight for replica in first if replica.linear.weight.device != before.device]
    assert all(torch.equal(weight.to(before.device), before) for weight in elsewhere)
    assert all(torch.equal(replica.linear.weight.to(before.device), before * 2) for replica in second)


@pytest.mark.usefixtures("untold")
def test_no_replica_is_kept(net: Net, wrapped: DataParallel, slots: list, without_graph: Callable) -> None:
    with without_graph():
        replicas = [*map(weakref.ref, wrapped.replicate(net, slots))]
    gc.collect()
    assert [replica() for replica in replicas] == [None] * 3


@pytest.mark.devices("sim")
@pytest.mark.usefixtures("untold")
def test_nothing_is_held_between_calls(net: Net, slots: list, call: Callable) -> None:
    before = allocated(slots)
    for _ in range(3):
        call()
    assert allocated(slots, before) == before


@pytest.mark.usefixtures("untold")
def test_circles_are_the_collectors(root: torch.device, slots: list, x: Tensor) -> None:
    net = build(root, Circular)
    HOLDS.append(weakref.ref)
    gc.collect()
    gc.disable()
    try:
        DataParallel(net, slots)(x).sum().backward()
        HOLDS.clear()
        assert [bool(replica() and vars(replica())) for replica in HELD] == [True] * 3
        gc.collect()
        assert [replica() for replica in HELD] == [None] * 3
    finally:
        gc.enable()
        forget()


@pytest.mark.usefixtures("untold")
def test_replicas_that_are_leased_are_used_again(net: Net, wrapped: DataParallel, call: Callable) -> None:
    HOLDS.append(id)
    with wrapped.frozen():
        for _ in range(3):
            call()
    assert len({*HELD}) == 3


@pytest.mark.usefixtures("untold")
def test_a_training_of_replicas_that_stay(net: Net, root: torch.device, slots: list, x: Tensor) -> None:
    """Their tensors need no counts; their modules are made for each call."""
    twin = build(root, type(net))
    replicate(net, devices=slots)
    HOLDS.append(lambda module: module)
    optimizers = {module: torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, twin)}
    for _ in range(4):
        for module, optimizer in optimizers.items():
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    assert len({*map(id, HELD)}) == 4 * 3 + 1
