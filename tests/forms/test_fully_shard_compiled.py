"""Compiled units: they train as on one device, are compiled once for each device, and need the memory that they needed.

The short tests run small models by backends that generate no code. The long ones at the end run others, by Inductor on
CPU slots and by aot_eager on simulated devices.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.compiled import FrameCounts, counts
from dataparallel.composable import FullyShardedModule, MixedPrecisionPolicy, fully_shard
from dataparallel.testing.cases import adamw, numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from memory import Growth, allocated, nbytes
from sharded_chains import Chain, Layer
from sharded_steps import (
    LOOPS,
    MODELS,
    Loop,
    Model,
    Trained,
    assert_all_sharded,
    assert_same,
    batches_of,
    gradients,
    on_device,
    one_backward,
    sharded,
    train,
    whole,
)

Options = dict[str, Any]
Way = Callable[[Any, Sequence[Any], Options, Options], nn.Module]
"""Compiles and shards a model. The options are those of ``torch.compile`` and of ``fully_shard``."""


def flat(units: Sequence[Any]) -> list[nn.Module]:
    return [module for unit in units for module in (unit if isinstance(unit, list) else [unit])]


def shard(units: Sequence[Any], model: Any, slots: Sequence[Any], options: Options, **of_model: Any) -> Any:
    for unit in units:
        fully_shard(unit, devices=slots, **options)
    return fully_shard(model, devices=slots, **{**options, **of_model})


def wrap(model: nn.Module, module: nn.Module, how: Options) -> Any:
    """``torch.compile(module)``, which replaces the module in the model."""
    parents = [(parent, key) for parent in model.modules() for key, child in parent._modules.items() if child is module]
    wrapper: Any = torch.compile(module, **how)
    for parent, key in parents:
        parent._modules[key] = wrapper
    return wrapper


def units_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    for module in flat(model.units()):
        module.compile(**how)
    return shard(model.units(), model, slots, options)


def units_after(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    shard(model.units(), model, slots, options)
    for module in flat(model.units()):
        module.compile(**how)
    return model


def units_between(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    """After they were sharded, before the model is."""
    units = model.units()
    for unit in units:
        fully_shard(unit, devices=slots, **options)
    for module in flat(units):
        module.compile(**how)
    return fully_shard(model, devices=slots, **options)


def wrapped_units_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    units = [
        [wrap(model, module, how) for module in unit] if isinstance(unit, list) else wrap(model, unit, how)
        for unit in model.units()
    ]
    return shard(units, model, slots, options)


def wrapped_units_after(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    units = model.units()
    shard(units, model, slots, options)
    for module in flat(units):
        wrap(model, module, how)
    return model


def whole_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    model.compile(**how)
    return shard(model.units(), model, slots, options)


def whole_after(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    shard(model.units(), model, slots, options)
    model.compile(**how)
    return model


def whole_wrapped_before(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    return shard(model.units(), torch.compile(model, **how), slots, options)


def argument_of_units(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    return shard(model.units(), model, slots, {**options, "compile": how}, compile=None)


def argument_of_model(model: Any, slots: Sequence[Any], how: Options, options: Options) -> nn.Module:
    return shard(model.units(), model, slots, options, compile=how)


OF_UNITS: dict[str, Way] = {
    way.__name__: way
    for way in (
        units_before,
        units_after,
        units_between,
        wrapped_units_before,
        wrapped_units_after,
        argument_of_units,
    )
}
"""Ways in which each unit is compiled by itself."""

OF_THE_MODEL: dict[str, Way] = {
    way.__name__: way for way in (whole_before, whole_after, whole_wrapped_before, argument_of_model)
}
"""Ways in which the model is compiled."""

WAYS = OF_UNITS | OF_THE_MODEL


def unwrapped(trained: Trained) -> Trained:
    """With the names that parameters have without wrappers."""

    def plain(table: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("_orig_mod.", ""): value for name, value in table.items()}

    return replace(trained, gradients=[*map(plain, trained.gradients)], state=plain(trained.state))


def assert_same_compiled(
    way: str,
    model: Model,
    slots: Sequence[Any],
    backend: str,
    *,
    loop: Loop = one_backward,
    steps: int = 3,
    atol: float = 1e-9,
    how: Options | None = None,
    **options: Any,
) -> FrameCounts:
    """Asserts that a sharded model with compiled units trains as its twin does on one device.

    Nothing may run as it is because it could not be compiled. Returns what was compiled.

    Args:
        way: in `WAYS`.
        how: more options of ``torch.compile``.
        options: of ``fully_shard``.
    """
    several, one = on_device(model.build, slots[0]), on_device(model.build, slots[0])
    before = counts()
    several = WAYS[way](several, slots, {"backend": backend, **(how or {})}, options)
    assert_all_sharded(several)
    ours = train(several, batches_of(model, slots), steps=steps, loop=loop)
    assert_all_sharded(several)
    theirs = train(one, batches_of(model, slots), steps=steps, loop=loop)
    assert_same(unwrapped(ours), theirs, atol=atol)
    found = counts() - before
    assert not found.eager, f"{dict(found.eager)} frames could not be compiled"
    return found


CHAIN = Model(seeded(lambda: Chain(Layer(), Layer(), Layer())), numbers(6))
"""Two units that are alike, after a layer of the model's own."""

