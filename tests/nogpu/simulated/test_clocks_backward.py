"""Memory that one thread of a backward frees while another thread allocates from the same stream.

The engine has a thread for each device. A node may read a gradient of another device on a stream on which it was not
allocated. As soon as the node has run, the memory returns to the stream on which it was. The other device's thread may
launch at any time, so the result of the clocks must not depend on which thread is faster.
"""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.devices("sim")

HERE, THERE = "sim:0", "sim:1"
PATIENCE = 20.0
Order = tuple[threading.Event, threading.Event]


@pytest.fixture
def order() -> Order:
    """Two events: THERE's thread has allocated memory; HERE's thread has freed the gradient."""
    return threading.Event(), threading.Event()


@pytest.fixture
def side() -> Iterator[torch.Stream]:
    """The current stream of THERE in this thread. The engine's thread for HERE uses THERE's default stream."""
    stream, here = torch.Stream(THERE), torch.accelerator.current_device_index()
    with torch.sim.stream(stream):
        torch.accelerator.set_device_index(here)
        yield stream


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE), "the engine runs the nodes in another order than this test expects"


class Fork(torch.autograd.Function):
    """Returns a tensor of HERE on HERE and on THERE. Its backward, in HERE's thread, adds both gradients on HERE."""

    @staticmethod
    def forward(ctx, x, side, guard, may_begin):
        ctx.side, ctx.guard, ctx.may_begin = side, guard, may_begin
        return x * 1, x.to(THERE)

    @staticmethod
    def backward(ctx, here, there):
        wait_for(ctx.may_begin)
        total = here + there.to(HERE)  # on THERE's default stream, which HERE's stream waits for
        ctx.guard(there, ctx.side)
        return total, None, None, None


def loss_of(
    side: torch.Stream,
    order: Order,
    first: str,
    guard: Callable[[Tensor, torch.Stream], None] = lambda gradient, side: None,
    branch_is_last: bool = True,
) -> Tensor:
    """A loss on THERE with two branches: one through `Fork`, and one that stays on THERE and allocates in backward.

    The engine runs the nodes that were made last first. ``first`` says which branch goes first where both could run.
    """
    taken, freed = order
    at_once = threading.Event()
    at_once.set()
    x = torch.ones(4, 3, device=HERE, requires_grad=True)
    before = x * 1
    before.register_hook(lambda gradient: freed.set())
    leaf = torch.ones(4, 3, device=THERE, requires_grad=True)

    def branch() -> Tensor:
        result = (leaf * 2).exp()
        result.register_hook(lambda gradient: wait_for(at_once if first == "taken" else freed))
        leaf.register_hook(lambda gradient: taken.set())
        return result

    alone = branch() if branch_is_last else None
    on_here, on_there = Fork.apply(before, side, guard, taken if first == "taken" else at_once)
    through_fork = on_there * 3
    if alone is None:
        alone = branch()
    # The gradient on HERE itself is computed before all others.
    return torch.add(through_fork * 2, alone, alpha=3).sum() + on_here.sum().to(THERE)


def too_early():
    return pytest.raises(
        RuntimeError,
        match=r"freed too early: memory in sim:1 .* stream \d+ of sim:1.*_copy_from.* default stream of sim",
    )


@pytest.mark.parametrize("first", ["taken", "freed"])
def test_a_gradient_freed_while_its_devices_thread_takes_memory(side: torch.Stream, order: Order, first: str) -> None:
    """It raises whichever thread is faster."""
    with too_early():
        loss_of(side, order, first).backward()
        # This orders later work only. The other branch may have been given the memory before.
        side.wait_stream(torch.sim.default_stream(THERE))
        torch.sim.check_clocks()
    torch.sim.check_clocks()  # reported once
    torch.sim.synchronize(THERE)


GUARDS = {
    "record_stream": lambda gradient, side: gradient.record_stream(torch.sim.default_stream(THERE)),
    "wait_stream": lambda gradient, side: side.wait_stream(torch.sim.default_stream(THERE)),
    "synchronize": lambda gradient, side: torch.sim.default_stream(THERE).synchronize(),
}


@pytest.mark.parametrize("first", ["taken", "freed"])
@pytest.mark.parametrize("guard", GUARDS)
def test_a_gradient_that_is_freed_in_order(side: torch.Stream, order: Order, first: str, guard: str) -> None:
    loss_of(side, order, first, GUARDS[guard]).backward()
    torch.sim.check_clocks()
    torch.sim.synchronize(THERE)


def test_what_a_thread_did_before_it_handed_the_gradient_over_is_no_hazard(side: torch.Stream, order: Order) -> None:
    """In every run it has allocated before that."""
    loss_of(side, order, "taken", branch_is_last=False).backward()
    side.wait_stream(torch.sim.default_stream(THERE))
    torch.sim.check_clocks()
    torch.sim.synchronize(THERE)
