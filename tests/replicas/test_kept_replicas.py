"""Calls without a graph, one after the other: nothing of the last call is in the next.

What somebody else holds is in test_kept_replicas_held, `frozen` in test_kept_replicas_frozen. On slots of one device
parameters share the source's memory, and the promises hold trivially; distinct devices (``--devices=sim``) show them.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from at_once import in_threads
from dataparallel import DataParallel
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
    "another order": lambda net: net.inner._modules.update({"0": net.inner._modules.pop("0")}),
    "another class": lambda net: setattr(net.inner[1], "__class__", nn.Sigmoid),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_change_is_seen_at_the_next_forward(mutate, net, wrapped, call, x) -> None:
    call()
    call()
    for _ in range(2):
        mutate(net)
        for _ in range(2):
            torch.testing.assert_close(call(), on_one_device(net, x), rtol=0, atol=1e-9)


class Calls:
    """Stands in the place of a method."""

    run: Callable[[Tensor], Tensor] = staticmethod(torch.tanh)

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


class Refers(Net):
    """Adds what its plain attributes lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []
        self.table: dict[str, Any] = {}
        self.ordered: OrderedDict[str, Any] = OrderedDict(a=None)
        self.partial = functools.partial(max, None)
        self.function = lambda: holder
        holder = None
        self.inner[1].forward = Calls()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        held = [*self.items, *self.table.values(), *self.ordered.values(), *self.partial.args, self.function()]
        for each in [*held, getattr(self.function, "owner", None)]:
            if isinstance(each, Refers):
                each = each.linear
            if each is not None:
                y = y + (x @ each if isinstance(each, Tensor) else each(x))
        return y


COME_TO_REFER: dict[str, Callable[[Refers], Any]] = {
    "a list to a child": lambda net: net.items.append(net.linear),
    "a list to a parameter": lambda net: net.items.append(net.linear.weight),
    "a list to a method": lambda net: net.items.append(net.linear.forward),
    "a table to the tree": lambda net: net.table.update(me=net),
    "an ordered dict to a child": lambda net: net.ordered.update(a=net.linear),
    "a partial to a child": lambda net: net.partial.__setstate__((max, (net.linear,), {}, {})),
    "a cell to a child": lambda net: setattr(net.function.__closure__[0], "cell_contents", net.linear),
    "a function's attribute to a child": lambda net: setattr(net.function, "owner", net.linear),
    "an object in the place of a method to a child": lambda net: setattr(net.inner[1].forward, "run", net.linear),
}


@pytest.mark.parametrize("change", COME_TO_REFER.values(), ids=COME_TO_REFER)
def test_attributes_that_come_to_refer_to_the_tree_refer_to_replicas(change, slots, root, x, without_graph) -> None:
    net = build(root, Refers)
    wrapped = DataParallel(net, slots)
    for _ in range(2):
        for _ in range(2):
            with without_graph():
                torch.testing.assert_close(wrapped(x), on_one_device(net, x), rtol=0, atol=1e-9)
        change(net)


def test_what_cannot_be_replicated_any_more_is_refused_at_the_next_forward(net, call, x) -> None:
    net.held = []
    call()
    call()
    net.held.append(torch.compile(net.inner, backend="eager"))
    with pytest.raises(RuntimeError, match=r"cannot replicate .*held.* compiled"):
        call()
    net.held.clear()
    torch.testing.assert_close(call(), on_one_device(net, x))


def test_calls_from_several_threads(net, wrapped, root, without_graph) -> None:
    batches = [torch.randn(n, 4, dtype=torch.float64).to(root) for n in (3, 5, 7, 9)]
    expected = [on_one_device(net, batch) for batch in batches]

    def run(n: int, _: object) -> None:
        for _ in range(25):
            with without_graph():
                torch.testing.assert_close(wrapped(batches[n]), expected[n], rtol=0, atol=1e-9)

    in_threads(4, run)


@pytest.mark.devices("sim", "cuda")
@pytest.mark.apart(4)
def test_other_devices(wrapped, call) -> None:
    seen = []
    DOES.append(lambda replica: seen.append(replica.shift.device.index))
    for ids in ([0, 1, 2], [0, 2, 1], [0, 1, 1, 2], [0, 0, 3]):
        wrapped.device_ids = ids
        seen.clear()
        call()
        assert sorted(seen) == sorted(ids)


def test_a_view_of_data_taken_before_and_written_after(net, call, x) -> None:
    view, version = net.linear.weight.data[1:3], net.linear.weight._version
    for _ in range(2):
        torch.testing.assert_close(call(), on_one_device(net, x))
    view.fill_(7)
    assert net.linear.weight._version == version
    torch.testing.assert_close(call(), on_one_device(net, x))


def test_requires_grad_is_that_of_the_source(net, call) -> None:
    seen = []
    DOES.append(lambda replica: seen.append(replica.linear.weight.requires_grad))
    for needed in (True, False, True):
        net.requires_grad_(needed)
        call()
    assert seen == [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.parametrize("is_made_so", [True, False])
def test_tensors_are_normal_ones_in_every_mode(is_made_so, slots, root, x) -> None:
    """Also if the source was made in inference mode."""
    with torch.inference_mode(is_made_so):
        net = build(root)
    expected, wrapped, seen = on_one_device(net, x), DataParallel(net, slots), []
    DOES.append(lambda replica: seen.extend(t.is_inference() for t in replica.state_dict(keep_vars=True).values()))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(wrapped(x), expected)
    assert is_made_so or seen == [False] * 9 * len(net.state_dict())
