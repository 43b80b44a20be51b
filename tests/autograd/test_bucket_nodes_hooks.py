"""Hooks on a bucket's nodes may look. They may change gradients only where no envelope carries them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from buckets import broadcast, check, expected, loss_of
from dataparallel.autograd.bucket_gradients import GradientStreams, broadcast_bucket
from dataparallel.comm.streams.current import current_streams


def node_of(copies: list[tuple[Tensor, ...]], name: str) -> Any:
    """The first slot's `OnSlot`, `ToSlots` or `FromSource`."""
    node = copies[0][0].grad_fn
    while node.name() != f"{name}Backward":
        node = node.next_functions[0][0]
    return node


NAMES = ["OnSlot", "ToSlots", "FromSource"]


@pytest.mark.parametrize("name", NAMES)
def test_hooks_may_look(name: str, slots: list, root: torch.device, sources: list) -> None:
    seen = []
    copies = broadcast(slots, sources)
    node_of(copies, name).register_prehook(seen.append)
    node_of(copies, name).register_hook(lambda inputs, outputs: seen.append(inputs))
    loss_of(copies, root).backward()
    assert len(seen) == 2
    check(sources, expected(sources, slots))


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad * 1,
        torch.zeros_like,
        lambda grad: grad.mul_(2),
        lambda grad: grad.detach(),
        lambda grad: grad.as_subclass(torch.nn.Buffer),
    ],
    ids=["times", "fresh", "in place", "detached", "subclass"],
)
@pytest.mark.parametrize("name", NAMES[1:])
def test_hooks_that_would_change_gradients_of_many_parameters_are_refused(
    name: str, change: Any, slots: list, root: torch.device, sources: list
) -> None:
    def hook(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else change(grad) for grad in grads)

    copies = broadcast(slots, sources)
    node_of(copies, name).register_prehook(hook)
    with pytest.raises(RuntimeError, match=r"a hook has changed a gradient .*Use Tensor\.register_hook"):
        loss_of(copies, root).backward()
    assert all(source.grad is None for source in sources)


def test_a_hook_on_what_a_slot_brings_is_refused_too(slots: list, root: torch.device, sources: list) -> None:
    copies = broadcast(slots, sources)
    node_of(copies, "OnSlot").register_hook(lambda inputs, outputs: (inputs[0] * 2, *inputs[1:]))
    with pytest.raises(RuntimeError, match="between OnSlotBackward, ToSlotsBackward and FromSourceBackward"):
        loss_of(copies, root).backward()


def test_where_gradients_are_themselves_hooks_change_them(slots: list, root: torch.device, sources: list) -> None:
    """Hooks that the error recommends, and a pre-hook on the slot's node."""
    copies = broadcast(slots, sources)
    copies[0][0].register_hook(lambda grad: grad * 2)  # the first slot's: it counts as two of it
    sources[1].register_hook(lambda grad: grad * 3)
    node_of(copies, "OnSlot").register_prehook(lambda grads: (*grads[:2], None, *grads[3:]))
    loss_of(copies, root).backward()
    wanted = expected(sources, slots)
    total = sum(range(1, len(slots) + 1))
    check(sources, [wanted[0] * (total + 1) / total, wanted[1] * 3, wanted[2] * (total - 1) / total, *wanted[3:]])


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_hook_may_say_that_there_is_no_gradient(name: str, slots: list, root: torch.device, sources: list) -> None:
    copies = broadcast(slots, sources)
    node_of(copies, name).register_prehook(lambda grads: (None, *grads[1:]))
    loss_of(copies, root).backward()
    check(sources, expected(sources, slots, lambda slot, i: slot > 0 and name == "ToSlots"))


@pytest.mark.devices("sim", "stand-in")
def test_what_a_hook_drops_is_not_used_again_before_the_root_has_waited(slots: list, root: torch.device) -> None:
    """Sums are written on side streams, but their memory belongs to the caller's stream."""
    devices = [torch.device(slot) for slot in slots]
    gradient_streams = GradientStreams.for_forward(devices, current_streams(devices))
    losses: list[Tensor] = []

    def drop(grads: tuple[Tensor, ...]) -> tuple[None, ...]:
        torch.ones(16, device=root)  # could get the memory that the hook before this one has dropped
        return (None,)

    for _ in range(4):
        copies = broadcast_bucket(devices, [torch.ones(16, device=root, requires_grad=True)], gradient_streams)
        node_of(copies, "FromSource").register_prehook(drop)
        losses.append(loss_of(copies, root))
    sum(losses).backward()
