"""The library keeps eight streams on a device, and what has to go on at the same time has distinct ones."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dataparallel
from clocked import check_clocks
from dataparallel import DataParallel
from dataparallel.comm.streams import current
from dataparallel.comm.streams.current import kept_stream
from dataparallel.composable import MixedPrecisionPolicy, fully_shard, replicate
from spare_streams import kept_streams

PACKAGE = Path(dataparallel.__file__).parent


@pytest.mark.devices("sim", "stand-in")
class TestOnADevice:
    @pytest.fixture(autouse=True)
    def new_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch gives out the same 32 streams again and again: older ones may be one stream."""
        monkeypatch.setattr(current, "_kept", {})

    def test_there_are_eight_for_all_purposes(self, root: torch.device) -> None:
        assert len(kept_streams(root)) == 8

    def test_a_captor_is_for_its_holder_alone(self, root: torch.device) -> None:
        """While it captures, whatever it is given becomes a part of a graph."""
        others, for_captures = kept_streams(root), []
        while (stream := current.new_capture_stream(root)) is not None:
            for_captures.append(stream)
        try:
            assert len(for_captures) > 10
            assert len({*for_captures}) == len(for_captures)
            assert not {*for_captures} & {*others}
        finally:
            for stream in for_captures:
                current.drop_capture_stream(stream)

    def test_they_are_distinct_though_others_take_streams(self, root: torch.device) -> None:
        """torch has 32 streams for a device, and hands them out in turn."""
        first = kept_stream(root, "sums")
        while torch.Stream(root) != first:
            pass
        for _ in range(31):
            torch.Stream(root)  # the next one is the first again
        assert len(kept_streams(root)) == 8

    def test_are_the_same_for_all_who_ask(self, root: torch.device) -> None:
        assert kept_stream(root, "sums") is kept_stream(root, "sums", 5)

    @pytest.mark.parametrize(
        "purposes",
        [
            ["gathers", "shards are cast", "inputs", "shards leave", "sums"],
            ["parameters", "flat buffers", "inputs", "gradients", "pieces"],
        ],
        ids=["sharded", "replicated"],
    )
    def test_what_goes_on_at_the_same_time_has_distinct_ones(self, purposes: list[str], root: torch.device) -> None:
        assert len({kept_stream(root, purpose) for purpose in purposes}) == len(purposes)

    @pytest.mark.parametrize("purpose", ["shards leave", "gradients"])
    def test_a_few_are_taken_in_turn(self, purpose: str, root: torch.device) -> None:
        first, second = kept_stream(root, purpose), kept_stream(root, purpose, 1)
        assert first != second
        assert first in [kept_stream(root, purpose, number) for number in range(2, 6)]

    def test_a_second_one_is_never_the_one_that_sums_travel_on(self, root: torch.device) -> None:
        """`piece_streams` adds a second stream to the current one."""
        others = [kept_stream(root, purpose, turn) for purpose in ("gradients", "gathers", "sums") for turn in range(4)]
        assert kept_stream(root, "pieces") not in others

    @pytest.mark.slots(3, 8)
    def test_steps_of_all_forms_make_no_others(self, make_slots: Callable, slots: list, root: torch.device) -> None:
        def sharded(net: nn.Sequential, slots: list) -> nn.Module:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in net:
                fully_shard(layer, devices=slots, mp_policy=policy)
            return fully_shard(net, devices=slots, mp_policy=policy)

        for form in (DataParallel, lambda net, slots: replicate(net, devices=slots), sharded):
            for used in (slots, [*slots, *slots]):  # several slots on a device
                net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 256), nn.Linear(256, 8)).to(root)
                model = form(net, used)
                for _ in range(2):
                    model(torch.randn(2 * len(used), 8)).float().sum().backward()
                    model.zero_grad()
                check_clocks()
        for device in slots:
            assert sum(1 for where, _ in current._kept if where == device) <= 8


def test_nobody_else_makes_streams() -> None:
    """But who asks if a backend has streams."""
    found = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if "testing" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Stream"
    }
    assert found == {"current.py", "ahead.py"}