pytestmark = pytest.mark.few(2)  # a case is compiled for a second


class Checkpointed(nn.Module):
    """Two units, each recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.use_reentrant = use_reentrant

    def units(self) -> list[Any]:
        return [*self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def devices(slots: list) -> int:
    return len({*map(torch.device, slots)})


class TestTraining:
    @pytest.mark.slots(2, long=[3, 8])
    @pytest.mark.parametrize("way", WAYS)
    def test_each_way_trains_as_one_device_does(self, way, slots):
        """In batches that divide evenly among the slots, that do not, and that leave slots without samples."""
        assert assert_same_compiled(way, CHAIN, slots, "aot_eager").total > 0

    @pytest.mark.slots(4)
    @pytest.mark.parametrize("reshard", [2, *(pytest.param(each, marks=pytest.mark.long) for each in (True, False))])
    def test_reshard_after_forward(self, reshard, slots):
        assert_same_compiled("units_before", CHAIN, slots, "aot_eager", steps=3, reshard_after_forward=reshard)

    @pytest.mark.slots(2)
    @pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.long)])
    def test_checkpointed_units(self, use_reentrant, slots):
        """Recomputation calls compiled code in threads of the engine."""
        model = Model(seeded(Checkpointed, use_reentrant), numbers(6))
        assert_same_compiled("units_before", model, slots, "aot_eager", steps=3)

    @pytest.mark.slots(2)
    def test_mixed_precision(self, slots, root):
        """Graphs get parameters and inputs in the lower dtype, so results are those of units that are not compiled."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        trained = []
        for compile in (None, {"backend": "aot_eager"}):
            model = on_device(CHAIN.build, root).float()
            shard(model.units(), model, slots, {"mp_policy": policy, "compile": compile})
            x = numbers(6)(4, 0)[0][0].float().to(root)
            assert model(x).dtype is torch.bfloat16
            mean_square_loss(model(x)).backward()
            trained.append(gradients(model))
        assert_equal(*trained, "gradients", atol=1e-9)

    @pytest.mark.slots(2)
    def test_hooks_of_units_run_in_each_replica_and_those_of_the_model_on_the_whole_batch(self, slots, root):
        several, one = on_device(CHAIN.build, root), on_device(CHAIN.build, root)
        sizes: list[int] = []
        for model in (several, one):  # the layers are alike but for the hook
            model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
            model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
        shard(several.units(), several, slots, {"compile": {"backend": "eager"}})
        x = numbers(6)(4, 0)[0][0].to(root)
        assert_equal(whole(several(x)), whole(one(x)), "output", atol=1e-9)
        assert sizes == [4, 4]

    @pytest.mark.slots(2)
    def test_a_compiled_function_that_calls_a_unit_breaks_there(self, slots, root):
        class Calls(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.before, self.unit = nn.Linear(6, 6), nn.Linear(6, 6)
                self.inner = torch.compile(lambda unit, x: torch.tanh(unit(x) * 2) + 1, backend="eager")

            def units(self) -> list[Any]:
                return [self.unit]

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(self.unit, self.before(x))

        model = Model(seeded(Calls), numbers(6))
        assert_same_compiled("units_before", model, slots, "eager", steps=2)


class TestCompilations:
    @pytest.mark.slots(3)
    @pytest.mark.parametrize("way", OF_UNITS)
    def test_units_that_are_alike_are_compiled_once_for_each_device(self, way, slots, root):
        model = on_device(CHAIN.build, root)
        before = counts()
        model = WAYS[way](model, slots, {"backend": "eager"}, {})
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
    @pytest.mark.parametrize("way", OF_THE_MODEL)
    def test_no_graph_has_two_units(self, way, slots, root):
        """The model is divided into its own layer and its units: two graphs, as the two units share one."""
        seen: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            seen.append(sum(isinstance(value, Tensor) for value in inputs))
            return graph

        model = WAYS[way](on_device(CHAIN.build, root), slots, {"backend": backend, "fullgraph": True}, {})
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

    def test_a_unit_that_is_compiled_by_itself_keeps_its_way(self, slots, root):
        model = on_device(CHAIN.build, root)
        used = []

        def noting(name: str) -> Any:
            def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                used.append(name)
                return graph

            return backend

        fully_shard(model.layers[1], devices=slots, compile={"backend": noting("own")})
        fully_shard(model.layers[2], devices=slots)
        fully_shard(model, devices=slots, compile={"backend": noting("the model's")})
        model(numbers(6)(len(slots), 0)[0][0].to(root))
        assert Counter(used) == {"own": devices(slots), "the model's": 2 * devices(slots)}

    def test_parts_that_hold_no_unit_are_compiled_as_a_whole(self, slots, root):
        """A `ModuleList` is not called, so its modules are compiled, and not what is inside of these."""

        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.list = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)])
                self.holds = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

            def forward(self, x: Tensor) -> Tensor:
                for part in self.list:
                    x = part(x)
                return self.holds(x)

        graphs = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
            return graph

        model = seeded(Parts)().to(root)
        model.compile(backend=backend)
        fully_shard(model.holds[1], devices=slots)
        fully_shard(model, devices=slots)
        model(torch.ones(len(slots), 6, dtype=torch.float64, device=root))
        # Two linear layers are alike. The third is a unit, and has a class of its own.
        assert Counter(map(tuple, graphs)) == {("linear", "tanh"): devices(slots), ("linear",): 2 * devices(slots)}


