"""Replicas are freed when nothing needs them, also with the garbage collector off.

Reference counting frees replicas without circles. Replicas whose attributes form circles are taken apart when their
call ends or, if something still uses them, when a later call ends. If reference counts are not trusted (``ownership``),
they are the collector's, which runs before these tests look for replicas then.
"""

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from circles import Circular, Straight, collect_what_is_left_to_the_collector, least
from dataparallel import DataParallel
from dataparallel.replicas.kept_modules import CycleBreaker
from dataparallel.replicate import replicate

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "no_collector")


class BoundForward(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.forward = types.MethodType(type(self).forward, self)


class Hooked(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda module, args, output: output + self.layer.bias)


@pytest.mark.parametrize("cls", [Straight, Circular, BoundForward, Hooked])
def test_replicas_are_there_for_backward_and_freed_after_it(cls: Any, watch: Callable, root: torch.device) -> None:
    parallel, _ = watched = watch(cls())
    x = torch.randn(6, 3, device=root)
    for _ in range(3):
        output = parallel(x)
        assert watched.intact() == 9, "the checkpoints of the last call, and of no other, need its replicas"
        output.sum().backward()
        assert parallel.module.layer.weight.grad is not None
        del output
    watched.end_another_call()
    assert watched.alive() == 0


@pytest.mark.parametrize("cls", [Straight, Circular, BoundForward, Hooked])
def test_what_no_checkpoint_needs_is_freed_when_the_call_ends(cls: Any, watch: Callable, root: torch.device) -> None:
    class Plain(cls):
        def forward(self, x: Tensor) -> Any:
            return self.block(x)

    parallel, _ = watched = watch(Plain())
    output = parallel(torch.randn(6, 3, device=root))
    assert watched.alive() == 0
    output.sum().backward()
    assert parallel.module.layer.weight.grad is not None


def test_without_a_graph_nothing_is_kept(watch: Callable, root: torch.device) -> None:
    parallel, _ = watched = watch(Circular())
    with torch.no_grad():
        output = parallel(torch.randn(6, 3, device=root))
    assert watched.alive() == 0
    assert output.shape == (6, 3)


def test_a_failing_replica_leaves_none_behind(watch: Callable, root: torch.device) -> None:
    class Failing(Circular):
        def forward(self, x: Tensor) -> Any:
            raise ValueError("as asked")

    parallel, _ = watched = watch(Failing())
    with pytest.raises(ValueError, match="as asked"):
        parallel(torch.randn(6, 3, device=root))
    assert watched.alive() == 0


@pytest.mark.reuses("nothing is taken apart otherwise")
def test_only_what_may_be_circular_is_taken_apart(slots: list, root: torch.device) -> None:
    straight, circular = replicate(Straight().to(root), slots), replicate(Circular().to(root), slots)
    watched = [weakref.ref(replica) for replica in circular]
    breaker = CycleBreaker([*straight, *circular])
    assert all(set(vars(Circular())) <= set(vars(replica)) for replica in circular)
    del circular
    del breaker
    assert all(vars(replica) for replica in straight)
    assert not any(replica() for replica in watched)


def test_nothing_is_kept_where_nobody_calls_again(slots: list, root: torch.device) -> None:
    module = Circular().to(root)
    alive = []
    module.layer.register_forward_hook(lambda layer, args, output: alive.append(weakref.ref(layer)))
    output = DataParallel(module, slots)(torch.randn(6, 3, device=root))
    output.sum().backward()
    del output, module
    gc.collect()
    assert alive
    assert not any(reference() for reference in alive)


@pytest.mark.long
def test_fifty_steps_leave_no_more_objects_than_ten(watch: Callable, root: torch.device) -> None:
    parallel, replicas = watch(Circular())
    x = torch.randn(6, 3, device=root)

    def tensors_after(steps: int) -> int:
        for _ in range(steps):
            parallel(x).sum().backward()
        replicas.clear()
        collect_what_is_left_to_the_collector()
        return least(lambda: sum(issubclass(type(each), Tensor) for each in gc.get_objects()))

    after_ten = tensors_after(10)
    assert tensors_after(40) <= after_ten
