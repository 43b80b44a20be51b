"""What one device would save of a sharded model and its optimizer, taken and given with any number of devices."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import CPUOffloadPolicy, fully_shard
from dataparallel.sharded import ShardedTensor
from dataparallel.testing.cases import adamw, seeded
from dataparallel.testing.steps import assert_equal
from freed_later import freed_later
from memory import Growth, nbytes
from sharded_models import Awkward, on_meta
from sharded_steps import (
    MODELS,
    assert_same,
    batches_of,
    gradients,
    on_device,
    sharded,
    state,
    train,
    whole,
)

MODEL = MODELS["gpt"]


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def other_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.cos_()
    return model


class Kept(nn.Module):
    """Buffers of both kinds, a tied and a frozen weight, and extra state with a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.randn(6))
        self.register_buffer("scratch", torch.zeros(6), persistent=False)
        self.extra: Any = {"seen": 3, "weights": [torch.ones(2)]}

    def units(self) -> list[Any]:
        return [[self.first, self.second]]

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) + self.table + self.scratch


def kept(root: torch.device) -> Any:
    made = on_device(seeded(Kept), root)
    made.extra["weights"] = [tensor.to(root) for tensor in made.extra["weights"]]
    return made


def test_one_saved_state_is_for_many(slots: list, root: torch.device) -> None:
    """Training changes neither what was saved nor another model that was given the same."""
    first = sharded(on_device(MODEL.build, root), slots)
    optimizer = adamw(first.parameters())
    train(first, batches_of(MODEL, slots), optimizer, 1)
    saved = fully_shard.full_state_dict(first, optimizer)
    before = copy.deepcopy(saved)
    for where in (slots, None):
        model = on_device(MODEL.build, root)
        if where is not None:
            sharded(model, where)
        optimizer = adamw(model.parameters())
        fully_shard.load_full_state_dict(model, saved, optimizer)
        train(model, batches_of(MODEL, slots), optimizer, 1)
    assert_equal([dict(part) for part in saved], [dict(part) for part in before], "saved", atol=0)


WITH_OTHER_SHAPES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, history_size=3),
}