@pytest.mark.devices("sim")
class TestMemory:
    """Bytes on simulated devices, with and without compiled units."""

    WIDTH, BLOCKS = 520, 4

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    def model(self, slots: list, compile: Any, **options: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(*(self.Block(self.WIDTH) for _ in range(self.BLOCKS)), nn.Linear(self.WIDTH, 4))
        model.to(slots[0])
        for block in [*model][: self.BLOCKS]:
            fully_shard(block, devices=slots, compile=compile, **options)
        return fully_shard(model, devices=slots, **options)

    def bytes_of(self, slots: list, compile: Any, **options: Any) -> dict[str, list[int]]:
        model = self.model(slots, compile, **options)
        # One unit at a time, so that what is there does not depend on which slot is ahead.
        for block in [*model][: self.BLOCKS]:
            block.set_modules_to_forward_prefetch([])
            block.set_modules_to_backward_prefetch([])
        model.set_modules_to_forward_prefetch([])
        model.set_modules_to_backward_prefetch([])
        x = torch.ones(2 * len(slots), self.WIDTH, device=slots[0])
        for _ in range(3):  # the first one compiles
            model(x).sum().backward()
        model.zero_grad()
        found = {"before": allocated(slots)}
        growth = [Growth(slot) for slot in slots]
        loss = model(x).sum()
        found["peaks of forward"] = [each.peak for each in growth]
        found["after forward"] = allocated(slots)
        loss.backward()
        del loss
        found["after backward"] = allocated(slots)
        return found

    @pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.long)])
    def test_units_are_freed_as_without_compiling(self, reshard, slots, monkeypatch):
        eager = self.bytes_of(slots, None, reshard_after_forward=reshard)
        compiled = self.bytes_of(slots, {"backend": "aot_eager"}, reshard_after_forward=reshard)
        unit = nbytes(self.Block(self.WIDTH).parameters())
        for when in eager:
            for ours, theirs in zip(compiled[when], eager[when], strict=True):
                # Some activations are saved or not, as the compiler chooses. A unit would be a mebibyte.
                assert ours <= theirs + unit // 10, when
        kept = 0 if reshard else self.BLOCKS * unit
        for now, before in zip(compiled["after forward"], compiled["before"], strict=True):
            assert kept <= now - before < kept + unit // 2

    def test_steps_do_not_add_up(self, slots):
        model = self.model(slots, {"backend": "aot_eager"})
        x = torch.ones(2 * len(slots), self.WIDTH, device=slots[0])

        def steps(number: int) -> list[int]:
            for _ in range(number):
                model(x).sum().backward()
                model.zero_grad()
            return allocated(slots)

        before = steps(3)
        assert steps(20) == before


