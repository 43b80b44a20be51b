"""Memory that captures of one slot share, and when a launch may write over it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from dataparallel.replicas.graphs.pools import BackwardMemory, ForwardPool, Pools
from each_form import Form, replicating_forms
from graphed_nets import SETTLE, Block, Net, build, captured, inputs, step

pytestmark = pytest.mark.devices("cuda")


class Capture:
    """Stands for a capture, which may wait for its backward."""

    is_waiting = False


def pool_of(*captures: Capture) -> Any:
    pool: Any = ForwardPool()
    for each in captures:
        pool.add(each)
    return pool


class TestForwardPool:
    def test_a_launch_waits_for_later_captures_only(self) -> None:
        first, second, third = captures = [Capture() for _ in range(3)]
        pool = pool_of(*captures)
        assert all(map(pool.may_launch, captures))
        second.is_waiting = True
        assert [*map(pool.may_launch, captures)] == [False, True, True]
        second.is_waiting, third.is_waiting = False, True
        assert [*map(pool.may_launch, captures)] == [False, False, True]
        third.is_waiting, first.is_waiting = False, True
        assert all(map(pool.may_launch, captures))

    def test_a_new_capture_comes_after_those_that_wait(self) -> None:
        first, second = captures = [Capture(), Capture()]
        pool = pool_of(*captures)
        first.is_waiting = second.is_waiting = True
        assert pool.is_in_order()
        first.is_waiting = False
        assert not pool.is_in_order()


class TestPools:
    def test_forwards_of_one_call_share_a_pool(self) -> None:
        pools, first = Pools(), Capture()
        pool: Any = pools.for_forward()
        pool.add(first)
        first.is_waiting = True
        assert pools.for_forward() is pool
        first.is_waiting = False
        assert pools.for_forward() is not pool

    def test_a_pool_lives_as_long_as_its_captures(self) -> None:
        pools = Pools()
        pool = weakref.ref(pools.for_forward())
        assert pool() is None

    def test_backwards_of_one_stream_share_memory(self, root: torch.device) -> None:
        pools = Pools()
        stream, other = torch.cuda.current_stream(root), torch.cuda.Stream(root)
        assert pools.for_backward(stream) is pools.for_backward(stream)
        assert pools.for_backward(stream) is not pools.for_backward(other)


class TestBackwardMemory:
    def test_a_buffer_has_room_for_all_tensors_of_a_dtype(self, root: torch.device) -> None:
        memory = BackwardMemory()
        tensors = [torch.empty(2, 3, device=root), torch.empty(5, device=root), torch.empty(4, device=root).double()]
        found = memory.buffers_for(tensors)
        assert {dtype: buffer.numel() for dtype, buffer in found.items()} == {torch.float: 11, torch.double: 4}

    def test_fewer_tensors_have_the_same_buffer_and_more_a_new_one(self, root: torch.device) -> None:
        memory = BackwardMemory()
        large, small, larger = (torch.empty(numel, device=root) for numel in (5, 3, 6))
        before = memory.buffers_for([large])[torch.float]
        assert memory.buffers_for([small])[torch.float] is before
        assert memory.buffers_for([larger])[torch.float].numel() == 6
        assert before.numel() == 5


@replicating_forms
def test_memory_grows_by_what_is_saved(form: Form, slots: list, root: torch.device) -> None:
    """Not by a pool, temporary tensors and gradients for each part."""

    class Deep(Net):
        def __init__(self, blocks: int) -> None:
            super().__init__(by_parts=True)
            self.blocks = torch.nn.ModuleList([Block() for _ in range(blocks)])

    def reserved(blocks: int) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(slots[-1])
        network = form(build(root, lambda: Deep(blocks)), slots, graphs=True)
        for _ in range(SETTLE):
            step(network, inputs(root))
        assert len(captured(network)) == blocks
        return torch.cuda.memory_reserved(slots[-1]) - before

    # A pool takes at least 2 MiB from the device.
    assert reserved(8) - reserved(4) <= 2 << 20
