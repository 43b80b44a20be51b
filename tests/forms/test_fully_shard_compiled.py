"""Compiled units: they train as on one device, and are compiled once for each device."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.compiled import counts
from dataparallel.composable import FullyShardedModule, fully_shard
from dataparallel.testing.cases import adamw, numbers, seeded
from sharded_chains import Chain, Layer
from sharded_steps import (
    Model,
    Trained,
    assert_all_sharded,
    assert_same,
    batches_of,
    on_device,
    sharded,
    train,
)

Way = Callable[[Any, Sequence[Any], dict[str, Any]], nn.Module]
"""Compiles and shards a model. The options are those of ``torch.compile``."""


def units_after(model: Any, slots: Sequence[Any], how: dict[str, Any]) -> nn.Module:
    sharded(model, slots)
    for unit in model.units():
        unit.compile(**how)
    return model


def wrapped_units_before(model: Any, slots: Sequence[Any], how: dict[str, Any]) -> nn.Module:
    """``torch.compile(unit)``, which replaces the unit in the model."""
    model.layers = nn.ModuleList([*model.layers[: model.own], *(torch.compile(unit, **how) for unit in model.units())])
    return sharded(model, slots)


def whole_after(model: Any, slots: Sequence[Any], how: dict[str, Any]) -> nn.Module:
    sharded(model, slots)
    model.compile(**how)
    return model


def argument_of_units(model: Any, slots: Sequence[Any], how: dict[str, Any]) -> nn.Module:
    for unit in model.units():
        fully_shard(unit, devices=slots, compile=how)
    return fully_shard(model, devices=slots)


OF_UNITS: list[Way] = [units_after, wrapped_units_before, argument_of_units]
"""Ways in which each unit is compiled by itself. Others are in replicas/compiled/test_matrix, with Inductor."""


def unwrapped(trained: Trained) -> Trained:
    """With the names that parameters have without wrappers."""

    def plain(table: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("_orig_mod.", ""): value for name, value in table.items()}

    return replace(trained, gradients=[*map(plain, trained.gradients)], state=plain(trained.state))


CHAIN = Model(seeded(lambda: Chain(Layer(), Layer(), Layer())), numbers(6))
"""Two units that are alike, after a layer of the model's own."""

pytestmark = pytest.mark.few(2)  # a case is compiled for a second


def devices(slots: list) -> int:
    return len({*map(torch.device, slots)})


@pytest.mark.slots(2, long=[3, 8])
@pytest.mark.parametrize("way", [*OF_UNITS, whole_after])
def test_each_way_trains_as_one_device_does(way, slots):
    """In batches that divide evenly among the slots, that do not, and that leave slots without samples.

    Something is compiled, and nothing may run as it is because it could not be compiled.
    """
    several, one = on_device(CHAIN.build, slots[0]), on_device(CHAIN.build, slots[0])
    before = counts()
    several = way(several, slots, {"backend": "aot_eager"})
    ours = train(several, batches_of(CHAIN, slots))
    assert_all_sharded(several)
    assert_same(unwrapped(ours), train(one, batches_of(CHAIN, slots)))
    found = counts() - before
    assert found.total > 0
    assert not found.eager, f"{dict(found.eager)} frames could not be compiled"


class TestCompilations:
    @pytest.mark.slots(3)
    @pytest.mark.parametrize("way", OF_UNITS)
    def test_units_that_are_alike_are_compiled_once_for_each_device(self, way, slots, root):
        model = on_device(CHAIN.build, root)
        before = counts()
        model = way(model, slots, {"backend": "eager"})
        optimizer = adamw(model.parameters())
        x = numbers(6)(2 * len(slots), 0)[0][0].to(root)
        for _ in range(4):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = counts() - before
        assert found.compilations == Counter({torch.device(slot): 1 for slot in slots})
        assert not found.eager

    @pytest.mark.slots(3)
    def test_no_graph_has_two_units(self, slots, root):
        """The model is divided into its own layer and its units: two graphs, as the two units share one."""
        seen: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            seen.append(sum(isinstance(value, Tensor) for value in inputs))
            return graph

        model = whole_after(on_device(CHAIN.build, root), slots, {"backend": backend, "fullgraph": True})
        model(numbers(6)(2 * len(slots), 0)[0][0].to(root)).sum().backward()
        assert seen == [3] * 2 * devices(slots)  # a weight, a bias and the batch

    @pytest.mark.slots(3)
    def test_nothing_is_compiled_again_from_step_to_step(self, slots, root):
        """Not by new values, gathers, gradients that are kept, other units that are full, nor by a new optimizer."""
        model = sharded(on_device(CHAIN.build, root), slots, compile={"backend": "eager"})
        train(model, batches_of(CHAIN, slots), steps=5)
        before = counts()
        train(model, batches_of(CHAIN, slots), steps=15)
        model.set_reshard_after_forward(False)
        train(model, batches_of(CHAIN, slots), steps=5)
        model.set_reshard_after_backward(False)
        train(model, batches_of(CHAIN, slots), steps=5)
        assert (counts() - before).total == 0


class TestErrors:
    @pytest.mark.slots(2)
    def test_what_is_compiled_takes_no_argument(self, slots):
        module = nn.Linear(2, 2)
        module.compile(backend="eager")
        with pytest.raises(ValueError, match="compiled already"):
            fully_shard(module, devices=slots, compile=True)
        with pytest.raises(ValueError, match="compiled already"):
            fully_shard(torch.compile(nn.Linear(2, 2), backend="eager"), devices=slots, compile=True)
        assert not isinstance(module, FullyShardedModule)

    @pytest.mark.slots(2)
    def test_a_compiled_function_over_a_module_of_the_tree_is_refused(self, slots, root):
        """It would compute with the parameters of the source, which are sharded."""
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(root)
        fully_shard(model[0], devices=slots)
        fully_shard(model, devices=slots)
        model[1].forward = torch.compile(model[1].forward, backend="eager")
        with pytest.raises(RuntimeError, match=r"cannot replicate '1\.forward'"):
            model(torch.ones(2, 6, device=root))


def test_without_devices_the_module_itself_is_compiled(monkeypatch):
    monkeypatch.setattr("dataparallel.forms.fully_shard.resolve_slots", lambda *devices: [])
    graphs: list[Any] = []
    module: Any = fully_shard(nn.Linear(6, 6), compile={"backend": lambda graph, inputs: graphs.append(graph) or graph})
    module(torch.ones(2, 6))
    assert len(graphs) == 1