class TestErrors:
    @pytest.mark.slots(2)
    def test_the_argument_is_true_or_a_dict(self, slots):
        module = nn.Linear(2, 2)
        with pytest.raises(TypeError, match="compile is True, False or a dict"):
            fully_shard(module, devices=slots, compile="inductor")
        with pytest.raises(TypeError, match="'backends' is none of backend, mode"):
            fully_shard(module, devices=slots, compile={"backends": "eager"})
        assert not isinstance(module, FullyShardedModule)

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

    @pytest.mark.slots(2)
    def test_an_error_of_the_compiler_is_raised_and_the_next_call_is_right(self, slots, root):
        several, one = on_device(CHAIN.build, root), on_device(CHAIN.build, root)
        fails = [True]

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            if fails:
                raise ValueError("this backend fails once")
            return graph

        sharded(several, slots, compile={"backend": backend})
        batches = batches_of(CHAIN, slots)
        (x,), _ = next(batches)
        with pytest.raises(Exception, match="this backend fails once"):
            several(x)
        fails.clear()
        assert_all_sharded(several)
        assert_same(train(several, batches_of(CHAIN, slots), steps=2), train(one, batches_of(CHAIN, slots), steps=2))

    @pytest.mark.slots(2)
    def test_an_error_of_a_compiled_unit_frees_its_parameters(self, slots, root):
        def raises(x: Tensor) -> Tensor:
            raise KeyError("in a unit")

        model = sharded(
            on_device(lambda: Chain(Layer(), Layer(raises)).double(), root), slots, compile={"backend": "eager"}
        )
        for _ in range(2):
            with pytest.raises(Exception, match="in a unit"):
                model(torch.ones(2, 6, dtype=torch.float64, device=root))
            unit = fully_shard.state(model.layers[1]).unit
            assert not any(slot_unit.is_full for slot_unit in unit.slot_units)


class TestWithoutDevices:
    def test_the_module_itself_is_compiled(self, monkeypatch):
        monkeypatch.setattr("dataparallel.forms.fully_shard.resolve_slots", lambda *devices: [])
        used = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            used.append(graph)
            return graph

        module = nn.Linear(6, 6)
        expected = module(torch.ones(2, 6))
        fully_shard(module, compile={"backend": backend})
        torch.testing.assert_close(module(torch.ones(2, 6)), expected)
        assert len(used) == 1


def test_replicas_are_compiled_and_the_module_is_not(slots, root):
    """The call on the whole batch leads to the slots. It is nothing to compile."""
    model = sharded(on_device(CHAIN.build, root), slots)
    before = counts()
    one_backward(model, batches_of(CHAIN, slots).__next__, mean_square_loss)
    assert (counts() - before).total == 0
    model.compile(backend="eager")
    one_backward(model, batches_of(CHAIN, slots).__next__, mean_square_loss)
    assert set((counts() - before).compilations) == {*map(torch.device, slots)}


def backend_for(slots: list) -> tuple[str, float]:
    """The backend, and how far results may be apart: Inductor adds up in another order."""
    return ("inductor", 1e-7) if torch.device(slots[0]).type == "cpu" else ("aot_eager", 1e-9)


@pytest.mark.long
@pytest.mark.watchdog(1200)
@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("model", MODELS)
def test_each_model(model, slots):
    backend, atol = backend_for(slots)
    assert_same_compiled("units_before", MODELS[model], slots, backend, atol=atol)


@pytest.mark.long
@pytest.mark.watchdog(1200)
@pytest.mark.slots(3)
@pytest.mark.parametrize("way", WAYS)
def test_each_way(way, slots):
    backend, atol = backend_for(slots)
    assert_same_compiled(way, MODELS["gpt, units of several kinds"], slots, backend, atol=atol)


@pytest.mark.long
@pytest.mark.slots(3)
@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop(loop, slots):
    assert_same_compiled("units_before", MODELS["gpt, units of several kinds"], slots, "aot_eager", loop=LOOPS[loop])
