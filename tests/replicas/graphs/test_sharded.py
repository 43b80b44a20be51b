"""Captured replicas of a sharded model: what `fully_shard` promises, beside the same steps without graphs.

That values, gradients and bits are the same is drawn in test_random.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from each_form import sharded_children
from graphed_nets import SETTLE, Block, Net, build, captured, gradients, inputs, reasons, step

pytestmark = pytest.mark.devices("cuda")


def full_addresses(network: nn.Module) -> list[int]:
    """Where the full parameters of all units are on all slots; 0 where they have no memory."""
    modules = [module for module in network.modules() if "_dataparallel_form" in vars(module)]
    units = [vars(module)["_dataparallel_form"][1].unit for module in modules]
    full = [parameter for unit in units for slot_unit in unit.slot_units for parameter in slot_unit.parameters]
    return [parameter.untyped_storage().data_ptr() for parameter in full]


@pytest.fixture
def run(root: torch.device) -> Callable[[Any, Any], list[Tensor]]:
    """`SETTLE` training steps and two more."""

    def steps(network: Any, optimizer: Any) -> list[Tensor]:
        found = []
        for _ in range(SETTLE + 2):
            found.append(step(network, inputs(root)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    return steps


def test_full_parameters_keep_their_memory_between_steps(slots: list, root: torch.device, run: Any) -> None:
    addresses = []
    for graphs in (False, True):
        network = sharded_children(build(root), slots, graphs=graphs)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        run(network, optimizer)
        before = full_addresses(network)
        run(network, optimizer)
        addresses.append((before, full_addresses(network)))
    assert {*addresses[0][0], *addresses[0][1]} == {0}
    assert addresses[1][0] == addresses[1][1]
    assert 0 not in addresses[1][0]


def test_a_loss_beside_an_output_that_no_loss_uses(slots: list, root: torch.device) -> None:
    """Its backward is captured again, later than the pieces of the first capture."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(numbers)
            for block in self.blocks:
                x = block(x)
            y = self.last(x)
            loss = nn.functional.cross_entropy(y.flatten(0, 1), numbers.flatten(), reduction="none")
            return y, loss.view(numbers.shape)

    found = []
    for graphs in (False, True):
        network: Any = build(root, WithLoss)
        for block in network.blocks:
            fully_shard(block, devices=slots, reshard_after_forward=False)
        fully_shard(network, devices=slots, reshard_after_forward=False, graphs=graphs)
        torch.manual_seed(1)
        for _ in range(SETTLE + 3):
            network.zero_grad()
            network(torch.randint(11, (6 * len(slots), 7)).to(root))[1].mean().backward()
            found.append(gradients(network))
        assert (captured(network) > 0) == graphs
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half])


def test_units_inside_of_units_have_graphs_and_none_is_empty(
    slots: list, root: torch.device, run: Any, recwarn: pytest.WarningsRecorder
) -> None:
    found = []
    for graphs in (False, True):
        network: Any = build(root, lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Net(), nn.Linear(3, 3))))
        for unit in (network[0], network[1][0].blocks[0], network[1][0], network[1]):
            fully_shard(unit, devices=slots, reshard_after_forward=False)
        fully_shard(network, devices=slots, reshard_after_forward=False, graphs=graphs)
        found.append((run(network, torch.optim.Adam(network.parameters())), gradients(network)))
        assert (captured(network) > 0) == graphs
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert not [warning for warning in recwarn if "CUDA Graph is empty" in str(warning.message)]


def test_a_unit_that_frees_its_parameters_after_forward_is_named(
    slots: list, root: torch.device, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    network = build(root)
    fully_shard(network.first, devices=slots)
    fully_shard(network, devices=slots, reshard_after_forward=False, graphs=True)
    run(network, torch.optim.SGD(network.parameters(), lr=0.1))
    assert captured(network) == 0
    (record,) = [each for each in caplog.records if "without a graph" in each.message]
    assert "the unit 'first' frees its parameters after forward" in record.message
    (reason,) = reasons(network)
    assert record.message.endswith(reason)


@pytest.mark.parametrize("options", [{"reshard_after_forward": True}, {"units": "auto"}], ids=["freed", "auto"])
def test_a_unit_that_would_free_its_parameters_is_refused(slots: list, root: torch.device, options: Any) -> None:
    module = build(root)
    with pytest.raises(ValueError, match="pass reshard_after_forward=False to all calls of fully_shard"):
        fully_shard(module, devices=slots, graphs=True, **options)
    assert type(module) is Net


class TestAUnitOfTwoModels:
    """One model has graphs, which read the unit's full parameters where they are, and the other one has none."""

    def models(self, slots: list, root: torch.device, graphs: bool) -> nn.ModuleList:
        torch.manual_seed(0)
        body = nn.Linear(4, 8)
        models = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), body), nn.Sequential(nn.Linear(4, 4), body)])
        models.double().to(root)
        fully_shard(body, devices=slots, reshard_after_forward=False)
        for model, has_graphs in zip(models, (graphs, False), strict=True):
            fully_shard(model, devices=slots, reshard_after_forward=False, graphs=has_graphs)
        return models

    def backward_of_the_second(self, models: nn.ModuleList, x: Tensor, slots: list) -> list[Tensor]:
        """Afterwards memory that it has freed is used by others."""
        step(models[-1], x)
        return [torch.full((size,), 7.0, device=device) for device in slots for size in (32, 128, 256) * 4]

    @pytest.mark.parametrize("alone", ["the other model", "the unit"])
    def test_stays_where_it_is_in_calls_of_the_other(self, slots: list, root: torch.device, alone: str) -> None:
        found = []
        for graphs in (False, True):
            models = self.models(slots, root, graphs)
            if alone == "the unit":
                models[1] = models[0][1]
            optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
            for _ in range(SETTLE + 2):
                loss = models[0](inputs(root)).square().mean()
                others = self.backward_of_the_second(models, inputs(root), slots)
                loss.backward()
                found.append((graphs, loss.detach(), gradients(models)))
                del others
                optimizer.step()
                optimizer.zero_grad()
            assert (captured(models[0]) > 0) == graphs
            assert not graphs or not reasons(models[0])
        half = len(found) // 2
        torch.testing.assert_close([each[1:] for each in found[half:]], [each[1:] for each in found[:half]])

    def test_is_not_read_where_it_was_after_the_model_with_graphs_is_gone(
        self, slots: list, root: torch.device
    ) -> None:
        models = self.models(slots, root, True)
        for _ in range(SETTLE):
            step(models[0], inputs(root))
        loss = models[0](inputs(root)).square().mean()
        assert captured(models[0]) > 0
        del models[0]
        gc.collect()
        others = self.backward_of_the_second(models, inputs(root), slots)
        with pytest.raises(RuntimeError, match="or moved"):
            loss.backward()
        del others
