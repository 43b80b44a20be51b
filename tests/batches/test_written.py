"""What ``forward`` writes into dicts, lists and dataclasses that it got, the caller finds there, as on one device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel import DataParallel, PerReplica
from dataparallel.composable import fully_shard


@dataclass
class Batch:
    x: Tensor
    hidden: Any = None


class Writer(nn.Module):
    """Returns nothing. ``write`` gets the layer, and the arguments of the call."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.write(self.layer, *args, **kwargs)


def adds(layer: Any, batch: Any) -> None:
    batch["hidden"] = layer(batch["x"])


def removes(layer: Any, batch: Any) -> None:
    batch["hidden"] = layer(batch.pop("x"))


def deeper(layer: Any, batch: Any) -> None:
    batch["inner"][0]["hidden"] = batch["hidden"] = layer(batch["x"])


def returns_it(layer: Any, batch: Any) -> Any:
    batch["hidden"] = layer(batch["x"])
    return batch


def appends(layer: Any, batch: Any) -> None:
    batch.append({"hidden": layer(batch[0])})


def shifts(layer: Any, batch: Any) -> None:
    batch.append(layer(batch[0]))
    del batch[0]


def sets_a_field(layer: Any, batch: Any) -> None:
    batch.hidden = layer(batch.x)


WAYS: dict[str, tuple[Any, Any, Any]] = {
    "an entry": (adds, lambda x: {"x": x}, lambda batch: [batch["hidden"]]),
    "one less": (removes, lambda x: {"x": x, "y": x}, lambda batch: [batch["hidden"], "x" in batch]),
    "in a dict in a list": (
        deeper,
        lambda x: {"x": x, "inner": [{}]},
        lambda batch: [batch["hidden"], batch["inner"][0]["hidden"]],
    ),
    "a dict that is returned": (returns_it, lambda x: {"x": x}, lambda batch: [batch["hidden"]]),
    "an element": (appends, lambda x: [x], lambda batch: [batch[1]["hidden"], len(batch)]),
    "an element at each end": (shifts, lambda x: deque([x, x]), lambda batch: [batch[1], batch[0], len(batch)]),
    "a field": (sets_a_field, Batch, lambda batch: [batch.hidden]),
}


@pytest.mark.slots(1, 3)
@pytest.mark.parametrize(("write", "pack", "found"), WAYS.values(), ids=WAYS.keys())
def test_the_caller_finds_what_one_device_would_write(write, pack, found, form, slots, root) -> None:
    net, x = Writer(write).to(root), torch.randn(7, 4, device=root)
    expected = pack(x)
    net(expected)
    found(expected)[0].square().sum().backward()
    gradient = net.layer.weight.grad
    net.zero_grad()
    model, batch = form(net, slots), pack(x)
    with torch.no_grad():
        model(pack(x))
    model(batch)
    torch.testing.assert_close(found(batch), found(expected))
    found(batch)[0].square().sum().backward()
    sharded: Any = net.layer.weight.grad
    torch.testing.assert_close(sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded, gradient)


def test_an_entry_that_is_returned_too_is_one_tensor(form, slots, root) -> None:
    model, batch = form(Writer(returns_it).to(root), slots), {"x": torch.randn(7, 4, device=root)}
    assert model(batch)["hidden"] is batch["hidden"]


@pytest.mark.slots(1, 3)
def test_a_container_in_two_places_is_one_object_in_each_replica(form, slots, root) -> None:
    def write(layer: Any, inputs: Any, batch: Any, pair: Any) -> None:
        batch["hidden"] = layer(inputs["x"])
        pair[0]["seen"] = inputs["hidden"] + pair[1]["hidden"]

    batch = {"x": torch.randn(7, 4, device=root)}
    net = Writer(write).to(root)
    hidden = net.layer(batch["x"])
    form(net, slots)(batch, batch=batch, pair=(batch, batch))
    torch.testing.assert_close(batch, {"x": batch["x"], "hidden": hidden, "seen": 2 * hidden})


