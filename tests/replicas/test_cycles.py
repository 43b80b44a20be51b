"""Replicas stay whole as long as a call or a graph needs them, and are freed then, also with the garbage collector off.

Reference counting frees replicas without circles. Of replicas whose attributes form circles, these attributes are
deleted when the call and its graph have ended.
"""

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from circles import Circular, Straight, least
from dataparallel import DataParallel
from freed_later import freed_later

pytestmark = [pytest.mark.usefixtures("no_collector"), freed_later]


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
        return least(lambda: sum(issubclass(type(each), Tensor) for each in gc.get_objects()))

    after_ten = tensors_after(10)
    assert tensors_after(40) <= after_ten


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


def test_a_packed_output_keeps_the_replicas(watch: Callable, root: torch.device) -> None:
    class Packed(Circular):
        def forward(self, x: Any) -> Any:
            if isinstance(x, Tensor):
                return x
            return x._replace(data=checkpoint(self.enter, x.data, use_reentrant=False))

    parallel, _ = watched = watch(Packed())
    packed = pack_sequence([torch.randn(length, 3, device=root) for length in (3, 2, 2, 1)])
    output = parallel(packed)
    output.data.sum().backward()
    assert parallel.module.layer.weight.grad is not None
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


def test_the_source_survives_its_replicas(watch: Callable, root: torch.device) -> None:
    source = Circular()
    parallel, _ = watch(source)
    for _ in range(2):
        parallel(torch.randn(6, 3, device=root)).sum().backward()
    assert source.layer.above == [source]
    assert source.enter.__self__ is source
    assert source(torch.randn(2, 3, device=root)).shape == (2, 3)


@pytest.mark.parametrize(
    "view",
    [
        lambda m: m.layers.values(),
        lambda m: m.layers._modules,
        lambda m: [vars(m.layers)],
    ],
)
def test_a_view_of_a_registry_holds_the_replica(view: Callable, slots: list, root: torch.device) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
            self.me = [self]

        def forward(self, x: Tensor) -> Tensor:
            held = view(self)
            return checkpoint(lambda x: through_layers(held, x), x, use_reentrant=False)

    ran = []

    def through_layers(held: Any, x: Tensor) -> Tensor:
        ran.append(x.device)
        if isinstance(held, list):
            held = held[0]["_modules"].values()
        elif isinstance(held, dict):
            held = held.values()
        for layer in [*held]:
            x = layer(x)
        return x

    module = Viewed().to(root)
    x = torch.randn(6, 3, device=root)
    expected = torch.autograd.grad(module.layers["b"](module.layers["a"](x)).sum(), list(module.parameters()))
    output = DataParallel(module, slots)(x)
    assert len(ran) == len(slots)
    output.sum().backward()
    assert len(ran) == 2 * len(slots), "backward runs the layers again, which only the view leads to"
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


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
