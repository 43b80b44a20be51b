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
from dataparallel.replicas.graphs.calls import MOST_TRIES
from each_form import Form, by_wrapper, frozen, graphing_forms, sharded_children
from graphed_nets import (
    SETTLE,
    WIDTH,
    Block,
    Net,
    build,
    captured,
    graphed,
    graphs_of,
    inputs,
    reasons,
    replays,
    step,
    warm_up,
)

pytestmark = graphing_forms

on_cuda = pytest.mark.devices("cuda")
"""Other devices have no graphs."""


@on_cuda
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_one_launch_for_each_replica(mode: Any, form: Form, slots: list, root: torch.device) -> None:
    network = form(build(root), slots, graphs=True).eval()
    x = inputs(root)
    with mode():
        expected = network(x).clone()
        warm_up(network, x, slots)
        with replays() as launched:
            found = network(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert len(launched) == len(slots)


@on_cuda
def test_slots_that_are_assigned_later_have_graphs_of_their_own(form: Form, slots: list, root: torch.device) -> None:
    if form is not by_wrapper or len({*slots}) == 1:
        pytest.skip("only a wrapper's slots can be assigned")
    network, x = by_wrapper(build(root), slots, graphs=True).eval(), inputs(root)
    with torch.no_grad():
        for _ in range(SETTLE):
            expected = network(x).clone()
        network.device_ids = network.device_ids[::-1]
        network.module.to(slots[-1])
        for _ in range(SETTLE):
            found = network(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert [replica.device for replica in graphed(network)] == slots[::-1]
    assert all(replica.launches for replica in graphed(network))


@on_cuda
def test_frozen_replicas_are_captured_too(form: Form, slots: list, root: torch.device) -> None:
    if form is sharded_children:
        pytest.skip("fully_shard has no frozen")
    network, x = form(build(root), slots, graphs=True).eval(), inputs(root)
    with torch.no_grad():
        expected = network(x).clone()
        with frozen(network):
            warm_up(network, x, slots)
            with replays() as launched:
                found = network(x)
            with replays() as launched_by_another, ThreadPoolExecutor(1) as another_thread:
                there = another_thread.submit(torch.no_grad()(network), x).result()
    for output, graphs in [(found, launched), (there, launched_by_another)]:
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        assert len(graphs) == len(slots)


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
def test_a_state_that_comes_back_is_not_captured_again(form: Form, slots: list, root: torch.device) -> None:
    network, x = form(build(root), slots, graphs=True), inputs(root)
    for _ in range(3):
        for mode in (True, False):
            network.train(mode)
            for _ in range(SETTLE):
                step(network, x)
    assert {replica.captures for replica in graphed(network)} == {2}


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
        for slot in slots:  # memory that is still in use when the model goes stays until the next call
            torch.cuda.synchronize(slot)

    train_and_drop()
    gc.collect()
    before = [torch.cuda.memory_allocated(slot) for slot in {*slots}]
    train_and_drop()
    gc.collect()
    assert [torch.cuda.memory_allocated(slot) for slot in {*slots}] == before


class TestArguments:
    def test_graphs_is_a_bool_or_auto(self, form: Form, slots: list, root: torch.device) -> None:
        with pytest.raises(ValueError, match="graphs='yes': expected True, False, 'auto' or None"):
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
