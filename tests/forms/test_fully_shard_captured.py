"""`fully_shard` with ``graphs=True``: units are captured, and read their parameters where they were captured."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard, register_forward_method
from dataparallel.forms.fully_shard_arguments import CPUOffloadPolicy, MixedPrecisionPolicy
from dataparallel.replicas.graphs.captures import WARM_UP
from each_form import whole
from graphed_nets import SETTLE, WIDTH, Block, Net, build, captured, graphs_of, inputs, reasons, step
from nogpu import cuda

pytestmark = pytest.mark.devices("cuda")


class Deep(Net):
    """Four blocks of one size, each with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Normed() for _ in range(4)])


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.batch_norm(super().forward(x, scale))


def sharded(net: nn.Module, slots: list, graphs: bool = True, **options: Any) -> Any:
    """Each block is a unit."""
    for block in net.blocks:
        fully_shard(block, devices=slots, **options)
    return fully_shard(net, devices=slots, graphs=graphs, **options)


def settled(slots: list, root: torch.device, **options: Any) -> Any:
    network = sharded(build(root, Deep), slots, **options)
    for _ in range(SETTLE):
        step(network, inputs(root))
    return network


def losses(network: Any, root: torch.device, steps: int, between: Callable[[Any, int], None] | None = None) -> Any:
    """Losses of a training, and the module's state at its end."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    found = []
    for number in range(steps):
        optimizer.zero_grad()
        found.append(step(network, inputs(root)))
        optimizer.step()
        if between is not None:
            between(network, number)
    return [*found, *(whole(value).clone() for value in network.state_dict().values())]


def check(
    slots: list, root: torch.device, between: Any = None, steps: int = 14, kind: Any = Deep, **options: Any
) -> Any:
    """Trains with graphs and without, and returns the module that has them."""
    expected = losses(sharded(build(root, kind), slots, False, **options), root, steps, between)
    network = sharded(build(root, kind), slots, **options)
    torch.testing.assert_close(losses(network, root, steps, between), expected, rtol=1e-9, atol=1e-9)
    assert {*captured(network)} == {f"blocks.{i}" for i in range(4)}
    return network


@pytest.mark.slots(1, 2, 3, long=[8])
def test_a_training_computes_the_same(slots: list, root: torch.device) -> None:
    saved: dict[int, Any] = {}

    def between(network: Any, number: int) -> None:
        if number % 3 == 2:
            network.eval()
            with torch.no_grad():
                network(inputs(root))
            network.train()
        if number == 6:
            saved[id(network)] = copy.deepcopy(fully_shard.full_state_dict(network))
        if number == 10:
            fully_shard.load_full_state_dict(network, saved[id(network)])

    network = check(slots, root, between, steps=16)
    assert not reasons(network)
    used = min(len(slots), 6)  # eight slots get chunks of two of twelve samples
    assert min(captured(network).values()) >= used * (16 - WARM_UP)


def test_the_whole_module_may_be_one_unit(slots: list, root: torch.device) -> None:
    expected = losses(fully_shard(build(root), devices=slots), root, 10)
    network = fully_shard(build(root), devices=slots, graphs=True)
    torch.testing.assert_close(losses(network, root, 10), expected, rtol=1e-9, atol=1e-9)
    assert captured(network) == {"": (10 - WARM_UP) * len(slots)}


def test_units_that_are_full_in_turn_share_memory(slots: list, root: torch.device) -> None:
    network = settled(slots, root)
    memory = fully_shard.state(network.blocks[0]).unit.fixed_memory
    sizes = fully_shard.state(network.blocks[0]).unit.slot_units[0].sizes
    for of_slot in memory:
        assert 1 <= len([region for region in of_slot._regions if region.sizes == sizes]) <= 2
        assert all(region.holder is None for region in of_slot._regions)


def test_an_output_that_is_kept_stays_as_it_is(slots: list, root: torch.device) -> None:
    network = sharded(build(root, Deep), slots).eval()
    with torch.no_grad():
        for _ in range(WARM_UP + 1):
            network(inputs(root))
        kept = network(inputs(root))
        before = kept.clone()
        network(inputs(root))
    assert captured(network)
    assert torch.equal(kept, before)


def test_a_backward_reads_parameters_where_its_forward_did(slots: list, root: torch.device) -> None:
    """Another unit may be there meanwhile. It keeps its values."""
    network = settled(slots, root)
    network.zero_grad()
    x = inputs(root)
    before = [whole(p).clone() for p in network.parameters()]
    launches = captured(network)
    loss = network(x).square().mean()
    assert all(count > launches[name] for name, count in captured(network).items())
    for block in network.blocks[:2]:
        block.unshard()
    held = network.blocks[0].up.weight.clone()
    loss.backward()
    found = [whole(p.grad).clone() for p in network.parameters()]
    assert torch.equal(whole(network.blocks[0].up.weight), held)
    for block in network.blocks:
        block.reshard()
    assert all(map(torch.equal, before, map(whole, network.parameters())))
    plain = build(root, Deep)
    plain.load_state_dict(fully_shard.full_state_dict(network))
    reference = sharded(plain, slots, graphs=False)
    reference(x).square().mean().backward()
    torch.testing.assert_close(found, [whole(p.grad) for p in reference.parameters()], rtol=1e-9, atol=1e-9)


def test_units_may_begin_to_stay_full(slots: list, root: torch.device) -> None:
    """They are captured again where they are then."""

    def between(network: Any, number: int) -> None:
        if number == 5:
            network.set_reshard_after_backward(False)
        if number == 14:
            network.set_reshard_after_forward(False)

    network = check(slots, root, between, steps=24)
    before = captured(network)
    step(network, inputs(root))
    after = captured(network)
    assert all(after[name] == count + len(slots) for name, count in before.items())


def test_calls_on_another_stream(slots: list, root: torch.device) -> None:
    network = settled(slots, root)
    plain = build(root, Deep)
    plain.load_state_dict(fully_shard.full_state_dict(network))
    reference = sharded(plain, slots, graphs=False)
    x = inputs(root)
    network.zero_grad()
    streams = [torch.cuda.Stream(device) for device in {*slots}]
    torch.cuda.synchronize()
    for stream in streams:
        stream.wait_stream(torch.cuda.default_stream(stream.device))
        torch.cuda.set_stream(stream)
    try:
        step(network, x)
    finally:
        for stream in streams:
            default = torch.cuda.default_stream(stream.device)
            default.wait_stream(stream)
            torch.cuda.set_stream(default)
    step(reference, x)
    found, expected = ([whole(p.grad) for p in each.parameters()] for each in (network, reference))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_gradients_that_wait_on_the_slots(slots: list, root: torch.device) -> None:
    def between(network: Any, number: int) -> None:
        with network.no_sync():
            step(network, inputs(root))
        step(network, inputs(root))

    check(slots, root, between)


def test_shards_in_host_memory(slots: list, root: torch.device) -> None:
    check(slots, root, offload_policy=CPUOffloadPolicy())


def test_mixed_precision(slots: list, root: torch.device) -> None:
    class Plain(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(4)])
            self.norm = nn.Identity()

    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    check(slots, root, kind=Plain, mp_policy=policy)


@pytest.mark.slots(4)
def test_groups_of_slots(slots: list, root: torch.device) -> None:
    check(slots, root, reshard_after_forward=2)


def test_buffers_get_the_values_of_the_module(slots: list, root: torch.device) -> None:
    network = settled(slots, root).eval()
    x = inputs(root)
    with torch.no_grad():
        for _ in range(WARM_UP + 1):
            network(x)
        network.blocks[1].batch_norm.running_mean.add_(1)
        found = network(x)
    plain = build(root, Deep)
    plain.load_state_dict(fully_shard.full_state_dict(network))
    with torch.no_grad():
        torch.testing.assert_close(found, sharded(plain, slots, graphs=False).eval()(x), rtol=1e-9, atol=1e-9)


def test_another_method_runs_as_it_is(slots: list, root: torch.device) -> None:
    class WithMethod(Deep):
        def features(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.first(x))

    network = sharded(build(root, WithMethod), slots)
    register_forward_method(network, "features")
    x = inputs(root)
    with torch.no_grad():
        found = [network.features(x) for _ in range(SETTLE)]
    torch.testing.assert_close(found, [found[0]] * SETTLE, rtol=1e-9, atol=1e-9)


def test_an_error_in_a_forward_leaves_graphs_good(slots: list, root: torch.device) -> None:
    class Fails(Deep):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if x.shape[0] % 2:
                raise ArithmeticError("odd")
            return output

    network = sharded(build(root, Fails), slots)
    x = inputs(root, 4 * len(slots))
    found = [step(network, x) for _ in range(SETTLE)]
    with pytest.raises(ArithmeticError, match="odd"):
        network(inputs(root, 3 * len(slots)))
    found += [step(network, x) for _ in range(3)]
    assert len({round(loss.item(), 12) for loss in found}) == 1
    assert captured(network)["blocks.0"] > len(slots)


def test_a_launch_is_one_call_for_all_operators_of_a_unit(slots: list, root: torch.device) -> None:
    network = settled(slots, root)
    with cuda.counted() as counts:
        step(network, inputs(root))
    assert counts.calls["cudaGraphLaunch"] == 2 * 4 * len(slots)


def test_memory_is_free_when_the_model_is(slots: list, root: torch.device) -> None:
    def train_and_drop() -> None:
        assert captured(settled(slots, root))

    def allocated() -> list[int]:
        gc.collect()
        torch.cuda.synchronize()
        return [torch.cuda.memory_allocated(slot) for slot in {*slots}]

    train_and_drop()
    before = allocated()
    train_and_drop()
    assert allocated() == before


def test_the_outermost_module_decides(slots: list, root: torch.device) -> None:
    net = build(root, Deep)
    for block in net.blocks:
        fully_shard(block, devices=slots, graphs=True)
    network = fully_shard(net, devices=slots)
    for _ in range(SETTLE):
        step(network, inputs(root))
    assert graphs_of(network) is None
    assert not captured(network.blocks[0])
