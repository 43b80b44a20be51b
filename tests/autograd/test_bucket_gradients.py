"""Gradients travel in buckets while backward still runs. The size of buckets changes only the order of events."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import dataparallel as dp
from dataparallel import DataParallel
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


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("bucket_cap_mb", [0, -1, float("nan")])
@pytest.mark.parametrize("wrap", [DataParallel, dp.replicate])
def test_a_cap_without_room_is_refused(wrap, make_slots, bucket_cap_mb):
    with pytest.raises(ValueError, match=r"bucket_cap_mb=.*: expected a number above 0"):
        wrap(nn.Linear(2, 2), make_slots(2), bucket_cap_mb=bucket_cap_mb)
