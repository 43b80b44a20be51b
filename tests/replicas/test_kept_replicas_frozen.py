"""Inside `frozen` replicas are made once for each call that runs at the same time, and nothing is sent."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from at_once import in_threads
from clocked import check_clocks
from dataparallel import DataParallel
from dataparallel.comm.streams.current import streams_set
from dataparallel.replicas.kept_replicas import MOST_FROZEN
from dataparallel.replicas.replicate import Copies


@pytest.fixture
def net(root) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double().eval().to(root)


@pytest.fixture
def x(root) -> Tensor:
    return torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The number of slots of each set of copies that is made."""
    found: list[int] = []
    original = Copies.send_leaves

    def send_leaves(copies):
        found.append(len(copies.slots))
        original(copies)

    monkeypatch.setattr(Copies, "send_leaves", send_leaves)
    return found


def one_device(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)


def test_replicas_are_made_once(net, wrapped, call, x, made) -> None:
    call()
    made.clear()
    with wrapped.options.frozen():
        for _ in range(5):
            torch.testing.assert_close(call(), one_device(net, x))
        assert made == [3]
        call(2)
        call(1)
        assert made == [3]


@pytest.mark.slots(8)
def test_larger_batches_later(net, wrapped, call, x, made) -> None:
    """However many sizes there have been: the largest serves all."""
    with wrapped.options.frozen():
        for samples in (1, 2, 3, 4, 5, 6, 7, 8):
            torch.testing.assert_close(call(samples), one_device(net, x[:samples]))
        made.clear()
        for samples in (8, 1, 8, 5, 8):
            torch.testing.assert_close(call(samples), one_device(net, x[:samples]))
        assert made == []


def test_blocks_may_be_nested(wrapped, call, made) -> None:
    with wrapped.options.frozen():
        call()
        with wrapped.options.frozen():
            call()
        call()
        assert made == [3]


def test_an_exception_ends_the_block(net, wrapped, call, x) -> None:
    call()
    with pytest.raises(ValueError, match="batch sizes"), wrapped.options.frozen():  # noqa: PT012
        with torch.no_grad():
            replicas = [*map(weakref.ref, wrapped.replicate(net, wrapped.device_ids))]
        assert all(replica() for replica in replicas)
        raise ValueError("batch sizes")
    assert not any(replica() for replica in replicas)
    net[0].weight.data.zero_()
    torch.testing.assert_close(call(), one_device(net, x))


def test_a_failed_call_inside(net, wrapped, call, x) -> None:
    with wrapped.options.frozen():
        call()
        with torch.no_grad(), pytest.raises(RuntimeError):
            wrapped(x[:, :3])
        torch.testing.assert_close(call(), one_device(net, x))


def test_calls_that_run_at_a_time_have_replicas_of_their_own(slots, root, without_graph) -> None:
    threads = MOST_FROZEN + 2
    meet = threading.Barrier(threads, timeout=60)
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen.add(self)
            self.mine = threading.get_ident(), x.device
            if x[0, 0] == 0:  # the first chunk of each batch
                meet.wait()
            assert self.mine == (threading.get_ident(), x.device)
            return self.linear(x)

    module = Meets().to(root)
    wrapped = DataParallel(module, slots, workers=len(slots))
    batch = torch.arange(2.0 * len(slots), device=root).view(-1, 2)
    expected = module.linear(batch).detach()

    def run(*_: object) -> None:
        for _ in range(5):
            with without_graph():
                torch.testing.assert_close(wrapped(batch), expected)

    with wrapped.options.frozen():
        in_threads(threads, run)
        gc.collect()
        assert len(seen) == MOST_FROZEN * len(slots)
    gc.collect()
    assert not seen


@contextmanager
def on_other_streams(streams: dict[torch.device, torch.Stream], root: torch.device) -> Iterator[None]:
    """They and the current ones wait for each other on the root only."""
    before = torch.accelerator.current_stream(root)
    streams[root].wait_stream(before)
    with streams_set(streams):
        yield
    before.wait_stream(streams[root])


@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("frozen", [False, True], ids=["refreshed", "frozen"])
def test_calls_on_other_streams(frozen, calls, net, slots, root, x, without_graph) -> None:
    """Each reads what was written before, and no memory goes back while another stream may still use it."""
    wrapped = DataParallel(net, slots, workers=len(slots))  # without marks on the streams
    expected = one_device(net, x)
    outputs, streams = [], {torch.device(slot): torch.Stream(torch.device(slot)) for slot in slots}
    with without_graph():
        with wrapped.options.frozen() if frozen else nullcontext():
            for _ in range(calls):
                outputs.append(wrapped(x))
                with on_other_streams(streams, root):
                    outputs.append(wrapped(x))
        del wrapped  # and what it keeps
        with on_other_streams(streams, root):
            made = [torch.ones(99, device=slot) for slot in slots]
    check_clocks()
    for slot in slots:
        torch.accelerator.synchronize(slot)
    assert all(bool(ones.all()) for ones in made)
    for output in outputs:
        torch.testing.assert_close(output, expected)
