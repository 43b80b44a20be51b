"""Calls without a graph, one after the other: nothing of the last call is in the next.

Tests of tensors are in test_tensor_stores, of what somebody else holds in test_kept_replicas_held, of `frozen` in
test_kept_replicas_frozen, of the changes of a tree that are noticed in test_snapshot.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel import DataParallel, scatter_kwargs
from dataparallel.testing.cases import Case
from dataparallel.testing.models import CASES
from nets import DOES, Net, build, on_one_device


def constant_layer(net: Net) -> nn.Linear:
    layer = nn.Linear(4, 4).to(net.shift)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.1)
    return layer


MUTATIONS: dict[str, Callable[[Net], Any]] = {
    "copy_": lambda net: net.linear.weight.detach().copy_(net.linear.weight * 2),
    "data.fill_": lambda net: net.linear.weight.data.fill_(0.3),
    "data =": lambda net: setattr(net.linear.weight, "data", net.linear.weight.data * 0.5),
    "data = other strides": lambda net: setattr(net.linear.weight, "data", net.linear.weight.data.t()),
    "load_state_dict": lambda net: net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()}),
    "load_state_dict, assign": lambda net: net.load_state_dict(
        {k: v * 0.5 for k, v in net.state_dict().items()}, assign=True
    ),
    "a swapped parameter": lambda net: setattr(net.linear, "weight", nn.Parameter(net.linear.weight.detach() + 1)),
    "no bias": lambda net: setattr(net.linear, "bias", None),
    "a tie": lambda net: setattr(net.linear, "weight", net.inner[0].weight),
    "a child replaced": lambda net: net.inner.__setitem__(1, nn.ReLU()) if len(net.inner) > 1 else None,
    "a child added": lambda net: net.inner.append(constant_layer(net)),
    "a child removed": lambda net: net.inner.__delitem__(-1) if len(net.inner) > 1 else None,
    "an attribute": lambda net: setattr(net, "scale", net.scale + 1),
    "an attribute more": lambda net: setattr(net, f"more{len(vars(net))}", 1),
    "another mode": lambda net: net.train(not net.training),
    "a hook": lambda net: setattr(net, "handle", net.linear.register_forward_hook(lambda m, args, y: y * 2)),
    "no hook": lambda net: vars(net).pop("handle").remove() if "handle" in vars(net) else None,
    "a pre-hook": lambda net: setattr(net, "handle", net.linear.register_forward_pre_hook(lambda m, a: (a[0] + 1,))),
    "another forward": lambda net: setattr(net.linear, "forward", net.inner[0].forward),
    "requires_grad": lambda net: net.linear.requires_grad_(not net.linear.weight.requires_grad),
    "a buffer in place": lambda net: net.shift.add_(1),
    "another buffer": lambda net: setattr(net, "shift", net.shift * 2),
    "a buffer more": lambda net: net.linear.register_buffer("late", torch.ones_like(net.shift)),
    "another dtype and back": lambda net: net.float().double(),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_change_is_seen_at_the_next_forward(mutate, net, wrapped, call, x) -> None:
    call()
    call()
    for _ in range(2):
        mutate(net)
        for _ in range(2):
            torch.testing.assert_close(call(), on_one_device(net, x), rtol=0, atol=1e-9)


@given(st.lists(st.sampled_from([*MUTATIONS, "call", "inference", "step", "frozen"]), max_size=12))
def test_any_changes_and_calls_in_any_order(slots, root, x, names) -> None:
    net = build(root)
    wrapped = DataParallel(net, slots)
    for name in names:
        if name in MUTATIONS:
            MUTATIONS[name](net)
        elif name == "step":
            wrapped(x).sum().backward()
        elif name == "frozen":
            with wrapped.options.frozen(), torch.no_grad():
                torch.testing.assert_close(wrapped(x), net(x), rtol=0, atol=1e-9)
        with torch.inference_mode() if name == "inference" else torch.no_grad():
            torch.testing.assert_close(wrapped(x), net(x), rtol=0, atol=1e-9)


def by_chunks(twin: nn.Module, count: int, args: tuple, kwargs: dict) -> Tensor:
    """What the module gives for each chunk. Only the first one leaves something in its buffers, as replicas do."""
    chunks = zip(*scatter_kwargs(args, kwargs, [next(twin.parameters()).device] * count), strict=True)
    modules = [twin, *(copy.deepcopy(twin) for _ in range(count - 1))]
    return torch.cat([module(*own, **keywords) for module, (own, keywords) in zip(modules, chunks, strict=True)])


@pytest.mark.slots(3, long=[8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls_without_a_graph_equal_one_device(case: Case, slots: list, root: torch.device) -> None:
    source, twin = (case.build().to(root).train(case.by_chunks) for _ in range(2))
    wrapped = DataParallel(source, slots, dim=case.dim)
    for step in range(3):
        args, kwargs = case.batch(2 * len(slots), step)
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(root), (args, kwargs))
        with torch.no_grad():
            for module in (source, twin):
                for index, parameter in enumerate(module.parameters()):
                    parameter.data += 0.01 * (index + step)
            found = wrapped(*args, **kwargs)
            expected = by_chunks(twin, len(slots), args, kwargs) if case.by_chunks else twin(*args, **kwargs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    if case.by_chunks:
        assert not torch.equal(found, twin(*args, **kwargs)), "the samples of a chunk see each other"


class Other(Net):
    pass


def swap_persistence(replica: nn.Module) -> None:
    replica.register_buffer("scratch", replica.shift.clone())
    replica.register_buffer("shift", replica.shift.clone(), persistent=False)


def rename(attributes: dict[str, Any], name: str, other: str) -> None:
    """Everything else stays, the order too."""
    items = [*attributes.items()]
    attributes.clear()
    attributes.update({other if key == name else key: value for key, value in items})


def assign(name: str, value: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    return lambda replica: setattr(replica.linear.weight, name, value(replica.linear.weight))


@torch.enable_grad()
def hooked(replica: nn.Module) -> None:
    replica.linear.weight.register_hook(lambda grad: grad)


@torch.enable_grad()
def hooked_after(replica: nn.Module) -> None:
    replica.linear.bias.register_post_accumulate_grad_hook(lambda parameter: None)


@torch.enable_grad()
def no_leaf(replica: nn.Module) -> None:
    if replica.shift.device.index and not torch.is_inference_mode_enabled():
        replica.linear.weight.requires_grad_(False)
        replica.linear.weight.add_(torch.ones((), device=replica.shift.device, requires_grad=True))


def other_dtype(replica: nn.Module) -> None:
    if replica.shift.device.index:
        replica.shift.data = replica.shift.data.view(torch.int32)


def elsewhere_in_place(replica: nn.Module) -> None:
    if replica.shift.device.index:
        with torch.no_grad():
            replica.linear.weight.zero_()
            replica.shift.zero_()


LEAVES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda replica: setattr(replica, "left", 1),
    "a changed attribute": lambda replica: setattr(replica, "scale", 0.0),
    "an attribute of the last module": lambda replica: setattr(replica.inner[1], "left", 1),
    "another name": lambda replica: rename(vars(replica), "scale", "left"),
    "no attribute": lambda replica: delattr(replica, "scale"),
    "a buffer": lambda replica: replica.linear.register_buffer("left", torch.ones(1)),
    "another buffer": lambda replica: setattr(replica, "scratch", replica.shift * 0),
    "a parameter": lambda replica: replica.register_parameter("left", nn.Parameter(torch.ones(1))),
    "another parameter": lambda replica: setattr(replica.linear, "weight", nn.Parameter(torch.ones(1))),
    "no parameter": lambda replica: delattr(replica.linear, "weight"),
    "a child": lambda replica: replica.inner[1].add_module("left", nn.ReLU()),
    "another child": lambda replica: replica.inner.__setitem__(0, nn.ReLU()),
    "no child": lambda replica: delattr(replica, "linear"),
    "a hook": lambda replica: replica.linear.register_forward_hook(lambda m, args, y: y * 0),
    "another mode": lambda replica: replica.train(not replica.training),
    "another class": lambda replica: setattr(replica, "__class__", Other),
    "other non-persistent buffers": swap_persistence,
    "other registries": lambda replica: vars(replica).update(_parameters={}, _modules={}),
    "requires_grad": lambda replica: replica.requires_grad_(False),
    "a gradient": lambda replica: setattr(replica.linear.weight, "grad", torch.zeros_like(replica.linear.weight)),
    "data =": assign("data", lambda weight: weight.data * 0),
    "data = the same memory transposed": assign("data", lambda weight: weight.data.t()),
    "data = a part": lambda replica: setattr(replica.linear.bias, "data", replica.linear.bias.data[:1]),
    "data = a neighbour": lambda replica: setattr(
        replica.linear.bias, "data", replica.linear.bias.data.as_strided((4,), (1,), 0)
    ),
    "data = no elements elsewhere": lambda replica: (
        setattr(replica.none, "data", torch.empty(0, dtype=torch.float64)) if replica.none.device.index else None
    ),
    "data = conjugated": lambda replica: setattr(replica.phase, "data", replica.phase.data.conj()),
    "data = another dtype": other_dtype,
    "a python attribute": assign("note", lambda weight: weight.device),
    "another class of a parameter": assign("__class__", lambda weight: type("Other", (nn.Parameter,), {})),
    "a hook of a parameter": hooked,
    "a hook for later": hooked_after,
    "no leaf": no_leaf,
    "in place": elsewhere_in_place,
}


def look(replica: nn.Module) -> list[Any]:
    """All of a replica but its values and its memory."""
    modules = [
        (
            name,
            type(module),
            {key: value for key, value in vars(module).items() if key[0] != "_"},
            {*module._non_persistent_buffers_set},
            [[*registry] for registry in (module._parameters, module._buffers, module._modules)],
            len(module._forward_hooks),
        )
        for name, module in replica.named_modules()
    ]
    tensors = [
        (type(t), t.dtype, t.device == replica.fixed.device, t.shape, t.stride(), t.storage_offset(), t.requires_grad,
         t.is_leaf, t.is_conj(), t.grad if t.is_leaf else 0, {**vars(t)}, t._backward_hooks,
         t._post_accumulate_grad_hooks)
        for t in (*replica.parameters(), *replica.buffers())
    ]  # fmt: skip
    return [modules, str(tensors)]


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES.keys())
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_what_a_forward_leaves_on_its_replica_is_dropped(leave, fails, net, wrapped, call, x) -> None:
    clean: list[Any] = []
    DOES.append(lambda replica: clean.append(look(replica)))
    call()
    for _ in range(2):
        DOES[:] = [leave, *([lambda replica: 1 / 0] if fails else [])]
        try:
            call()
        except ZeroDivisionError:
            assert fails
        except RuntimeError:
            pass  # shapes do not fit any more
        else:
            assert not fails
        after: list[Any] = []
        DOES[:] = [lambda replica, after=after: after.append(look(replica))]
        torch.testing.assert_close(call(), on_one_device(net, x), rtol=0, atol=1e-9)
        assert sorted(map(str, after)) == sorted(map(str, clean))


def test_a_wrapper_inside_a_wrapped_module(net, slots, x, without_graph) -> None:
    inside = nn.Sequential(DataParallel(net, [slots[0]] * 2), nn.Tanh())
    outer = DataParallel(inside, [slots[0]] * 2)
    for _ in range(3):
        net.linear.weight.data.mul_(1.5)
        with without_graph():
            torch.testing.assert_close(outer(x), on_one_device(nn.Sequential(net, nn.Tanh()), x))


def test_calls_from_several_threads(net, wrapped, root, without_graph) -> None:
    batches = [torch.randn(n, 4, dtype=torch.float64).to(root) for n in (3, 5, 7, 9)]
    expected = [on_one_device(net, batch) for batch in batches]
    failed: list[BaseException] = []

    def run(n: int) -> None:
        try:
            for _ in range(25):
                with without_graph():
                    torch.testing.assert_close(wrapped(batches[n]), expected[n], rtol=0, atol=1e-9)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_replicas_of_the_stage_alone_leave_nothing_either(net, wrapped, slots, without_graph) -> None:
    with without_graph():
        for _ in range(3):
            replicas = wrapped.replicate(net, slots)
            assert not any(vars(replica.linear.weight) for replica in replicas)
            for replica in replicas:
                replica.linear.weight.note = 1
            del replica, replicas


@pytest.mark.devices("sim", "cuda")
def test_other_devices(wrapped, call) -> None:
    seen = []
    DOES.append(lambda replica: seen.append(replica.shift.device.index))
    for ids in ([0, 1, 2], [0, 2, 1], [0, 1, 1, 2], [0, 0, 3]):
        wrapped.device_ids = ids
        seen.clear()
        call()
        assert sorted(seen) == sorted(ids)
