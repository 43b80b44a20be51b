"""Hooks on a bucket's nodes may look. They may change gradients only where no envelope carries them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from buckets import broadcast, check, expected, loss_of


def node_of(copies: list[tuple[Tensor, ...]], name: str) -> Any:
    """The first slot's `OnSlot`, `ToSlots` or `FromSource`."""
    node = copies[0][0].grad_fn
    while node.name() != f"{name}Backward":
        node = node.next_functions[0][0]
    return node


NAMES = ["OnSlot", "ToSlots", "FromSource"]


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
