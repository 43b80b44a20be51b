"""Around a call of a unit's module: what the unit and the tree are told, in which order, in forward and in backward."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.composable import fully_shard
from dataparallel.sharded.units.calls import ModuleRunner
from dataparallel.sharded.units.unit import Precision, Unit


class Told:
    """A tree that keeps what it and its units are told."""

    ready: dict[Any, Any] = {}  # noqa: RUF012
    is_trained = True

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._positions = 0

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def begin_unit(self, slot_unit: Any) -> Any:
        self.lines.append(f"{slot_unit.name} began")
        return slot_unit.unit.versions()

    def end_unit(self, slot_unit: Any) -> int:
        self.lines.append(f"{slot_unit.name} ended")
        self._positions += 1
        return self._positions - 1

    def gives_one_node(self, slot_unit: Any) -> bool:
        return True

    def join_pass(self) -> None:
        self.lines.append("join")

    def gather_for_backward(self, slot_unit: Any, position: int, running: Any) -> None:
        self.lines.append(f"{slot_unit.name} begins at {position}")
        slot_unit.is_full = True

    def gather_for_graphs(self, slot: int, call: Any) -> None:
        """No graph has been captured."""


class ToldUnit:
    """A unit that keeps what it is told."""

    slot = 0
    device = torch.device("cpu")
    flats = ()

    def __init__(self, name: str, tree: Told, precision: Precision) -> None:
        self.name, self._tree = name, tree
        self.version = 0
        self.unit = SimpleNamespace(
            name=name,
            precision=precision,
            trainable=[0],
            parameters=[None],
            versions=lambda: [self.version],
            refuse_overwritten=lambda slot: None,
        )
        self.unit.refuse_changed = partial(Unit.refuse_changed, self.unit)
        self.is_full = False
        self.is_in_backward = False
        self._open: set[object] = set()

    def use(self, ready: Any, registers: Any) -> None:
        self._tree.lines.append(f"{self.name} used")

    def end_use(self) -> None:
        self._tree.lines.append(f"{self.name} not used")

    def note_module_end(self, number: int, has_backward: bool, is_announced: bool) -> None:
        self._tree.lines.append(f"{self.name} ran module {number}, {has_backward}")

    def show_in(self, registers: Any) -> None:
        self._tree.lines.append(f"{self.name} shown")

    def make_full(self, ready: Any) -> None:
        self.is_full = True

    def note_recomputation(self) -> None:
        self._tree.lines.append(f"{self.name} runs again")

    def begin_backward(self, call: object, ends_with_gradients: bool) -> bool:
        if call in self._open:
            return False
        self._open.add(call)
        self._tree.lines.append(f"{self.name} opens" + ", ends with gradients" * ends_with_gradients)
        return True

    def end_backward(self, call: object) -> None:
        if call in self._open:
            self._open.remove(call)
            self._tree.lines.append(f"{self.name} closes")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def make(told: Told) -> Callable[..., ModuleRunner]:
    def make(name: str = "a", precision: Precision | None = None, number: int = 0) -> ModuleRunner:
        slot_unit: Any = ToldUnit(name, told, precision or Precision())
        return ModuleRunner(slot_unit, number, [], told)

    return make


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


BEGINS = ["join", "a begins at 0", "a shown"]


@pytest.mark.devices("cpu")
class TestForward:
    def test_uses_the_parameters_while_the_function_runs(self, make, told):
        make(number=1).run(lambda x: told.lines.append("runs") or x * 2, leaf())
        assert told.take() == ["a used", "a began", "runs", "a not used", "a ended", "a ran module 1, True"]

    def test_without_a_graph_has_no_backward(self, make, told):
        with torch.no_grad():
            make().run(lambda x: x * 2, leaf())
        assert told.take()[-1] == "a ran module 0, False"

    def test_inside_itself_is_the_same_call(self, make, told):
        """The class runs `__call__` and `forward` in this way, and the one calls the other."""
        module = make()
        module.run(lambda x: module.run(lambda y: y * 2, x), leaf())
        assert told.take() == ["a used", "a began", "a not used", "a ended", "a ran module 0, True"]

    def test_that_fails_uses_the_parameters_no_more(self, make, told):
        module = make()
        with pytest.raises(ZeroDivisionError):
            module.run(lambda: 1 / 0)
        assert told.take() == ["a used", "a began", "a not used"]
        module.run(lambda: None)
        assert told.take()[0] == "a used"

    def test_casts_floating_inputs_and_outputs(self, make):
        seen = []
        module = make(precision=Precision(parameters=torch.float16, outputs=torch.float64))
        (found,) = module.run(
            lambda x, *, ids: seen.extend([x.dtype, ids.dtype]) or [x], torch.ones(2), ids=torch.ones(2).long()
        )
        assert seen == [torch.float16, torch.int64]
        assert found.dtype == torch.float64

    def test_leaves_inputs_as_they_are_if_asked(self, make):
        module = make(precision=Precision(parameters=torch.float16, casts_inputs=False))
        assert module.run(lambda x: x, torch.ones(2)).dtype == torch.float32


@pytest.mark.devices("cpu")
class TestBackward:
    def test_opens_at_the_output_and_closes_at_the_inputs(self, make, told):
        output = make().run(lambda x: x * 2, leaf() * 1)
        told.take()
        output.sum().backward()
        assert told.take() == ["a opens", *BEGINS, "a closes"]

    def test_closes_after_its_own_nodes_not_with_the_gradients_of_tensors(self, make, told):
        """The same tensor may go to many calls, and has its gradient when the first one of them has run backward."""
        shared = leaf() * 1
        shared.register_hook(lambda grad: told.lines.append("shared"))
        first = make("a").run(lambda x, y: x * y, leaf() * 1, shared)
        second = make("b").run(lambda x, *, y: x * y, first, y=shared)
        told.take()
        second.sum().backward()
        lines = [line for line in told.take() if line.split()[-1] in ("opens", "closes", "shared")]
        assert lines == ["b opens", "b closes", "a opens", "a closes", "shared"]

    def test_closes_after_branches_that_lead_to_no_input(self, make, told):
        inner = leaf() * 1

        def forward(x: Tensor) -> Tensor:
            branch = inner * 3
            branch.register_hook(lambda grad: told.lines.append("branch"))
            return x + branch

        output = make().run(forward, leaf() * 1)
        told.take()
        output.sum().backward()
        assert told.take()[-2:] == ["branch", "a closes"]

    @pytest.mark.parametrize("is_in_dict", [False, True])
    def test_does_not_begin_again_for_an_input_that_is_an_output_too(self, make, told, is_in_dict):
        """A bias that all blocks pass on has its gradient when no node of a block is left to run."""
        bias = leaf() * 1
        shared = {"bias": bias} if is_in_dict else bias

        def forward(x: Tensor, shared: Any) -> Any:
            return x * (shared["bias"] if is_in_dict else shared), shared

        first, _ = make("a").run(forward, leaf() * 1, shared)
        second, _ = make("b").run(forward, first, shared)
        told.take()
        (second + bias).sum().backward()
        lines = [line for line in told.take() if line.split()[-1] in ("opens", "closes")]
        assert lines == ["b opens", "b closes", "a opens", "a closes"]

    def test_that_cannot_see_its_inputs_ends_with_gradients(self, make, told):
        output = make().run(lambda batch: batch["x"] * 2, {"x": leaf()})
        told.take()
        output.sum().backward()
        assert told.take() == ["a opens, ends with gradients", *BEGINS]

    def test_with_frozen_parameters_does_not_end_with_gradients(self, make, told):
        module, weight = make(), leaf()
        module.slot_unit.unit.parameters.append(None)
        output = module.run(lambda x: x * weight, torch.ones(2))
        told.take()
        output.sum().backward()
        assert told.take() == ["a opens", *BEGINS]

    def test_opens_once_for_several_outputs(self, make, told):
        outputs = make().run(lambda x: {"one": x * 2, "more": (x * 3,)}, leaf())
        told.take()
        (outputs["one"] + outputs["more"][0]).sum().backward()
        assert told.take() == ["a opens", *BEGINS, "a closes"]

    def test_without_inputs_that_need_gradients_does_not_close_by_itself(self, make, told):
        weight = leaf()
        output = make().run(lambda x: x * weight, torch.ones(2))
        told.take()
        output.sum().backward()
        assert told.take() == ["a opens, ends with gradients", *BEGINS]

    def test_ends_the_later_unit_before_the_earlier_one_begins(self, make, told):
        """So the memory of the one is free for the other."""
        output = make("b").run(lambda x: x * 2, make("a").run(lambda x: x * 2, leaf()))
        told.take()
        output.sum().backward()
        lines = [line for line in told.take() if line != "join"]
        assert lines == [
            *["b opens", "b begins at 1", "b shown", "b closes"],
            *["a opens", "a begins at 0", "a shown", "a closes"],
        ]

    def test_begins_if_a_view_that_is_the_output_is_changed_in_place(self, make, told):
        """Then the gradient does not pass the hook on the output."""
        output = make().run(lambda x: (x * 2).view(1, 2), leaf())
        told.take()
        output.mul_(3)
        output.sum().backward()
        assert told.take()[:2] == ["a opens", "join"]

    def test_of_parameters_that_have_changed_since_is_refused(self, make, told):
        module = make()
        output = module.run(lambda x: x * 2, leaf())
        module.slot_unit.version += 1
        with pytest.raises(RuntimeError, match="a parameter of the unit 'a' was changed in place between"):
            output.sum().backward()

    def test_runs_again_through_a_graph_that_was_kept(self, make, told):
        output = make().run(lambda x: x * 2, leaf())
        told.take()
        for _ in range(2):
            output.sum().backward(retain_graph=True)
            assert told.take() == ["a opens", *BEGINS, "a closes"]


@pytest.mark.devices("cpu")
class TestRecomputation:
    def test_uses_the_parameters_and_tells_the_tree_nothing(self, make, told):
        module = make()
        output = checkpoint(lambda x: module.run(lambda y: y.sin(), x), leaf(), use_reentrant=False)
        told.take()
        output.sum().backward()
        assert told.take() == ["a opens", *BEGINS, "a used", "a runs again", "a not used", "a closes"]

    def test_of_a_reentrant_checkpoint_opens_with_its_own_backward(self, make, told):
        """Its outputs belonged to no graph in forward."""
        module = make()
        output = checkpoint(lambda x: module.run(lambda y: y.sin(), x), leaf(), use_reentrant=True)
        assert told.take()[-1] == "a ran module 0, False"
        output.sum().backward()
        assert told.take() == ["a used", "a runs again", "a not used", "a opens", "a shown", "a closes"]


@pytest.mark.devices("cpu")
class TestChangesInPlace:
    """A call may change its inputs, and the caller sees that as on one device, in values and gradients."""

    @pytest.mark.parametrize("kind", ["tensor", "view", "view of the input"])
    def test_reach_the_tensor_of_the_caller(self, make, kind):
        def forward(x: Tensor) -> Tensor:
            if kind == "view of the input":
                x[:1].mul_(3)
            else:
                x.exp_()  # saves its result
            return x * 2

        def results(run: Callable[..., Tensor]) -> list[Tensor]:
            given = leaf()
            x = (given * 2)[:2] if kind == "view" else given * 2
            y = run(forward, x)
            (y + x.square()).sum().backward()
            return [y.detach(), x.detach(), given.grad]

        expected = results(lambda function, x: function(x))
        for found, one in zip(results(make().run), expected, strict=True):
            assert torch.equal(found, one)

    def test_of_a_leaf_are_refused(self, make):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
            make().run(lambda x: x.mul_(2), leaf())

    def test_without_another_output_begin_the_backward(self, make, told):
        x = leaf() * 1
        make().run(lambda x: x.mul_(2)[:0].tolist(), x)
        told.take()
        x.sum().backward()
        assert told.take()[0] == "a opens"

    def test_an_input_that_is_returned_is_the_same_object(self, make):
        x, skips = leaf() * 1, [leaf() * 1]
        module = make()
        found, same = module.run(lambda x, skips: (x, skips), x, skips)
        assert found is x
        assert same is skips
        assert module.run(lambda x: x.mul_(2), x) is x


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(4)
def test_a_unit_may_have_been_called_by_another_tree_since(slots):
    """The gradients of each backward go to the tree whose graph it is, as on one device."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 5)).to(slots[0])
    x = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(1)).to(slots[0])
    model = copy.deepcopy(single)
    for module in (model[1], model):
        fully_shard(module, devices=slots)
    for _ in range(2):
        whole, part = model(x[0]).square().mean(), model[1](x[1]).square().mean()
        whole.backward()
        part.backward()
        (single(x[0]).square().mean() + single[1](x[1]).square().mean()).backward()
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
