"""Gradients travel in buckets while backward still runs. The size of buckets changes only the order of events."""

import functools
import importlib

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import dataparallel as dp
from dataparallel import DataParallel
from dataparallel.autograd.bucket_gradients import broadcast_bucket
from dataparallel.testing.models import CASES
from dataparallel.testing.parity import assert_same_training
from graphs import nodes_of
from overlap import Layers, Overlap

WIDTH = 48
LAYER_MB = (WIDTH * WIDTH + WIDTH) * 8 / 2**20
"""One layer in float64 fills a bucket of this size."""


@pytest.mark.alone
@pytest.mark.slots(2, long=[8])
def test_a_bucket_is_summed_before_the_slowest_slot_has_the_gradient_of_its_first_layer(
    slots, root, monkeypatch, capsys
):
    """At least 80 % of them, by the order of events, in the median of ten steps.

    Layers take about a millisecond each: the order is not up to which thread gets a core first.
    """
    width = 192
    overlap = Overlap(monkeypatch)
    model = Layers(20, width, overlap.note_first_layer).double().to(root)
    wrapped = DataParallel(model, slots, bucket_cap_mb=(width * width + width) * 8 / 2**20)
    x = torch.randn(128 * len(slots), width, dtype=torch.float64, device=root)
    share = overlap.median_share(lambda: wrapped(x).square().sum().backward(), len(slots))
    with capsys.disabled():
        print(f" [{share:.0%} of the buckets]", end="")
    assert share >= 0.8


@pytest.mark.devices("cpu")
@pytest.mark.slots(2)
def test_a_sum_is_accumulated_before_the_slowest_slot_has_the_gradient_of_its_first_layer(slots, root):
    """So an optimizer step in backward frees it early. One thread runs all of it here: the order is certain."""
    events = []
    model = Layers(6, WIDTH, note=lambda grad_inputs, grad_outputs: events.append("first layer")).double().to(root)
    model.layers[-1].weight.register_post_accumulate_grad_hook(lambda parameter: events.append("accumulated"))
    x = torch.randn(6, WIDTH, dtype=torch.float64, device=root)
    DataParallel(model, slots, bucket_cap_mb=LAYER_MB)(x).square().sum().backward()
    assert events == ["first layer", "accumulated", "first layer"]


def test_buckets_are_filled_from_the_last_layer_and_are_small_at_both_ends(make_slots, monkeypatch):
    slots = make_slots(2)
    # The package has a function of that name, which hides the module.
    room = importlib.import_module("dataparallel.replicas.replicate")
    monkeypatch.setattr(room, "FIRST_BUCKET_BYTES", int(LAYER_MB * 2**20 / 2))
    model = Layers(5, WIDTH).double().to(slots[0])
    sent = []
    monkeypatch.setattr(
        room,
        "broadcast_bucket",
        lambda *arguments, **named: sent.append(arguments[1]) or broadcast_bucket(*arguments, **named),
    )
    dp.replicate(model, slots, bucket_cap_mb=2 * LAYER_MB)
    position = {parameter.data_ptr(): i for i, parameter in enumerate(model.parameters())}
    buckets = [sorted((position[tensor.data_ptr()] for tensor in tensors), reverse=True) for tensors in sent]
    # Of a layer the bias comes first; its weights alone are more than half of it.
    assert [len(bucket) for bucket in buckets] == [1, 2, 3, 2, 1, 1]
    assert [i for bucket in buckets for i in bucket] == list(range(9, -1, -1))


@pytest.mark.slots(2, 3)
@pytest.mark.parametrize("bucket_cap_mb", [1e-9, LAYER_MB, 25])
def test_a_node_for_each_bucket_and_the_same_bits(slots, root, bucket_cap_mb):
    torch.manual_seed(0)
    model = Layers(4, WIDTH).double().to(root)
    x = torch.randn(7, WIDTH, dtype=torch.float64, device=root)
    reference = torch.autograd.grad(DataParallel(model, slots)(x).square().sum(), list(model.parameters()))
    output = DataParallel(model, slots, bucket_cap_mb=bucket_cap_mb)(x)
    assert [node.name() for node in nodes_of(output)].count("ToSlotsBackward") == {1e-9: 8, LAYER_MB: 5, 25: 1}[
        bucket_cap_mb
    ]
    gradients = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    for gradient, expected in zip(gradients, reference, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.slots(2, long=[3])
def test_gradcheck_and_gradgradcheck_through_several_buckets(slots, root):
    layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double().to(root)
    x = torch.randn(5, 2, dtype=torch.float64, device=root, requires_grad=True)
    wrapped = DataParallel(layer, slots, bucket_cap_mb=1e-9)
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def call(x, *parameters):
        names = [(module, name) for module in (layer[0], layer[2]) for name in ("weight", "bias")]
        for (module, name), parameter in zip(names, parameters, strict=True):
            module._parameters[name] = parameter
        return wrapped(x)

    assert gradcheck(call, (x, *parameters))
    assert gradgradcheck(call, (x, *parameters))


@pytest.mark.slots(2, 3)
def test_gradients_of_some_parameters_only(slots, root):
    """Buckets without a wanted gradient are not summed."""
    model = Layers(4, WIDTH).double().to(root)
    x = torch.randn(6, WIDTH, dtype=torch.float64, device=root)
    wanted = [model.layers[3].bias, model.layers[1].weight]
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    output = DataParallel(model, slots, bucket_cap_mb=1e-9)(x)
    actual = torch.autograd.grad(output.square().sum(), wanted)
    for gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-9)


@pytest.mark.slots(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_the_same_with_a_bucket_for_each_parameter(case, slots):
    assert_same_training(
        case.build,
        [case.batch(7, step) for step in range(2)],
        slots,
        dim=case.dim,
        optimizer=case.optimizer,
        by_chunks=case.by_chunks,
        wrap=functools.partial(DataParallel, bucket_cap_mb=1e-9),
    )


@pytest.mark.slots(2)
def test_without_sequence_numbers_only_the_order_goes(slots, root, monkeypatch):
    monkeypatch.setattr("dataparallel._torch.set_sequence_nr", lambda node, number: None)
    model = Layers(4, WIDTH).double().to(root)
    x = torch.randn(6, WIDTH, dtype=torch.float64, device=root)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    wrapped = DataParallel(model, slots, bucket_cap_mb=LAYER_MB)
    for gradient, reference in zip(
        torch.autograd.grad(wrapped(x).square().sum(), list(model.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-9)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("bucket_cap_mb", [0, -1, float("nan")])
@pytest.mark.parametrize("wrap", [DataParallel, dp.replicate])
def test_a_cap_without_room_is_refused(wrap, make_slots, bucket_cap_mb):
    with pytest.raises(ValueError, match=r"bucket_cap_mb=.*: a bucket holds more than 0 MiB"):
        wrap(nn.Linear(2, 2), make_slots(2), bucket_cap_mb=bucket_cap_mb)
