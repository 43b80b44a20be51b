"""Parameters of a sharded model: of all kinds, frozen, tied, shared, replaced, on meta, loaded and converted."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.composable import CPUOffloadPolicy, fully_shard
from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from sharded_chains import PLAIN, Chain, Layer, assert_same_results, chain, forward_backward
from sharded_models import Apart, on_meta
from sharded_steps import (
    LOOPS,
    MODELS,
    Model,
    assert_all_sharded,
    assert_same,
    assert_same_training,
    batches_of,
    gradients,
    on_device,
    sharded,
    state,
    train,
    whole,
)


class Moving(Layer):
    """A layer whose forward gives its weight other memory, as RNNs do on CUDA, where cuDNN wants one buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.clone()
        return super().forward(x)


class TestParameters:
    @pytest.mark.slots(3, long=[2, 8])
    @pytest.mark.parametrize("loop", ["one_backward", "the_last_summed", "last_forward_first"])
    @pytest.mark.parametrize("stay", [False, True], ids=["freed after forward", "full until backward"])
    def test_forward_may_give_a_parameter_other_memory(self, stay, loop, slots):
        """That memory is gone when the unit is freed, and the next gather is seen."""
        assert_same_training(chain(Layer, Moving, Moving), slots, loop=LOOPS[loop], reshard_after_forward=not stay)


