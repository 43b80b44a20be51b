"""Replicas that are captured as graphs: the same values as without, what is captured, and what runs as it is."""

from __future__ import annotations

import copy
import gc
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import peers
from dataparallel.replicas.graphs.calls import MOST_CAPTURES, MOST_STATES, MOST_TRIES, WARM_UP
from each_form import Form, frozen, graphing_forms, replicated, sharded_children
from graphed_nets import SETTLE, WIDTH, Block, Net, build, captured, graphed, graphs_of, inputs, reasons, step
from nogpu import cuda

pytestmark = graphing_forms

on_cuda = pytest.mark.devices("cuda")
"""Other devices have no graphs."""


def train(form: Form, slots: list, root: torch.device, graphs: bool, **options: Any) -> tuple[list[Tensor], Any]:
    """Losses of a training with all that a user does meanwhile, the parameters at its end, and the model."""
    torch.manual_seed(1)
    source = build(root)
    network = form(source, slots, graphs=graphs, **options)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    saved, found = None, []
    for number in range(24):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        found.append(step(network, inputs(root)))
        if number % 5 == 4:  # gradients of two batches
            found.append(step(network, inputs(root)))
        optimizer.step()
        if number % 3 == 2:
            network.eval()
            with torch.no_grad():
                found.append(network(inputs(root)))
            network.train()
        if number == 10:
            saved = copy.deepcopy(source.state_dict())
            optimizer.param_groups[0]["lr"] = 0.05
        if number == 14:
            with torch.no_grad():
                source.last.weight.mul_(0.9)
        if number == 18:
            source.load_state_dict(saved)
    return [*found, *(value.clone() for value in source.state_dict().values())], network


@pytest.mark.slots(1, 2, 3, long=[8])
def test_a_training_computes_the_same(form: Form, slots: list, root: torch.device) -> None:
    expected, _ = train(form, slots, root, graphs=False)
    found, network = train(form, slots, root, graphs=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if root.type == "cuda":
        assert captured(network) > 20 * len(slots)
        assert not reasons(network)


@on_cuda
def test_draws_differ_from_launch_to_launch_and_follow_the_seed(form: Form, slots: list, root: torch.device) -> None:
    network = form(build(root, lambda: Net(0.5)), slots, graphs=True)
    x = inputs(root)
    for _ in range(SETTLE):
        step(network, x)

    def losses() -> list[Tensor]:
        torch.cuda.manual_seed_all(3)
        return [step(network, x) for _ in range(3)]

    first, again = losses(), losses()
    assert captured(network)
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert len({loss.item() for loss in first}) == 3


@on_cuda
def test_a_launch_is_one_call_for_all_operators_of_a_piece(form: Form, slots: list, root: torch.device) -> None:
    def launches(graphs: bool) -> int:
        network = form(build(root, lambda: nn.Sequential(*map(deep, range(2)))), slots, graphs=graphs)
        x = torch.randn(12, WIDTH, dtype=torch.double).to(root)
        for _ in range(SETTLE):
            step(network, x)
        with cuda.counted() as counts:
            step(network, x)
        assert (counts.calls["cudaGraphLaunch"] > 0) == graphs
        return counts.calls["cudaGraphLaunch"]

    def deep(number: int) -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])

    assert launches(graphs=False) == 0
    assert launches(graphs=True) <= 2 * 2 * 6 * len(slots)


@on_cuda
def test_two_forwards_before_a_backward_compute_the_same(form: Form, slots: list, root: torch.device) -> None:
    """What the first one has saved stays: the second one runs as it is."""
    source = build(root)
    network = form(source, slots, graphs=True)
    x, y = inputs(root), inputs(root)
    for _ in range(SETTLE):
        step(network, x)
    source.zero_grad()
    (network(x).square().mean() + network(y).square().mean()).backward()
    found = [parameter.grad.clone() for parameter in source.parameters()]
    plain = copy.deepcopy(source) if isinstance(network, dataparallel.DataParallel) else build(root)
    plain.load_state_dict(source.state_dict())
    plain.zero_grad()
    reference = form(plain, slots)
    (reference(x).square().mean() + reference(y).square().mean()).backward()
    torch.testing.assert_close(found, [p.grad for p in plain.parameters()], rtol=1e-9, atol=1e-9)


