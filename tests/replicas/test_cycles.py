"""Replicas stay whole as long as a call or a graph needs them, and are freed then, also with the garbage collector off.

Reference counting frees replicas without circles. Of replicas whose attributes form circles, these attributes are
deleted when the call and its graph have ended.
"""

import gc
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel
from freed_later import freed_later

pytestmark = freed_later


class Straight(nn.Module):
    """No attribute leads to a module; the recurrent layer's lead to tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rnn = nn.Linear(3, 3), nn.GRU(3, 3)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.rnn(self.layer(x))[0])

    def forward(self, x: Tensor) -> Any:
        # Recomputed in backward: the replica has to be there then.
        return checkpoint(self.block, x, use_reentrant=False)


class Circular(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.layer.above = [self]
        self.enter = self.block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.enter, x, use_reentrant=False)


def least(count: Callable[[], int]) -> int:
    """The least of the counts in a moment: a thread of the engine may be late to drop its part of a graph."""
    counts = [count()]
    while counts[-1] and len(counts) < 10:
        time.sleep(0.01)
        counts.append(count())
    return min(counts)


class Watch(NamedTuple):
    """A wrapper, and weak references to all modules of all replicas it has made."""

    parallel: DataParallel
    replicas: list[weakref.ref]

    def alive(self) -> int:
        return least(lambda: sum(replica() is not None for replica in self.replicas))

    def intact(self) -> int:
        """Replicas that still have their attributes."""
        return sum(bool(vars(module)) for ref in self.replicas if (module := ref()) is not None)


@pytest.fixture(autouse=True)
def another_checkpoint_was_first(no_collector: None) -> None:
    """That of a process imports the compiler, and circles made by that hold the frames of the call."""
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    gc.collect()


class OwnStage(DataParallel):
    def replicate(self, *args: Any) -> Any:
        return super().replicate(*args)


@pytest.fixture(params=[DataParallel, OwnStage])
def watch(request: pytest.FixtureRequest, slots: list, root: torch.device) -> Callable[[nn.Module], Watch]:
    """A function from a module to a wrapper under watch."""

    def make(module: nn.Module) -> Watch:
        seen: list[weakref.ref] = []
        module.register_forward_pre_hook(lambda replica, _: seen.extend(map(weakref.ref, replica.modules())))
        return Watch(request.param(module.to(root), slots), seen)

    return make


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
        assert watched.alive() == 0


@pytest.mark.parametrize("cls", [Straight, Circular, BoundForward, Hooked])
def test_what_no_checkpoint_needs_is_freed_with_the_graph(cls: Any, watch: Callable, root: torch.device) -> None:
    class Plain(cls):
        def forward(self, x: Tensor) -> Any:
            return self.block(x)

    parallel, _ = watched = watch(Plain())
    output = parallel(torch.randn(6, 3, device=root))
    assert watched.alive() == (0 if cls is Straight else 9)
    output.sum().backward()
    assert watched.alive() == 0
    output = parallel(torch.randn(6, 3, device=root))
    del output
    assert watched.alive() == 0


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


def test_a_second_backward_finds_the_replicas(watch: Callable, root: torch.device) -> None:
    parallel, _ = watched = watch(Circular())
    loss = parallel(torch.randn(6, 3, device=root)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert watched.alive() == 0


def test_one_of_several_outputs_is_enough(watch: Callable, root: torch.device) -> None:
    class Two(Circular):
        def forward(self, x: Tensor) -> Any:
            return {"first": self.layer(x), "rest": [checkpoint(self.enter, x, use_reentrant=False), "text", None]}

    parallel, _ = watched = watch(Two())
    output = parallel(torch.randn(6, 3, device=root))
    kept = output["rest"][0]
    del output
    kept.sum().backward()
    assert watched.alive() == 0


def test_an_opaque_output_keeps_the_replicas(watch: Callable, root: torch.device) -> None:
    class Opaque(Circular):
        def forward(self, x: Tensor) -> Any:
            return types.SimpleNamespace(value=super().forward(x))

    parallel, _ = watch(Opaque())
    outputs = parallel(torch.randn(6, 3, device=root))
    sum(output.value.sum().to(root) for output in outputs).backward()
    assert parallel.module.layer.weight.grad is not None


def test_an_output_kept_on_the_source_keeps_one_step_only(watch: Callable, root: torch.device) -> None:
    parallel, _ = watched = watch(Circular())
    for _ in range(5):
        output = parallel(torch.randn(6, 3, device=root))
        output.sum().backward()
        parallel.module.last = output
        del output
    assert watched.alive() <= 2 * 9


@pytest.mark.parametrize("hold", [lambda m: m, lambda m: m.layer, lambda m: m.block])
def test_what_somebody_holds_keeps_all_but_the_circles(hold: Callable, slots: list, root: torch.device) -> None:
    held = []

    class Holding(Circular):
        def forward(self, x: Tensor) -> Any:
            held.append(hold(self))
            return self.enter(x)

    parallel = DataParallel(Holding().to(root), slots)
    x = torch.randn(6, 3, device=root)
    parallel(x)
    for part in held:
        module = part if isinstance(part, nn.Module) else part.__self__
        layer = module.layer if isinstance(module, Holding) else module
        assert layer(x.to(layer.weight.device)).shape == x.shape
        assert not hasattr(layer, "above")
    alive = weakref.ref(layer)
    del part, module, layer
    held.clear()
    assert alive() is None


def test_a_graph_without_parameters_leaves_circles_to_the_collector(watch: Callable, root: torch.device) -> None:
    """Nothing tells how long it needs the replicas: a checkpoint finds them whole."""
    parallel, _ = watched = watch(Circular().requires_grad_(False))
    x = torch.randn(6, 3, device=root, requires_grad=True)
    output = parallel(x)
    assert watched.intact() == 9
    output.sum().backward()
    assert x.grad is not None
    del output
    gc.collect()
    assert watched.alive() == 0