def test_a_list_that_an_earlier_call_has_filled_is_named(form, slots, root) -> None:
    model, filled = form(Writer(lambda layer, x, filled: filled.append(layer(x))).to(root), slots), []
    model(torch.ones(7, 4, device=root), filled)
    with pytest.raises(ValueError, match=r"disagree.*args\[1\]\[0\] has 7.* has to be a new one for each call"):
        model(torch.ones(5, 4, device=root), filled)
    with pytest.raises(ValueError, match="disagree") as caught:
        model(torch.ones(5, 4, device=root), torch.ones(7, 4, device=root))
    assert "for each call" not in str(caught.value)


def test_what_cannot_be_joined_comes_as_one_entry_for_each_replica(form, slots, root) -> None:
    def write(layer: Any, batch: Any) -> None:
        count = len(batch["x"])
        batch.update(table=torch.zeros(count, count), count=count)
        if count == 1:
            batch["last"] = "yes"

    batch: dict[str, Any] = {"x": torch.randn(7, 4, device=root)}
    form(Writer(write).to(root), slots)(batch)
    assert [type(batch[name]) for name in ("table", "count", "last")] == [PerReplica] * 3
    assert [len(table) for table in batch["table"]] == batch["count"] == [3, 3, 1]
    assert batch["last"] == [None, None, "yes"]


def test_scalars_and_outputs_of_other_lengths_follow_the_options_of_the_call(form, slots, root) -> None:
    def write(layer: Any, batch: Any) -> None:
        batch.update(count=batch["x"].new_tensor(len(batch["x"])), longer=batch["x"].new_ones(1, len(batch["x"])))

    batch: dict[str, Any] = {"x": torch.randn(7, 4, device=root)}
    form(Writer(write).to(root), slots, scalars="sum", pad=0.0)(batch)
    assert batch["count"] == 7
    assert batch["longer"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]


def test_nothing_is_written_if_the_call_fails(form, slots, root) -> None:
    def write(layer: Any, batch: Any) -> None:
        batch["hidden"] = batch.pop("x")
        if len(batch["hidden"]) == 1:
            raise ArithmeticError

    batch = {"x": torch.randn(7, 4, device=root)}
    with pytest.raises(ArithmeticError):
        form(Writer(write).to(root), slots)(batch)
    assert [*batch] == ["x"]


def test_units_inside_of_units_write_too(slots, root) -> None:
    """The backward of a unit begins with the gradient of what it has written, not only with those of its outputs."""

    def write(layer: Any, batch: Any) -> Any:
        output = layer(batch["x"])
        batch["hidden"] = batch.get("hidden", 0) + layer(output.tanh())
        batch["weight"] = layer.weight
        return output

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Writer(write) for _ in range(3))

        def forward(self, batch: dict[str, Tensor]) -> Any:
            return [block(batch) for block in self.blocks]

    torch.manual_seed(0)
    net = Chain().to(root)
    x = torch.randn(7, 4, device=root)
    expected = {"x": x}
    net(expected)
    expected["hidden"].square().sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    for block in net.blocks:
        fully_shard(block, devices=slots)
    model, batch = fully_shard(net, devices=slots), {"x": x}
    model(batch)
    torch.testing.assert_close(batch["hidden"], expected["hidden"])
    torch.testing.assert_close(batch["weight"], expected["weight"].repeat(len(slots), 1))
    batch["hidden"].square().sum().backward()
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


@given(
    st.lists(st.tuples(st.sampled_from(["set", "pop", "append", "drop"]), st.integers(0, 3)), max_size=6),
    st.integers(1, 9),
)
def test_any_order_of_writes_leaves_what_one_device_leaves(slots, root, writes, count) -> None:
    def write(layer: Any, batch: dict[str, Any], items: list[Any]) -> None:
        for kind, number in writes:
            if kind == "set":
                batch[str(number)] = batch["x"] * number
            elif kind == "pop":
                batch.pop(str(number), None)
            elif kind == "append":
                items.append(batch["x"] + number)
            elif len(items) > number:
                del items[number]

    x = torch.randn(count, 2, device=root)
    expected, found = ({"x": x, "1": x}, [x]), ({"x": x, "1": x}, [x])
    net = Writer(write).to(root)
    net(*expected)
    DataParallel(net, slots)(*found)
    torch.testing.assert_close(found, expected)
