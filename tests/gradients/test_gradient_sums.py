"""Gradients that wait on slots are added once; if the user throws a ``.grad`` away, they are dropped.

That sums are those of one device, whatever waits, is drawn in test_gradient_sums_partial and forms/test_state_machine.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept import Branched, assert_same, build, gradients, loss, numbers, tensors_of, with_kept_replicas
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, comm
from dataparallel.forms.kept_tensors import KeptTensors
from dataparallel.replicas.kept_replicas import KeptReplicas
from freed_later import freed_later
from nogpu.pytest import settle


def test_until_then_the_source_has_slot_0s(both: Any) -> None:
    x = both.x()
    both.sums_are(False)
    loss(both.wrapped(x)).backward()
    loss(both.twin(x[:2])).backward()
    assert both.kept() > 0
    for ours, theirs in zip(gradients(both.net), gradients(both.twin), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=0, atol=1e-9)


def test_nothing_is_sent_until_then(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both.learn()
    both.sums_are(False)
    value = loss(both.wrapped(both.x()))
    for name in ("reduce_add_coalesced", "reduce_add", "add_flat"):
        monkeypatch.setattr(comm, name, None)
    value.backward()


DISCARDS: dict[str, Callable[[Branched], object]] = {
    "zero_grad": lambda net: net.zero_grad(),
    "zero_grad to zeros": lambda net: net.zero_grad(set_to_none=False),
    "an optimizer's to zeros": lambda net: SGD(net.parameters(), lr=1, foreach=False).zero_grad(set_to_none=False),
    "an optimizer's with lists": lambda net: SGD(net.parameters(), lr=1, foreach=True).zero_grad(set_to_none=False),
    "other tensors": lambda net: [setattr(p, "grad", torch.zeros_like(p)) for p in net.parameters()],
}


@pytest.mark.parametrize("name", DISCARDS)
@pytest.mark.parametrize("learnt", [False, True])
def test_what_the_user_throws_away_is_gone(both: Any, name: str, learnt: bool) -> None:
    if learnt:
        both.learn()
    both.backward(both.x(0), False)
    for module in both.modules:
        DISCARDS[name](module)
    both.backward(both.x(1), False)
    both.backward(both.x(2))
    both.compare()


def test_what_is_thrown_away_is_freed_at_the_next_forward(both: Any) -> None:
    both.learn()
    both.backward(both.x(), False)
    assert both.kept() > 0
    both.zero_grad()
    with torch.no_grad():
        both.wrapped(both.x())
    assert both.kept() == 0


def test_hooks_see_the_complete_sum(both: Any) -> None:
    seen: list[list[Tensor]] = [[], []]
    for module, found in zip(both.modules, seen, strict=True):
        module.second.weight.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.clone()))
    both.backward(both.x(0), False)
    both.backward(both.x(1))
    assert [*map(len, seen)] == [2, 2]
    assert_same([seen[0][1]], [seen[1][1]])


@freed_later
@pytest.mark.usefixtures("no_collector")
def test_what_is_dropped_is_freed_without_a_collection(slots: list, root: torch.device) -> None:
    net = build(root)
    wrapped = with_kept_replicas(net, slots)
    for are_on in (True, True, False):
        tensors_of(wrapped).sums.are_on = are_on
        loss(wrapped(numbers(root, 2 * len(slots)))).backward()
    parameter, sums = weakref.ref(net.first.weight), weakref.ref(tensors_of(wrapped).sums)
    del net, wrapped
    until = time.monotonic() + 5  # a thread of the engine may be late to drop a graph
    while (parameter() is not None or sums() is not None) and time.monotonic() < until:
        time.sleep(0.01)
    assert (parameter(), sums()) == (None, None)


class Sometimes(nn.Module):
    """Uses its layer for two samples or more. To look at their values, the host would wait for the slot."""

    def __init__(self, root: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Two parameters in a bucket, which the slot's device puts in one buffer.
        self.layer = nn.Linear(4, 4).double().to(root)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if len(x) > 1 else x * 1


def test_gradients_that_were_added_on_a_slot_which_has_none_in_the_pass_that_sums(both_of: Callable) -> None:
    """The sum waits for the addition, although it has nothing else to wait for on that slot."""
    both = both_of(Sometimes)
    slots = [*map(torch.device, both.slots)]
    both.wrapped = DataParallel(both.net, slots, workers=1)  # in one order, and without marks on the streams
    vars(both.wrapped.options)["kept"] = KeptReplicas(KeptTensors(slots, 2**20, 2**20, True))
    x = both.x()
    for are_on, samples in ((True, len(x)), (False, len(x)), (False, len(x)), (True, len(x) - 1)):
        both.sums_are(are_on)
        both.wrapped(x[:samples]).square().sum().backward()
        sum(both.twin(chunk).square().sum() for chunk in x[:samples].chunk(len(slots))).backward()
    both.compare()


class OtherStreams(nn.Module):
    """Uses ``branch`` in evaluation only."""

    def __init__(self, root: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch = (nn.Linear(4, 4).double().to(root) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if self.training else self.branch(self.first(x))


@pytest.mark.devices("sim", "cuda")
def test_what_waits_is_added_on_the_stream_that_has_written_grad(both_of: Callable, slots: list) -> None:
    """Its memory may be free as soon as the pass has ended, which may have run on other streams."""
    both, root = both_of(OtherStreams), torch.device(slots[0])
    x, current, other = both.x(), torch.accelerator.current_stream(root), torch.Stream(root)
    for module in both.modules:
        module.eval()
    both.backward(x, False, ["branch.weight", "branch.bias"])
    assert both.kept() > 0
    for module in both.modules:
        module.train()
    other.wait_stream(current)
    with other:
        both.backward(x)
    assert both.kept() == 0
    both.net.branch.zero_grad()
    settle()


class Recomputed(nn.Module):
    """Reentrant checkpoints start a pass on each slot, at one time where devices have threads of their own."""

    def __init__(self, root: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4).double().to(root) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_what_a_pass_keeps_is_not_void_while_another_has_yet_to_write_grad(both_of: Callable) -> None:
    both = both_of(Recomputed)
    for step in range(4):
        for are_on in (False, True):
            both.sums_are(are_on)
            for call, _ in both.calls:
                loss(call(both.x(step).requires_grad_())).backward()
        both.compare()
        both.zero_grad()