class Scaled(nn.Module):
    """Its first parameter is a number, which has the shape of LBFGS's plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 1)

    def units(self) -> list[Any]:
        return [self.first]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


class TestStateOfOtherShapes:
    """Means of rows, or of columns, and a history of all parameters in one tensor."""

    def made(self, name: str, slots: list | None, root: torch.device) -> tuple[Any, torch.optim.Optimizer]:
        model = on_device(seeded(Scaled), root)
        if slots is not None:
            sharded(model, slots)
        return model, WITH_OTHER_SHAPES[name]([*model.parameters()])

    def steps(self, model: Any, optimizer: Any, root: torch.device, which: range) -> None:
        for number in which:
            x = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number)).to(root)

            def loss(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                value = (model(x) - x.sum(1, keepdim=True)).square().mean()
                value.backward()
                return value

            optimizer.step(loss)

    @pytest.mark.filterwarnings("ignore:.*needs several parts")
    @pytest.mark.parametrize("name", WITH_OTHER_SHAPES)
    def test_training_goes_on_with_other_numbers_of_devices(self, name: str, make_slots: Callable[[int], list]) -> None:
        slots = make_slots(4)
        root = torch.device(slots[0])
        one = self.made(name, None, root)
        self.steps(*one, root, range(5))
        several = self.made(name, slots[:3], root)
        self.steps(*several, root, range(2))
        for at, where in enumerate((slots[:2], None, slots)):
            saved = through_a_file(fully_shard.full_state_dict(*several))
            several = self.made(name, where, root)
            fully_shard.load_full_state_dict(other_values(several[0]), saved, several[1])
            self.steps(*several, root, range(2 + at, 3 + at))
        assert_equal(state(several[0]), state(one[0]), "state", atol=1e-7)


class TestWhatIsSaved:
    def test_is_what_one_device_saves(self, slots: list, root: torch.device) -> None:
        several, one = kept(root), kept(root)
        sharded(several, slots)
        found, expected = fully_shard.full_state_dict(several), one.state_dict()
        assert [*found] == [*expected]
        assert "scratch" not in found
        assert found._metadata == expected._metadata
        other_values(several)  # it shares no memory with the model
        several.extra["weights"][0].zero_()
        assert_equal(dict(found), whole(dict(expected)), "state", atol=0)
        assert found["first.weight"] is found["second.weight"]

    def test_is_on_the_cpu_and_plain(self, slots: list, root: torch.device) -> None:
        several = sharded(kept(root), slots)
        optimizer = adamw(several.parameters())
        step(several, optimizer, root)
        saved = fully_shard.full_state_dict(several, optimizer)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(saved) if isinstance(leaf, Tensor)]
        assert {(type(leaf), leaf.device.type, leaf.requires_grad) for leaf in leaves} == {(Tensor, "cpu", False)}
        assert saved[0]["_extra_state"]["weights"][0].device.type == "cpu"

    def test_of_parameters_of_all_kinds(self, slots: list, root: torch.device) -> None:
        """0-dim, empty, transposed, of other dtypes; and the counters of a 0-dim one, which have its shape."""
        model = MODELS["unused and repeated units"]
        several, one = on_device(model.build, root), on_device(model.build, root)
        sharded(several, slots)
        optimizers = [torch.optim.NAdam(m.parameters(), lr=1e-2) for m in (several, one)]
        for each, optimizer in zip((several, one), optimizers, strict=True):
            train(each, batches_of(model, slots), optimizer, 2)
        of_model, of_optimizer = fully_shard.full_state_dict(several, optimizers[0])
        assert_equal(dict(of_model), whole(dict(one.state_dict())), "model", atol=1e-9)
        expected = whole(optimizers[1].state_dict())
        assert_equal(of_optimizer["state"], expected["state"], "optimizer", atol=1e-9)
        assert of_optimizer["param_groups"] == expected["param_groups"]
        again = other_values(sharded(on_device(model.build, root), slots))
        optimizer = torch.optim.NAdam(again.parameters(), lr=1e-2)
        fully_shard.load_full_state_dict(again, (of_model, of_optimizer), optimizer)
        optimizers[1].load_state_dict(optimizers[1].state_dict())  # which casts counters, as the other load did
        following = [train(m, batches_of(model, slots), o, 2) for m, o in ((again, optimizer), (one, optimizers[1]))]
        assert_same(*following)

    @pytest.mark.parametrize("save", [fully_shard.full_state_dict, nn.Module.state_dict])
    def test_between_forward_and_backward(self, save: Callable[[Any], Any], slots: list, root: torch.device) -> None:
        """The outermost unit is full then. Backward gathers it again."""
        several, one = (on_device(MODEL.build, root) for _ in range(2))
        sharded(several, slots)
        expected = whole(dict(one.state_dict()))
        (tokens,), _ = next(batches_of(MODEL, slots))
        outputs = [model(tokens).pow(2).mean() for model in (several, one)]
        found = save(several)
        for output in outputs:
            output.backward()
        assert_equal(whole(dict(found)), expected, "state", atol=0)
        assert_equal(gradients(several), gradients(one), "gradients", atol=1e-9)

    def test_a_parent_of_sharded_modules_is_saved_whole(self, slots: list, root: torch.device) -> None:
        parent = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double().to(root)
        expected = whole(dict(parent.state_dict()))
        fully_shard(parent[0], devices=slots)
        found = fully_shard.full_state_dict(parent)
        assert_equal(dict(found), expected, "state", atol=0)
        other_values(parent)
        fully_shard.load_full_state_dict(parent, found)
        assert_equal(state(parent), expected, "loaded", atol=0)

    @freed_later
    @pytest.mark.devices("sim")
    def test_no_device_needs_room_for_it(self, make_slots: Callable[[int], list]) -> None:
        slots = make_slots(4)
        several = sharded(on_device(MODEL.build, torch.device(slots[0])), slots)
        optimizer = adamw(several.parameters())
        train(several, batches_of(MODEL, slots), optimizer, 1)
        saved = fully_shard.full_state_dict(several, optimizer)
        largest = max(nbytes([value]) for value in saved[0].values())
        growths = [Growth(torch.device(slot)) for slot in slots]
        fully_shard.full_state_dict(several, optimizer)
        assert max(growth.peak for growth in growths) <= largest
        fresh = adamw(several.parameters())
        growths = [Growth(torch.device(slot)) for slot in slots]
        fully_shard.load_full_state_dict(several, saved, fresh)
        for growth in growths:
            assert growth.peak <= growth.now + largest
            assert growth.now < nbytes(several.parameters()) * 2 // 3


def step(model: nn.Module, optimizer: torch.optim.Optimizer, root: torch.device) -> None:
    x = torch.linspace(-1, 1, 72, dtype=torch.float64).reshape(12, 6).to(root)
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


class TestMeta:
    @pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy()}], ids=["default", "CPU offload"])
    def test_parameters_get_memory_on_their_owners(self, options: dict, slots: list, root: torch.device) -> None:
        one = on_device(MODEL.build, root)
        several = sharded(on_meta(), slots, **options)
        before = [*several.parameters()]
        fully_shard.load_full_state_dict(several, one.state_dict())
        assert [*map(id, several.parameters())] == [*map(id, before)]
        assert several.head.weight is several.embedding.weight
        places = ["cpu"] * len(slots) if options else slots
        for parameter in several.parameters():
            assert [shard.device for shard in parameter.shards] == [*map(torch.device, places)]
            assert isinstance(parameter, nn.Parameter)
            assert parameter.requires_grad
        assert_same(*(train(model, batches_of(MODEL, slots), steps=3) for model in (several, one)))

    def test_buffers_and_attributes_are_there_afterwards(self, slots: list, root: torch.device) -> None:
        one, several = kept(root), on_meta(Kept)
        several.scratch = torch.zeros(6, dtype=torch.float64, device=root)
        sharded(several, slots, ignored_params={several.second.bias})
        several.first.weight.is_mine = True
        fully_shard.load_full_state_dict(several, one.state_dict())
        assert {buffer.device for buffer in several.buffers()} == {torch.device(slots[0])}
        assert several.first.weight.is_mine
        assert several.second.weight is several.first.weight
        assert not several.second.bias.requires_grad
        assert several.second.bias.device == torch.device(slots[0])  # it is ignored
        assert_equal(state(several), state(one), "state", atol=0)

    def test_a_buffer_that_is_not_saved_needs_a_value_before(self, slots: list, root: torch.device) -> None:
        several = sharded(on_meta(Kept), slots)
        with pytest.raises(RuntimeError, match=r"'scratch' is on the meta device and in no state dict.*before, on '"):
            fully_shard.load_full_state_dict(several, kept(root).state_dict())
        assert all(tensor.is_meta for tensor in several.state_dict().values() if isinstance(tensor, Tensor))

    def test_there_is_nothing_to_save(self, slots: list) -> None:
        with pytest.raises(RuntimeError, match=r"'position' is on the meta device, so there is no value to save"):
            fully_shard.full_state_dict(sharded(on_meta(), slots))


def without(name: str) -> Callable[[Any, Any], Any]:
    def change(of_model: Any, of_optimizer: Any) -> Any:
        del of_model[name]
        return of_model, of_optimizer

    return change


def with_value(name: str, value: Any) -> Callable[[Any, Any], Any]:
    def change(of_model: Any, of_optimizer: Any) -> Any:
        return {**of_model, name: value}, of_optimizer

    return change


def in_another_order(of_model: Any, of_optimizer: Any) -> Any:
    states = of_optimizer["state"]
    other = next(key for key in states if states[key]["exp_avg"].shape != states[1]["exp_avg"].shape)
    states[1], states[other] = states[other], states[1]
    return of_model, of_optimizer


def with_optimizers_value(value: Any) -> Callable[[Any, Any], Any]:
    def change(of_model: Any, of_optimizer: Any) -> Any:
        of_optimizer["state"][1]["exp_avg"] = value
        return of_model, of_optimizer

    return change


def with_stranger(of_model: Any, of_optimizer: Any) -> Any:
    of_optimizer["state"][99] = {}
    return of_model, of_optimizer


def with_fewer_parameters(of_model: Any, of_optimizer: Any) -> Any:
    of_optimizer["param_groups"][0]["params"].pop()
    return of_model, of_optimizer


WRONG: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "a name is missing": (without("position"), ValueError, "it lacks 'position'"),
    "a name is unexpected": (with_value("other", torch.ones(1)), ValueError, "the model has no 'other'"),
    "another shape": (
        with_value("position", torch.ones(3, 3)),
        ValueError,
        r"'position' has the shape \(3, 3\), and \(6, 8\) in the model",
    ),
    "no values": (
        with_value("position", torch.ones(6, 8, device="meta")),
        ValueError,
        "no values for 'position': they are on the meta device",
    ),
    "a number": (with_value("position", 3), ValueError, "'position' is no tensor, but of type int"),
    "a sparse tensor": (
        with_value("position", torch.ones(6, 8).to_sparse()),
        ValueError,
        r"'position' is a tensor of layout torch.sparse_coo, and one of layout torch.strided in the model",
    ),
    "an optimizer's tensor of another shape": (
        with_optimizers_value(torch.ones(2, 2)),
        ValueError,
        r"'exp_avg' of parameter 1 has the shape \(2, 2\), and \(.*\) in the optimizer",
    ),
    "no values of an optimizer": (
        with_optimizers_value(torch.ones(2, device="meta")),
        ValueError,
        "'exp_avg' of parameter 1 is on the meta device",
    ),
    "a list in place of an optimizer's state": (
        lambda m, o: (m, {**o, "state": []}),
        TypeError,
        "expected the optimizer's state dict as the second of the pair",
    ),
    "no optimizer's state": (lambda m, o: m, TypeError, "expected the pair of the model's state dict and the optimi"),
    "not an optimizer's state": (lambda m, o: (m, {"epoch": 3}), TypeError, r"'state' and 'param_groups'.*'epoch'"),
    "another number of parameters": (
        with_fewer_parameters,
        ValueError,
        r"groups have \[\d+\] parameters; the groups of this AdamW have \[\d+\]",
    ),
    "a parameter in no group": (with_stranger, ValueError, "the saved state of the AdamW has a parameter 99 in no gro"),
    "state of parameters in another order": (
        in_another_order,
        ValueError,
        r"of parameter \d+ has the shape \(.*AdamW; the parameter has \(.*in the same order",
    ),
}


class TestRefused:
    @pytest.fixture
    def several(self, slots: list, root: torch.device) -> Iterator[Any]:
        return sharded(on_device(MODEL.build, root), slots)

    @pytest.mark.parametrize("name", WRONG)
    def test_before_anything_is_changed(self, name: str, several: Any, slots: list) -> None:
        change, error, message = WRONG[name]
        optimizer = adamw(several.parameters())
        train(several, batches_of(MODEL, slots), optimizer, 1)
        saved = fully_shard.full_state_dict(several, optimizer)
        train(several, batches_of(MODEL, slots), optimizer, 1)
        before = whole([state(several), optimizer.state_dict()])
        with pytest.raises(error, match=message):
            fully_shard.load_full_state_dict(several, change(*saved), optimizer)
        assert_equal(whole([state(several), optimizer.state_dict()]), before, "after the error", atol=0)

    def test_what_is_no_state_no_model_and_no_optimizer(self, several: Any) -> None:
        saved = fully_shard.full_state_dict(several, adamw(several.parameters()))
        with pytest.raises(TypeError, match=r"pass the optimizer too, or state\[0\]"):
            fully_shard.load_full_state_dict(several, saved)
        with pytest.raises(TypeError, match="expected the state dict of a model; got str"):
            fully_shard.load_full_state_dict(several, "model.pt")
        with pytest.raises(TypeError, match=r"model=OrderedDict.*: expected a torch.nn.Module"):
            fully_shard.full_state_dict(several.state_dict())
        with pytest.raises(TypeError, match=r"optimizer=\[.*: expected a torch\.optim.*Optimizer"):
            fully_shard.full_state_dict(several, [*several.parameters()])

    def test_an_optimizer_made_before(self, slots: list, root: torch.device) -> None:
        model = on_device(MODEL.build, root)
        optimizer = adamw(model.parameters())
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        sharded(model, slots)
        with pytest.raises(RuntimeError, match="Make the optimizer after fully_shard"):
            fully_shard.full_state_dict(model, optimizer)
        with pytest.raises(RuntimeError, match="Make the optimizer after fully_shard"):
            fully_shard.load_full_state_dict(model, saved, optimizer)


def test_sharded_values_can_be_given_too(make_slots: Callable[[int], list]) -> None:
    """Such as `state_dict()` of a model with another number of devices."""
    slots = make_slots(4)
    several, fewer = (sharded(on_device(seeded(Awkward), torch.device(slots[0])), s) for s in (slots, slots[:3]))
    other_values(fewer)
    fully_shard.load_full_state_dict(fewer, several.state_dict())
    assert_equal(state(fewer), state(several), "state", atol=0)
    assert all(isinstance(p, ShardedTensor) and len(p.shards) == 3 for p in fewer.parameters())