class TestReferences:
    """Attributes of modules may lead to parameters: lists of weights, partials, closures of hooks."""

    class Referring(nn.Module):
        """An attribute of ``first`` leads to the weight of ``last``, and a hook to a parameter of the model."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Layer(), Layer()
            gain = self.gain = nn.Parameter(torch.randn(6))
            self.first.linear.forward = functools.partial(F.linear, weight=self.last.linear.weight)
            self.last.register_forward_hook(lambda module, args, output: output * gain)

        def units(self) -> list[nn.Module]:
            return [self.first]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    def test_the_old_ones_are_freed(self, slots, root):
        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(6, 6)
                self.weights = [*self.lstm.parameters()]

            def forward(self, x: Tensor) -> Tensor:
                return self.lstm(x)[0]

        model = Plain().to(root)
        old = [weakref.ref(parameter) for parameter in model.parameters()]
        fully_shard(model.lstm, devices=slots)
        outer = fully_shard(nn.Sequential(model, nn.Linear(1, 1).to(root)), devices=slots)
        gc.collect()
        assert [reference() for reference in old] == [None] * len(old)
        now = [*map(id, outer[0].lstm.parameters())]
        assert [*map(id, model.lstm._flat_weights)] == [*map(id, model.weights)] == now

    def test_those_to_another_unit_raise(self, slots, root, x):
        """The other unit need not be there. To read what is not there would crash the process."""
        model = on_device(seeded(self.Referring), root)
        model.units = lambda: [model.first, model.last]
        sharded(model, slots)
        with pytest.raises(NotImplementedError, match=r"use full_tensor\(\)"):
            model(x)
        assert isinstance(model.last.linear.weight, ShardedTensor)

    def test_those_to_a_unit_around_are_full(self, slots):
        """The root is full while its children run."""
        assert_same_training(Model(seeded(self.Referring), numbers(6)), slots)


class TestChangesOfTheModel:
    @pytest.fixture(params=[0, 1], ids=["before the first call", "after it"])
    def replaced(self, request, slots, pair, x):
        """The pair with a new layer in place of the first."""
        for model in pair:
            for _ in range(request.param):
                mean_square_loss(model(x)).backward()
                model.zero_grad()
            model.layers[0] = on_device(seeded(lambda: Chain(Layer(), Layer()).layers[1]), slots[0])
        return pair

    def test_a_frozen_layer_replaces_one(self, replaced, x):
        """The new layer computes, with parameters of its own that are not sharded."""
        several, one = replaced
        for model in replaced:
            model.layers[0].requires_grad_(False)
            mean_square_loss(model(x)).backward()
        assert_equal(whole(several(x)), whole(one(x)), "output", atol=1e-9)
        for found, expected in zip(several.layers[1:].parameters(), one.layers[1:].parameters(), strict=True):
            assert_equal(whole(found.grad), whole(expected.grad), "gradient", atol=1e-9)

    def test_a_layer_that_needs_gradients_is_refused(self, replaced, x):
        """Nobody would sum them."""
        several, one = replaced
        with pytest.raises(RuntimeError, match=r"'layers.0.linear.weight' needs a gradient and is not sharded"):
            several(x)
        with torch.no_grad():
            assert_equal(whole(several(x)), whole(one(x)), "output", atol=1e-9)

    def test_a_buffer_that_needs_a_gradient_is_refused_by_name(self, slots, root):
        model = nn.Sequential(nn.BatchNorm1d(4)).to(root)
        model[0].register_buffer("scale", torch.ones(4, device=root, requires_grad=True))
        fully_shard(model, devices=slots)
        with pytest.raises(RuntimeError, match=r"the buffer '0.scale' needs a gradient.*Make it a parameter"):
            model(torch.ones(6, 4, device=root))

    def test_a_transform_around_a_unit_is_refused_by_name(self, slots, root):
        class Transformed(nn.Module):
            def __init__(self):
                super().__init__()
                self.unit = nn.Linear(4, 4)

            def forward(self, x):
                return torch.func.vmap(self.unit)(x)

        model = Transformed().to(root)
        fully_shard(model.unit, devices=slots)
        fully_shard(model, devices=slots)
        with pytest.raises(RuntimeError, match=r"transform .* runs around the unit 'unit'.*Make one unit"):
            model(torch.ones(6, 4, device=root))

    @pytest.mark.parametrize("child", [True, False])
    def test_frozen_between_forward_and_backward(self, child, pair, x):
        """A parameter gets no gradient then. One that is full says what to do."""
        several, one = pair
        for model in pair:
            loss = mean_square_loss(model(x))
            weight = model.layers[1].linear.weight if child else next(model.parameters())
            try:
                weight.requires_grad_(False)
            except RuntimeError as error:
                assert model is several
                assert "after backward() or after reshard()" in str(error)  # noqa: PT017
                several.reshard()
                next(several.parameters()).requires_grad_(False)
            loss.backward()
        assert_equal(gradients(several), gradients(one), "gradients", atol=1e-9)

    def test_frozen_before_a_second_call(self, pair, x):
        """Its graph has other parameters, so a backward through the first one says what to do."""
        several, _ = pair
        loss = mean_square_loss(several(x))
        several.layers[1].linear.weight.requires_grad_(False)
        mean_square_loss(several(x)).backward()
        with pytest.raises(RuntimeError, match=r"requires_grad or dtype was changed. Call backward\(\) before that"):
            loss.backward()

    def test_frozen_while_gradients_wait(self, slots, pair, x):
        several, one = pair
        with several.no_sync():
            mean_square_loss(several(x)).backward()
        mean_square_loss(one(x)).backward()
        weight = several.layers[1].linear.weight
        weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"'layers.1' were replaced, or .* while gradients wait on the slots"):
            several(x)
        weight.requires_grad_(True)
        for model in pair:
            mean_square_loss(model(x)).backward()
        assert_equal(gradients(several), gradients(one), "gradients", atol=1e-9)


class TestThePlacement:
    @pytest.mark.slots(4)  # which do not divide the columns
    @pytest.mark.parametrize("when", ["before the first call", "later"])
    @pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=repr)
    def test_that_is_refused(self, placement, when, slots, pair, x):
        several, one = pair
        if when == "later":
            several(x)
        layer, own = several.layers[1].linear, several.layers[1].linear.weight
        layer.weight = nn.Parameter(distribute_tensor(torch.ones(6, 6, dtype=x.dtype), slots, placement))
        message = r"(?s)'weight' in the unit 'layers\.1'.*(Replicate|Shard\(dim=1\)).*placed by"
        with pytest.raises(RuntimeError, match=message):
            several(x)
        layer.weight = own
        assert_equal(whole(several(x)), whole(one(x)), "outputs", atol=1e-9)

    @pytest.mark.slots(2)
    def test_may_be_another_dimension(self, slots, pair, x):
        several, one = pair
        several(x)
        weight = one.layers[1].linear.weight.detach()
        several.layers[1].linear.weight = nn.Parameter(distribute_tensor(weight, slots, Shard(1)))
        assert_same_results(pair, lambda model: forward_backward(model, x))


@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_shards_of_an_offloaded_unit_have_to_be_in_host_memory(when, slots, root, pair, x):
    offloaded = sharded(on_device(PLAIN.build, root), slots, offload_policy=CPUOffloadPolicy())
    if when == "later":
        offloaded(x)
    with torch.no_grad():
        pair[0].layers[1].linear.weight.mul_(2)
    offloaded.load_state_dict(pair[0].state_dict(), assign=True)
    message = r"unit '(layers\.1|Layer)' is on .*host memory: load a state dict that is on the CPU"
    with pytest.raises(RuntimeError, match=message):
        offloaded.layers[1](x)
    with pytest.raises(RuntimeError, match="CPUOffloadPolicy"):
        offloaded(x)
    offloaded.cpu()
    assert_equal(whole(offloaded(x)), whole(pair[0](x)), "outputs", atol=1e-9)
    offloaded.reshard()
    assert {shard.device.type for p in offloaded.parameters() for shard in p.shards} == {"cpu"}


MODEL = MODELS["gpt"]
UNTIED = MODELS["gpt, units of several kinds"]


def assert_trains_as(several: nn.Module, one: nn.Module, slots: list) -> None:
    assert_all_sharded(several)
    ours, theirs = (train(model, batches_of(MODEL, slots), steps=3) for model in (several, one))
    assert_same(ours, theirs)


class TestMeta:
    @pytest.mark.slots(3, long=[2, 8])
    def test_parameters_are_drawn_as_on_one_device(self, slots, root):
        several, one = sharded(on_meta(), slots), on_meta().to_empty(device=root)
        one.head.weight = one.embedding.weight
        for model in (several.to_empty(device=root.type), one):
            torch.manual_seed(3)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        assert several.head.weight is several.embedding.weight
        assert_equal(state(several), state(one), "drawn", atol=0)
        assert_trains_as(several, one, slots)

    @pytest.mark.slots(3, long=[2, 8])
    def test_sharded_values_are_assigned_without_to_empty(self, slots, root):
        """As on one device, that unties weights: this model has none."""
        several, one = sharded(on_meta(Apart), slots), on_device(UNTIED.build, root)
        several.load_state_dict(sharded(on_device(UNTIED.build, root), slots).state_dict(), assign=True)
        assert_trains_as(several, one, slots)

    def test_a_call_before_they_have_values_says_so(self, slots, root):
        several = sharded(on_meta(), slots)
        (tokens,), _ = next(batches_of(MODEL, slots))
        with pytest.raises(RuntimeError, match=r"to_empty|meta"):
            several(tokens)


BEFORE_THE_NEXT_CALL = {
    "zero_grad": lambda model, loss: model.zero_grad(),
    "reshard": lambda model, loss: model.reshard(),
    "double": lambda model, loss: model.double(),
    "state_dict": lambda model, loss: model.state_dict(),
    "backward": lambda model, loss: loss.backward(),
}


@pytest.mark.parametrize("replaced", ["assigned", "None"])
@pytest.mark.parametrize("then", BEFORE_THE_NEXT_CALL)
def test_a_parameter_that_was_replaced_stays_so_until_the_next_call(replaced, then, pair, x):
    """That takes it over, or says that it cannot."""
    several, _ = pair
    loss = mean_square_loss(several(x))
    layer = several.layers[1].linear
    if replaced == "None":
        layer.bias = None
    else:
        several.load_state_dict({key: 2 * value for key, value in several.state_dict().items()}, assign=True)
    found = [layer.weight, layer.bias]
    BEFORE_THE_NEXT_CALL[then](several, loss)
    assert layer.bias is found[1]
    if replaced == "None":
        with pytest.raises(RuntimeError, match=r"'bias' in the unit 'layers\.1' was replaced by None"):
            several(x)
        return
    one = copy.deepcopy(pair[1])
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(2)
    for model in (several, one):
        model.zero_grad()
    assert_same_results((several, one), lambda model: forward_backward(model, x))


def test_a_gradient_from_before_is_divided_and_the_next_backward_adds_to_it(slots):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double().to(slots[0])
    twin, x = copy.deepcopy(model), torch.randn(6, 5, dtype=torch.float64, device=slots[0])
    for each in (model, twin):
        each(x).square().sum().backward()
    fully_shard(model, devices=slots)
    for each in (model, twin):
        each(x).sum().backward()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
