"""`peers.checkpoint` recomputes with what the collectives returned, and torch's own says that it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dataparallel import DataParallel, peers
from freed_later import FREE_THREADED
from peer_calls import Calls, parallel, samples


def similar(chunk: Tensor, weight: Tensor) -> Tensor:
    """Collectives between operators that save tensors."""
    own = (chunk * weight).tanh()
    everything = peers.all_gather(own).exp()
    return own @ everything.T + peers.all_reduce(own, "max").sin().sum() * peers.all_reduce(own.sum()).cos()


def gradients(wrapped: DataParallel[Calls], batch: Tensor, times: int = 1) -> list[Tensor]:
    """The output, and the gradients of batch and weight after so many backwards of one graph."""
    own = batch.clone().requires_grad_()
    wrapped.module.weight.grad = None
    output = wrapped(own)
    for _ in range(times):
        (output**2).sum().backward(retain_graph=True)
    assert own.grad is not None
    return [output.detach(), own.grad, wrapped.module.weight.grad]


@pytest.fixture
def batch(slots):
    return samples(6).to(slots[0])


@pytest.mark.parametrize("workers", [None, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_are_those_without_it(slots, batch, workers, times):
    kept = parallel(similar, slots, workers=workers)
    recomputed = parallel(lambda chunk, weight: peers.checkpoint(similar, chunk, weight), slots, workers=workers)
    for found, wanted in zip(gradients(recomputed, batch, times), gradients(kept, batch, times), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_dropout_and_autocast_are_repeated(slots, batch):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def part(self, x: Tensor) -> Tensor:
            dropped = nn.functional.dropout(self.linear(x), 0.5)
            return self.linear(peers.all_reduce(dropped.tanh(), "mean"))

        def forward(self, x: Tensor) -> Tensor:
            return peers.checkpoint(self.part, x) if self.recompute else self.part(x)

    torch.manual_seed(0)
    module = Net().to(slots[0])
    results = []
    for module.recompute in (False, True):
        module.zero_grad()
        torch.manual_seed(1)
        if torch.device(slots[0]).type != "cpu":
            torch.accelerator.set_device_index(0)
        with torch.autocast(torch.device(slots[0]).type, torch.bfloat16):
            output = DataParallel(module, slots)(batch.float())
        output.float().sum().backward()
        results.append([parameter.grad.clone() for parameter in module.parameters()])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_outside_of_a_parallel_forward_it_is_torchs_which_works_too(reentrant):
    def checkpointed(whole: Tensor, weight: Tensor) -> Tensor:
        if reentrant is None:
            return peers.checkpoint(similar, whole, weight)
        return torch_checkpoint(similar, whole, weight, use_reentrant=reentrant)

    module, alone, batch = Calls(checkpointed), Calls(similar), samples(4)
    for one in (module, alone):
        one(batch).sum().backward()
    torch.testing.assert_close(module.weight.grad, alone.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_the_whole_call_the_replicas_meet_again(slots, batch, reentrant):
    kept, wrapped = parallel(similar, slots), parallel(similar, slots)
    wanted = gradients(kept, batch)
    for checkpoint in (lambda *a: torch_checkpoint(*a, use_reentrant=reentrant), peers.checkpoint):
        own = batch.clone().requires_grad_()
        wrapped.module.weight.grad = None
        output = checkpoint(wrapped, own)
        (output**2).sum().backward()
        for found, other in zip([output, own.grad, wrapped.module.weight.grad], wanted, strict=True):
            torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(
    FREE_THREADED and torch.__version__ < "2.13",
    reason="a checkpoint that fails leaves its hooks in a thread, where Python frees its frame in another one",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_inside_says_what_to_use(slots, batch, reentrant):
    def inside(chunk: Tensor, weight: Tensor) -> Tensor:
        return torch_checkpoint(similar, chunk, weight, use_reentrant=reentrant)

    with pytest.raises(RuntimeError, match=r"dataparallel\.peers\.checkpoint"):
        parallel(inside, slots)(batch)


def test_a_recomputation_that_does_something_else_is_an_error(slots, batch):
    calls: list[int] = []

    def differs(chunk: Tensor, weight: Tensor) -> Tensor:
        calls.append(peers.index())
        op = "sum" if len(calls) <= 3 else "max"
        return peers.all_reduce((chunk * weight).exp(), op).exp()

    output = parallel(lambda c, w: peers.checkpoint(differs, c, w), slots)(batch)
    with pytest.raises(RuntimeError, match="the same in both"):
        output.sum().backward()
