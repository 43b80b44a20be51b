"""Programs subclass `DataParallel` with names of their own: a wrapper has torch's names, and one private object."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel import DataParallel, prefetch
from dataparallel.devices import device_id, resolve
from dataparallel.forms.data_parallel import WrapperOptions

SET = {"module", "device_ids", "output_device", "src_device_obj", "dim"}
TORCHS = {*dir(nn.DataParallel), *vars(nn.Module()), *SET}
OPTIONS = {
    name
    for name, each in inspect.signature(DataParallel).parameters.items()
    if each.kind is each.KEYWORD_ONLY and name != "devices"  # another name of device_ids
}
INSIDE = {*vars(DataParallel(nn.Identity(), ["cpu"] * 2).options), *dir(WrapperOptions)}
FORMER = {"_loss", "_split", "_scalars", "_pad", "_permits", "_checks", "_kept", "_compile", "_stages", "_call_options"}
NAMES = sorted(
    name
    for name in {*OPTIONS, *INSIDE, *(f"_{each}" for each in INSIDE), *FORMER, "frozen", "options"}
    if "__" not in name and name not in TORCHS
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        for name in NAMES:
            vars(self)[name] = f"{name} of the module"

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.tanh(self.linear(x))
        return output


@pytest.fixture
def net(root: torch.device) -> Net:
    return Net().double().to(root)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.randn(7, 4, dtype=torch.float64).to(root)


def handed_on(self: Any, name: str) -> Any:
    """What programs write to have the wrapper look like the module."""
    try:
        return super(type(self), self).__getattr__(name)
    except AttributeError:
        return getattr(self.module, name)


def trains_as_one_device(model: Any, net: nn.Module, x: Tensor) -> None:
    for parameter in net.parameters():
        parameter.grad = None
    net(x).square().mean().backward()
    expected = [parameter.grad for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = None
    (batch,) = prefetch([x], model)
    model(batch).square().mean().backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x))


def test_the_wrapper_has_torchs_names_and_one_private_object(net: Net, slots: list) -> None:
    model = DataParallel(net, slots)
    ours = {*dir(DataParallel), *vars(model)} - TORCHS - {*dir(nn.Module)}  # other libraries add names to that class
    assert ours - {"__getstate__"} == {"_dataparallel"}


def test_no_tensor_takes_the_name_of_the_options(net: Net, slots: list, x: Tensor) -> None:
    model: Any = DataParallel(net, slots)
    for register in (model.register_buffer, model.register_parameter, model.__setattr__):
        with pytest.raises(KeyError, match="attribute 'options' already exists"):
            register("options", nn.Parameter(torch.ones(1)))
    model.options = "the program's"
    del model.options
    assert model.options.chunk_sizes is None
    trains_as_one_device(model, net, x)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_options_of_its_own(copied: Any, net: Net, slots: list, x: Tensor) -> None:
    model = DataParallel(net, slots, chunk_sizes=[3, 2, 2], serial=True)
    other = copied(model)
    other.options.chunk_sizes, other.options.serial = None, False
    assert (model.options.chunk_sizes, model.options.serial) == ((3, 2, 2), True)
    with model.options.frozen():
        trains_as_one_device(other, other.module, x)
    trains_as_one_device(model, net, x)


USES = ("before init", "after init", "class attribute", "property", "method", "module")


@pytest.mark.parametrize("hands_on", [False, True], ids=["", "hands names on"])
def test_a_subclass_uses_any_name_for_anything(hands_on: bool, net: Net, slots: list, x: Tensor) -> None:
    @settings(max_examples=20)
    @given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(USES)))
    def check(uses: dict[str, str]) -> None:
        def init(self: Any) -> None:
            for name, use in uses.items():
                if use == "before init":
                    setattr(self, name, f"own {name}")
            super(type(self), self).__init__(net, slots)
            for name, use in uses.items():
                if use == "after init":
                    setattr(self, name, f"own {name}")
                elif use == "module":
                    setattr(self, name, nn.Identity())

        body: dict[str, Any] = {"__init__": init, **({"__getattr__": handed_on} if hands_on else {})}
        for name, use in uses.items():
            if use == "class attribute":
                body[name] = f"own {name}"
            elif use == "property":
                body[name] = property(lambda self, name=name: f"own {name}")
            elif use == "method":
                body[name] = lambda self, name=name: f"own {name}"
        model = type("Own", (DataParallel,), body)()
        for _ in range(2):
            for name in NAMES:
                if name in uses:
                    found = getattr(model, name)
                    own = found() if uses[name] == "method" else found
                    assert type(own) is nn.Identity if uses[name] == "module" else own == f"own {name}"
                elif hands_on:
                    assert getattr(model, name) == f"{name} of the module"
                elif name != "options":
                    assert not hasattr(model, name)
            trains_as_one_device(model, net, x)

    check()


@pytest.mark.parametrize("hands_on", [False, True], ids=["", "hands names on"])
def test_torchs_attributes_are_enough(hands_on: bool, net: Net, slots: list, x: Tensor) -> None:
    """A subclass that calls no ``__init__`` of the wrapper's."""

    class ByHand(DataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.module, self.dim = net, 0
            self.device_ids = [device_id(resolve(slot)) for slot in slots]
            self.output_device, self.src_device_obj = self.device_ids[0], resolve(slots[0])

    if hands_on:
        ByHand.__getattr__ = handed_on
    model = ByHand()
    trains_as_one_device(model, net, x)
    if not hands_on:  # which finds the module's own `options`
        model.options.chunk_sizes = [1, 4, 2]
        trains_as_one_device(model, net, x)
        model.options.chunk_sizes = None
    model.device_ids = []
    trains_as_one_device(model, net, x)


GIVEN: dict[str, Any] = {
    "chunk_sizes": (3, 2, 2),
    "workers": 1,
    "serial": True,
    "bucket_cap_mb": 2.0,
    "scalars": "sum",
    "pad": {"ids": 0},
    "compile": False,
    "graphs": None,
    "sync_batch_norm": True,
}


def test_every_option_can_be_read_and_is_kept_by_copies(net: Net, slots: list) -> None:
    assert GIVEN.keys() == OPTIONS
    model = DataParallel(net, slots, **GIVEN)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert {name: getattr(each.options, name) for name in OPTIONS} == GIVEN


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),  # others are in tests/test_arguments
    [
        ("chunk_sizes", [1, 2], ValueError, "has 2 entries for 3 slots"),
        ("compile", True, AttributeError, "pass other options where you give the module its form"),
        ("chunk_size", [1, 2, 4], AttributeError, "one may assign chunk_sizes, workers"),
        ("output_device", 0, AttributeError, "write model.output_device, as in torch"),
        ("dim", 1, AttributeError, "write model.dim, as in torch"),
    ],
)
def test_a_bad_value_is_refused_when_it_is_assigned(
    name: str, value: Any, error: type[Exception], says: str, net: Net, slots: list
) -> None:
    model = DataParallel(net, slots)
    before = {each: getattr(model.options, each) for each in OPTIONS}
    with pytest.raises(error, match=says):
        setattr(model.options, name, value)
    assert {each: getattr(model.options, each) for each in OPTIONS} == before