@on_cuda
def test_an_output_that_is_kept_stays_as_it_is(form: Form, slots: list, root: torch.device) -> None:
    network = form(build(root), slots, graphs=True).eval()
    with torch.no_grad():
        for _ in range(WARM_UP + 1):
            network(inputs(root))
        kept = network(inputs(root))
        before = kept.clone()
        network(inputs(root))
    assert captured(network) > 0
    assert torch.equal(kept, before)


@on_cuda
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_one_launch_for_each_replica(mode: Any, form: Form, slots: list, root: torch.device) -> None:
    network = form(build(root), slots, graphs=True).eval()
    x = inputs(root)
    with mode():
        expected = network(x).clone()
        for _ in range(WARM_UP):
            network(x)
        with cuda.counted() as counts:
            found = network(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert counts.calls["cudaGraphLaunch"] == len(slots)


@on_cuda
def test_frozen_replicas_are_captured_too(form: Form, slots: list, root: torch.device) -> None:
    if form is sharded_children:
        pytest.skip("fully_shard has no frozen")
    network, x = form(build(root), slots, graphs=True).eval(), inputs(root)
    with torch.no_grad():
        expected = network(x).clone()
        with frozen(network):
            for _ in range(WARM_UP + 1):
                network(x)
            with cuda.counted() as counts:
                found = network(x)
            assert captured(network) > 0
            with cuda.counted() as counts_of_another, ThreadPoolExecutor(1) as another_thread:
                there = another_thread.submit(torch.no_grad()(network), x).result()
    for output, counted in [(found, counts), (there, counts_of_another)]:
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        assert counted.calls["cudaGraphLaunch"] == len(slots)


@on_cuda
def test_autocast_is_a_kind_of_its_own(form: Form, slots: list, root: torch.device) -> None:
    network, x = form(build(root).float(), slots, graphs=True), inputs(root).float()
    for _ in range(SETTLE):
        step(network, x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        losses = [step(network, x) for _ in range(WARM_UP + 2)]
    torch.testing.assert_close(losses[-1], losses[0])
    assert {replica.captures for replica in graphed(network)} == {2}


class Reads(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if x.detach().sum().item() > 1e9:
            x = x * 2
        return super().forward(x, scale)


class Assigns(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.scale = scale + x.shape[0]
        return super().forward(x, scale)


class Writes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1))


class Meets(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale) + 0 * peers.all_reduce(x.sum())


@on_cuda
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Reads, "operation not permitted when stream is capturing"),
        (Assigns, "assigns to attributes"),
        (Writes, "writes to its arguments"),
        (Meets, "a collective between replicas"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is(
    kind: type[nn.Module], words: str, form: Form, slots: list, root: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged once, with the line where there is one."""

    def build_it() -> nn.Module:
        if kind is Writes:
            return Writes()
        net = Net()
        net.blocks[0] = kind()
        return net

    network, x = form(build(root, build_it), slots, graphs=True), inputs(root)
    losses = [step(network, x) for _ in range(SETTLE + 2)]
    expected = step(form(build(root, build_it), slots), x)
    torch.testing.assert_close(torch.stack(losses), expected.expand(len(losses)), rtol=1e-9, atol=1e-9)
    (reason,) = reasons(network)
    assert words in reason
    assert captured(network) == 0
    assert [record.getMessage() for record in caplog.records] == [f"replicas run without a graph: {reason}"]
    assert kind is not Reads or "test_graphs.py:" in reason


class FillsIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, batch: dict[str, Tensor]) -> None:
        batch["hidden"] = self.block(batch["x"])


@on_cuda
def test_what_writes_into_a_dict_that_it_got_runs_as_it_is(form: Form, slots: list, root: torch.device) -> None:
    """A launch would write nothing there."""
    net, x = build(root, FillsIn), torch.randn(12, WIDTH, dtype=torch.double, device=root)
    expected = net.block(x)
    network = form(net, slots, graphs=True)
    for _ in range(SETTLE + 2):
        batch = {"x": x}
        network(batch)
        torch.testing.assert_close(batch["hidden"], expected, rtol=1e-9, atol=1e-9)
        batch["hidden"].sum().backward()
    assert any("writes into a dict or list" in reason for reason in reasons(network)), reasons(network)
    assert captured(network) == 0


@on_cuda
@pytest.mark.parametrize(
    "draw", [random.random, lambda: torch.rand(()), np.random.random], ids=["python", "torch", "numpy"]
)
def test_what_draws_on_the_host_runs_as_it_is(draw: Any, form: Form, slots: list, root: torch.device) -> None:
    """Such as a model that leaves out layers at random. What runs at the same time in other replicas may do so too."""

    class Drops(Block):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x if draw() < 0.5 else super().forward(x, scale)

    def build_it() -> nn.Module:
        net = Net()
        net.blocks[0] = Drops()
        return net

    network, x = form(build(root, build_it), slots, graphs=True), inputs(root)
    losses = {step(network, x).item() for _ in range(SETTLE + 2 * MOST_TRIES)}
    assert len(losses) > 1
    assert captured(network) == 0
    assert reasons(network) == {"its forward draws random numbers on the host"}


@on_cuda
def test_what_another_thread_draws_on_the_host_delays_a_capture(form: Form, slots: list, root: torch.device) -> None:
    """A thread that loads batches may draw at any time."""
    loads = iter([True] * (MOST_TRIES - 2) * len(slots))

    class Meanwhile(Block):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            if next(loads, False):
                loader.submit(random.random).result()
            return super().forward(x, scale)

    with ThreadPoolExecutor(1) as loader:
        network, x = form(build(root, Meanwhile), slots, graphs=True), torch.randn(12, WIDTH, dtype=torch.double)
        for _ in range(MOST_TRIES + SETTLE):
            step(network, x.to(root))
    assert captured(network) > 0
    assert reasons(network) == set()


@on_cuda
def test_a_failed_capture_leaves_the_generator_as_it_was(form: Form, slots: list, root: torch.device) -> None:
    class ReadsAfterADraw(Block):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            x = x + torch.rand_like(x) * 0
            return super().forward(x, float(x.detach().sum() * 0) + scale)

    def build_it() -> nn.Module:
        net = Net(0.5)
        net.blocks[0] = ReadsAfterADraw(0.5)
        return net

    def losses(graphs: bool) -> list[float]:
        network = form(build(root, build_it), slots, graphs=graphs)
        torch.manual_seed(2)
        torch.cuda.manual_seed_all(2)
        found = [step(network, inputs(root)).item() for _ in range(SETTLE + 3)]
        assert not graphs or any("capturing" in reason for reason in reasons(network))
        return found

    assert losses(graphs=True) == pytest.approx(losses(graphs=False), rel=1e-9)


@on_cuda
def test_the_number_of_captures_is_limited(form: Form, slots: list, root: torch.device) -> None:
    network = form(build(root), slots, graphs=True)
    for chunk in range(2, MOST_CAPTURES + 4):
        for _ in range(SETTLE):
            step(network, inputs(root, chunk * len(slots)))
    assert {replica.captures for replica in graphed(network)} == {MOST_CAPTURES}
    assert any("kinds of arguments" in reason for reason in reasons(network))


@on_cuda
def test_attributes_that_change_in_each_step_pile_up_nothing(form: Form, slots: list, root: torch.device) -> None:
    source = build(root)
    network = form(source, slots, graphs=True)
    for number in range(MOST_STATES + 5):
        source.blocks[0].number = number
        for _ in range(SETTLE):
            step(network, inputs(root))
    assert {replica.captures for replica in graphed(network)} == {MOST_STATES}


@on_cuda
def test_a_state_that_comes_back_is_not_captured_again(form: Form, slots: list, root: torch.device) -> None:
    network, x = form(build(root), slots, graphs=True), inputs(root)
    for _ in range(3):
        for mode in (True, False):
            network.train(mode)
            for _ in range(SETTLE):
                step(network, x)
    assert {replica.captures for replica in graphed(network)} == {2}


@on_cuda
def test_an_error_in_a_forward_leaves_graphs_good(form: Form, slots: list, root: torch.device) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] % 2:
                raise ArithmeticError("odd")
            return super().forward(x)

    source = build(root, Fails)
    network, x = form(source, slots, graphs=True), inputs(root, 4 * len(slots))
    losses = [step(network, x) for _ in range(SETTLE)]
    with pytest.raises(ArithmeticError, match="odd"):
        network(inputs(root, 3 * len(slots)))
    losses += [step(network, x) for _ in range(3)]
    assert len({round(loss.item(), 12) for loss in losses}) == 1
    assert captured(network) > len(slots)


@on_cuda
def test_what_a_graph_of_autograd_retains_is_not_written_over(form: Form, slots: list, root: torch.device) -> None:
    source = build(root)
    network, x = form(source, slots, graphs=True), inputs(root)
    for _ in range(SETTLE):
        step(network, x)
    source.zero_grad()
    loss = network(x).square().mean()
    loss.backward(retain_graph=True)
    once = source.first.weight.grad.clone()
    step(network, 2 * x)
    source.zero_grad()
    loss.backward()
    torch.testing.assert_close(source.first.weight.grad, once, rtol=1e-9, atol=1e-9)


@on_cuda
def test_a_second_backward_finds_out_if_the_graph_was_launched_again(
    form: Form, slots: list, root: torch.device
) -> None:
    network, x = form(build(root, Block), slots, graphs=True), torch.randn(12, WIDTH, dtype=torch.double).to(root)
    for _ in range(SETTLE):
        network(x).sum().backward()
    output = network(x).sum()
    output.backward()
    network(x).sum().backward()
    with pytest.raises(RuntimeError, match="the graph was launched again"):
        output.backward()
    # A thread of the engine may hold the graphs of the failed backward until after the test, and only their end orders
    # what uses their memory.
    for slot in {*slots}:
        torch.cuda.synchronize(slot)


@pytest.mark.counts_memory
@on_cuda
def test_memory_is_free_when_the_model_is(form: Form, slots: list, root: torch.device) -> None:
    def train_and_drop() -> None:
        network = form(build(root), slots, graphs=True)
        for _ in range(SETTLE):
            step(network, inputs(root))
        assert captured(network)

    train_and_drop()
    gc.collect()
    torch.cuda.synchronize()
    before = [torch.cuda.memory_allocated(slot) for slot in {*slots}]
    train_and_drop()
    gc.collect()
    torch.cuda.synchronize()
    assert [torch.cuda.memory_allocated(slot) for slot in {*slots}] == before


class TestTogether:
    """With options and other things of a training loop: the gradients are those without graphs."""

    def gradients(
        self, form: Form, slots: list, root: torch.device, graphs: bool, step: Any, kind: Any = Net, **options: Any
    ) -> Any:
        torch.manual_seed(1)
        source = build(root, kind)
        network = form(source, slots, graphs=graphs, **options)
        for _ in range(SETTLE + 3):
            source.zero_grad()
            step(network)
        if graphs:
            assert captured(network) > len(slots)
        return [parameter.grad for parameter in source.parameters()]

    def check(self, form: Form, slots: list, root: torch.device, step: Any, **options: Any) -> None:
        expected, found = (self.gradients(form, slots, root, graphs, step, **options) for graphs in (False, True))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    @on_cuda
    def test_a_loss_of_the_replicas(self, form: Form, slots: list, root: torch.device) -> None:
        class WithLoss(Net):
            def forward(self, x: Tensor) -> Tensor:
                return (super().forward(x) - 1).square().mean()

        self.check(form, slots, root, lambda network: network(inputs(root)).backward(), kind=WithLoss, scalars="mean")

    @on_cuda
    def test_a_gradient_scaler(self, form: Form, slots: list, root: torch.device) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        self.check(form, slots, root, lambda network: scaler.scale(network(inputs(root)).square().mean()).backward())

    @on_cuda
    def test_gradients_that_wait_on_the_slots(self, form: Form, slots: list, root: torch.device) -> None:
        def step(network: Any) -> None:
            if isinstance(network, dataparallel.DataParallel):
                pytest.skip("the wrapper has no no_sync")
            with network.no_sync():
                network(inputs(root)).square().mean().backward()
            network(inputs(root)).square().mean().backward()

        self.check(form, slots, root, step)

    @on_cuda
    def test_a_communication_hook(self, form: Form, slots: list, root: torch.device) -> None:
        def hook(state: Any, bucket: Any) -> Any:
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer() * 2)
            return done

        have_hooks: list[Any] = []

        def step(network: Any) -> None:
            if form is not replicated:
                pytest.skip("only replicate has these hooks")
            if network not in have_hooks:
                network.register_comm_hook(None, hook)
                have_hooks.append(network)
            network(inputs(root)).square().mean().backward()

        self.check(form, slots, root, step)

    @on_cuda
    def test_batches_from_a_prefetched_loader(self, form: Form, slots: list, root: torch.device) -> None:
        def step(network: Any) -> None:
            for (x,) in dataparallel.prefetch([(inputs(torch.device("cpu")),)], network):
                network(x).square().mean().backward()

        self.check(form, slots, root, step)


class TestArguments:
    def test_graphs_is_a_bool_or_auto(self, form: Form, slots: list, root: torch.device) -> None:
        with pytest.raises(TypeError, match="graphs is True, False, 'auto' or None; got 'yes'"):
            form(build(root), slots, graphs="yes")

    def test_auto_takes_graphs_where_they_are(
        self, form: Form, slots: list, root: torch.device, caplog: pytest.LogCaptureFixture
    ) -> None:
        network = form(build(root), slots, graphs="auto")
        assert (graphs_of(network) is not None) == (root.type == "cuda")
        assert not caplog.records

    def test_true_says_that_there_are_none(
        self, form: Form, slots: list, root: torch.device, caplog: pytest.LogCaptureFixture
    ) -> None:
        network, x = form(build(root), slots, graphs=True), inputs(root)
        assert [record.getMessage() for record in caplog.records] == (
            []
            if root.type == "cuda"
            else [
                f"graphs=True: {slots[0]} has none, and replicas run as they are. Take graphs='auto' to use graphs "
                "where they are"
            ]
        )
        torch.testing.assert_close(step(network, x), step(form(build(root), slots), x), rtol=1e-9, atol=1e-9)

    def test_a_wrapper_can_be_copied(self, form: Form, slots: list, root: torch.device) -> None:
        network = form(build(root), slots, graphs=True)
        if not isinstance(network, dataparallel.DataParallel):
            pytest.skip("only the wrapper can be copied")
        x = inputs(root)
        expected = [step(network, x) for _ in range(SETTLE)][-1]
        copied = copy.deepcopy(network)
        assert graphed(copied) == []
        torch.testing.assert_close(step(copied, x), expected)
        for _ in range(SETTLE):
            step(copied, x)
        assert captured(copied) or root.type != "cuda"
