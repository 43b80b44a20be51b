"""Wrong values of options and arguments are found before anything is changed, and the error says which and what.

A value of another type is not taken for a similar one: a string for a flag, a bool for a number, a float for an int.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel, comm, peers, sharded
from dataparallel.arguments import checked
from dataparallel.call.options import CallOptions
from dataparallel.composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_forward_method,
    replicate,
)
from dataparallel.nn import SyncBatchNorm

FORMS: dict[str, Callable[..., Any]] = {
    "DataParallel": DataParallel,
    "replicate": replicate,
    "fully_shard": fully_shard,
}

NO_FLAG = ["no", "", 1, 0, 1.0, [True], torch.tensor([True, False]), nn.Identity()]
NO_INT = ["1", True, numpy.True_, 1.0, numpy.float64(1), [1], math.nan, torch.tensor(1.0), torch.tensor([1, 2])]
NO_NUMBER = ["10", True, numpy.True_, [1], 1j, None, torch.ones(2)]
NOT_ABOVE_0 = [0, -1, -0.5, math.nan, numpy.float64(0)]
NO_DTYPE = ["bfloat16", 16, float, torch.int32]
NO_SLOTS = ["cpu", 3, True, 0.5, torch.device("cpu"), [0.5], [True], [None], [["cpu"]]]

WRONG: dict[str, list[Any]] = {
    "device_ids": NO_SLOTS,
    "devices": NO_SLOTS,
    "output_device": [True, 0.5, ["cpu"], nn.Identity()],
    "dim": [*NO_INT, None],
    "chunk_sizes": [3, "equal", True, [1, True, 1], [1, "2", 1], [1.5, math.nan, 1], [1, 0, 1], [1, -1, 1], [1, 2j, 1]],
    "workers": [*NO_INT, 0, -1],
    "serial": NO_FLAG,
    "compile": ["yes", 1, 0, ["eager"], {"backends": "eager"}],
    "graphs": ["yes", "", 1, 0, 1.0, ["auto"]],
    "scalars": ["max", "", 3, True, ["mean"]],
    "pad": ["left", [0], {"ids": "max"}, torch.zeros(2)],
    "sync_batch_norm": ["yes", "", 1, 0, None, "across_machines"],
    "bucket_cap_mb": [*NO_NUMBER, *NOT_ABOVE_0],
    "first_bucket_mb": [*NO_NUMBER, *NOT_ABOVE_0],
    "broadcast_buffers": [*NO_FLAG, None],
    "average": [*NO_FLAG, None],
    "ignored_modules": [3, "0", "", False, ["0"], [3], [torch.ones(2)]],
    "ignored_params": [3, "0.weight", "", False, ["0.weight"], [3], torch.ones(2), {"0.weight": torch.ones(2)}],
    "process_group": ["gloo", 3, True],
    "mesh": ["cpu", 3, ["cpu"]],
    "reshard_after_forward": ["no", "", 1.0, 0, 1, -2, math.nan, [True]],
    "shard_placement_fn": ["0", 0, 3, False],
    "mp_policy": [None, torch.bfloat16, "bfloat16"],
    "offload_policy": [None, True, "cpu"],
    "units": ["all", "", True, 0, 2],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


@pytest.fixture
def net(root: torch.device) -> Net:
    torch.manual_seed(0)
    return Net().to(root)


def seen_of(module: nn.Module) -> Any:
    """What a form could change: classes, attributes, parameters, buffers and hooks of the tree."""
    return [
        (path, type(child), name, id(value), [*map(id, value.values())] if isinstance(value, dict) else None)
        for path, child in module.named_modules()
        for name, value in vars(child).items()
    ]


def says(error: BaseException, name: str, value: Any) -> bool:
    """True if the message begins with the argument, or one of its entries, and shows it, or one of its entries."""
    entries = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    shown = [repr(each)[:40] for each in (value, *entries)]
    return str(error).startswith((f"{name}=", f"{name}[")) and any(each in str(error) for each in shown)


@pytest.mark.parametrize(
    ("form", "option"),
    [(form, option) for form in FORMS for option in inspect.signature(FORMS[form]).parameters if option != "module"],
)
def test_a_form_refuses_wrong_values_and_the_module_is_as_it_was(
    form: str, option: str, net: Net, slots: list, root: torch.device
) -> None:
    apply, before = FORMS[form], seen_of(net)
    for value in WRONG[option]:
        given = {"sync_batch_norm": True, option: value}
        if option != "devices":
            given.setdefault("device_ids", slots)
        with pytest.raises((TypeError, ValueError)) as caught:
            apply(net, **given)
        assert says(caught.value, option, value), (value, caught.value)
        assert seen_of(net) == before, value
    assert apply(net, device_ids=slots)(torch.ones(9, 4, device=root)).shape == (9, 3)


@pytest.mark.parametrize("form", FORMS)
def test_also_where_there_are_no_devices(
    form: str, net: Net, monkeypatch: pytest.MonkeyPatch, root: torch.device
) -> None:
    monkeypatch.setattr("dataparallel.devices.accelerator_type", lambda: None)
    before = seen_of(net)
    for option in (*CallOptions.assignable, "compile", "graphs"):
        for value in WRONG[option]:
            with pytest.raises((TypeError, ValueError)) as caught:
                FORMS[form](net, **{option: value})
            assert says(caught.value, option, value), (value, caught.value)
            assert seen_of(net) == before, value
    assert FORMS[form](net)(torch.ones(9, 4, device=root)).shape == (9, 3)


RIGHT: dict[str, Any] = {
    "chunk_sizes": [2, 3, 4], "workers": 1, "serial": True, "scalars": "sum", "pad": 0, "output_device": "cpu",
    "dim": 0, "bucket_cap_mb": 1,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_so_does_an_option_that_is_assigned_later(form: str, net: Net, slots: list, root: torch.device) -> None:
    model = FORMS[form](net, device_ids=slots)
    options: CallOptions = model.options if form == "DataParallel" else FORMS[form].state(net).options  # type: ignore[attr-defined]
    for option in options.assignable:
        before = dict(vars(options))
        for value in WRONG[option]:
            with pytest.raises((TypeError, ValueError)) as caught:
                setattr(options, option, value)
            assert says(caught.value, option, value), (value, caught.value)
            assert all(vars(options)[name] is before[name] for name in before)
        setattr(options, option, RIGHT[option])
    assert model(torch.ones(9, 4, device=root)).shape == (9, 3)


def test_an_attribute_of_the_wrapper_is_checked_by_the_call(net: Net, slots: list, root: torch.device) -> None:
    model, x = DataParallel(net, slots), torch.ones(9, 4, device=root)
    for value in WRONG["dim"]:
        model.dim = value
        with pytest.raises(TypeError) as caught:
            model(x)
        assert says(caught.value, "dim", value)
    with pytest.raises(AttributeError, match=r"options\.dim cannot be assigned: write model\.dim"):
        model.options.dim = 0
    model.dim = 0
    assert model(x).shape == (9, 3)


SETTERS: dict[str, tuple[str, list[Any], Any]] = {
    "set_is_last_backward": ("is_last_backward", [*NO_FLAG, None], False),
    "set_requires_gradient_sync": ("requires_gradient_sync", [*NO_FLAG, None], False),
    "set_requires_all_reduce": ("requires_all_reduce", [*NO_FLAG, None], False),
    "set_reshard_after_forward": ("reshard_after_forward", [*WRONG["reshard_after_forward"], None], False),
    "set_reshard_after_backward": ("reshard_after_backward", [*NO_FLAG, None], False),
    "set_unshard_in_backward": ("unshard_in_backward", [*NO_FLAG, None], False),
    "set_gradient_divide_factor": ("factor", [*NO_NUMBER, *NOT_ABOVE_0], 2),
    "set_all_reduce_hook": ("hook", [None, 3, "sum"], lambda shard: None),
    "unshard": ("async_op", [*NO_FLAG, None], False),
}


@pytest.mark.parametrize("setter", SETTERS)
def test_setters_of_a_sharded_module(setter: str, net: Net, slots: list, root: torch.device) -> None:
    model: Any = fully_shard(net, devices=slots)
    argument, wrong, right = SETTERS[setter]
    method, unit = getattr(model, setter), fully_shard.state(model).unit
    calls: list[tuple[str, dict[str, Any]]] = [(argument, {argument: value}) for value in wrong]
    if "recurse" in inspect.signature(method).parameters:
        calls += [("recurse", {argument: right, "recurse": value}) for value in [*NO_FLAG, None]]
    before = dict(vars(unit))
    for name, arguments in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            method(**arguments)
        assert says(caught.value, name, arguments[name]), (arguments, caught.value)
        assert all(vars(unit)[each] is before[each] for each in before)
    method(**{argument: right})
    model(torch.ones(9, 4, device=root)).sum().backward()


def test_methods_of_a_replicated_module(net: Net, slots: list, root: torch.device) -> None:
    model: Any = replicate(net, devices=slots)
    for value in [*NO_FLAG, None]:
        with pytest.raises(TypeError) as caught:
            model.set_requires_gradient_sync(value)
        assert says(caught.value, "flag", value)
    for value in [None, 3, "sum"]:
        with pytest.raises(TypeError) as caught:
            model.register_comm_hook(None, value)
        assert says(caught.value, "hook", value)
    for name, values in {"name": [3, None, ["forward"]], "pad": WRONG["pad"]}.items():
        for value in values:
            with pytest.raises(TypeError) as caught:
                register_forward_method(model, **{"name": "extra_repr", name: value})
            assert says(caught.value, name, value)
    assert "extra_repr" not in vars(type(model))
    model(torch.ones(9, 4, device=root)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def entered(context: Any) -> None:
    with context:
        pytest.fail("the block has begun")


T = torch.ones(4)
FUNCTIONS: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (lambda **a: dataparallel.scatter(T, ["cpu"] * 2, **a), {"dim": WRONG["dim"], "chunk_sizes": WRONG["chunk_sizes"]}),
    (lambda **a: dataparallel.scatter_kwargs((T,), {}, ["cpu"] * 2, **a), {"dim": WRONG["dim"]}),
    (lambda **a: dataparallel.gather([T, T], "cpu", **a), {"dim": WRONG["dim"], "pad": WRONG["pad"]}),
    (
        lambda **a: dataparallel.replicate(nn.Linear(1, 1), **{"devices": ["cpu"] * 2, **a}),
        {"devices": NO_SLOTS, "detach": [*NO_FLAG, None], "bucket_cap_mb": WRONG["bucket_cap_mb"]},
    ),
    (
        lambda **a: dataparallel.parallel_apply([nn.Identity()] * 2, [T, T], devices=["cpu"] * 2, **a),
        {"workers": WRONG["workers"], "serial": NO_FLAG},
    ),
    (
        lambda **a: dataparallel.data_parallel(nn.Identity(), T, **{"device_ids": ["cpu"] * 2, **a}),
        {
            "device_ids": NO_SLOTS,
            "output_device": WRONG["output_device"],
            "dim": WRONG["dim"],
            "module_kwargs": [3, 0, "x", [1]],
        },
    ),
    (lambda **a: dataparallel.prefetch([T], DataParallel(nn.Identity(), ["cpu"]), **a), {"depth": WRONG["workers"]}),
    (lambda **a: dataparallel.samples(**a), {"entries": [T, "ab", 3, None]}),
    (lambda **a: comm.scatter(T, ["cpu"] * 2, **a), {"dim": WRONG["dim"]}),
    (lambda **a: comm.gather([T, T], **a), {"dim": WRONG["dim"]}),
    (lambda **a: comm.broadcast_coalesced([T], ["cpu"] * 2, **a), {"buffer_size": [*WRONG["workers"], 1e7]}),
    (lambda **a: comm.reduce_add_coalesced([[T], [T]], **a), {"buffer_size": [*WRONG["workers"], 1e7]}),
    (
        lambda **a: entered(comm.using(**a)),
        {"transport": ["pigeon", "", 3, True]},
    ),
    (
        lambda **a: peers.all_reduce(T, **a),
        {"op": ["median", "", 3, None, ["sum"]], "across_machines": [*NO_FLAG, None]},
    ),
    (lambda **a: peers.all_gather(T, **a), {"dim": WRONG["dim"]}),
    (lambda **a: peers.broadcast(T, **{"source": 0, **a}), {"source": WRONG["dim"], "across_machines": NO_FLAG}),
    (lambda **a: peers.index(**a), {"across_machines": [*NO_FLAG, None]}),
    (lambda **a: peers.barrier(**a), {"across_machines": [*NO_FLAG, None]}),
    (lambda **a: peers.set_time_limit(**a), {"seconds": [*NO_NUMBER[:-2], torch.ones(2), *NOT_ABOVE_0]}),
    (lambda **a: SyncBatchNorm.convert(nn.BatchNorm1d(2), **a), {"across_machines": [*NO_FLAG, None]}),
    (lambda **a: sharded.allow_gathers(**a), {"allowed": NO_FLAG}),
    (lambda **a: sharded.distribute_tensor(T, ["cpu"] * 2, **a), {"requires_grad": NO_FLAG}),
    (lambda **a: CPUOffloadPolicy(**a), {"pin_memory": [*NO_FLAG, None]}),
    (
        lambda **a: MixedPrecisionPolicy(**a),
        {
            "cast_forward_inputs": [*NO_FLAG, None],
            "param_dtype": NO_DTYPE,
            "reduce_dtype": NO_DTYPE,
            "output_dtype": NO_DTYPE,
        },
    ),
]


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(
    ("function", "argument", "wrong"),
    [(function, name, wrong) for function, arguments in FUNCTIONS for name, wrong in arguments.items()],
)
def test_functions_refuse_wrong_values(function: Callable[..., Any], argument: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**{argument: value})
        assert says(caught.value, argument, value), (value, caught.value)


@pytest.mark.devices("cpu")
def test_every_flag_and_number_of_the_public_functions_is_among_them() -> None:
    """One that is added later and is not checked fails here."""
    tested = {name for _, arguments in FUNCTIONS for name in arguments} | WRONG.keys()
    modules: list[tuple[Any, Any]] = [
        (dataparallel, dataparallel.__all__),
        (peers, peers.__all__),
        (sharded, sharded.__all__),
    ]
    for module, names in modules:
        for name in names:
            found = getattr(module, name)
            if not inspect.isfunction(found):
                continue
            for parameter in inspect.signature(found).parameters.values():
                annotation = str(parameter.annotation)
                if annotation in ("bool", "int", "float", "bool | None", "int | None", "float | None"):
                    assert parameter.name in tested | {"preserve_rng_state"}, f"{name}({parameter.name}: {annotation})"


def test_numbers_of_numpy_and_torch_are_numbers(net: Net, slots: list, root: torch.device) -> None:
    model = DataParallel(
        net,
        slots,
        dim=numpy.int64(0),  # type: ignore[arg-type]
        chunk_sizes=torch.Size([2, 3, 4]),
        workers=torch.tensor(2),  # type: ignore[arg-type]
        serial=numpy.True_,  # type: ignore[arg-type]
        bucket_cap_mb=numpy.float32(0.5),  # type: ignore[arg-type]
    )
    options = model.options
    assert [model.dim, options.workers, options.serial, options.bucket_cap_mb] == [0, 2, True, 0.5]
    kinds = [type(each) for each in (model.dim, options.workers, options.serial, options.bucket_cap_mb)]
    assert kinds == [int, int, bool, float]
    options.chunk_sizes = numpy.array([2, 2, 5])  # type: ignore[assignment]
    assert options.chunk_sizes == (2, 2, 5)
    assert model(torch.ones(9, 4, device=root)).shape == (9, 3)


@pytest.mark.devices("cpu")
def test_a_large_value_is_cut_in_the_message() -> None:
    with pytest.raises(TypeError) as caught:
        checked("dim", "9" * 1000, int)
    assert len(str(caught.value)) < 300
