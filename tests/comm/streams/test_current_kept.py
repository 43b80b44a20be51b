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

    def test_they_are_distinct_though_others_take_streams(self, root: torch.device) -> None:
        """torch has 32 streams for a device, and hands them out in turn."""
        first = kept_stream(root, "sums")
        while torch.Stream(root) != first:
            pass
        for _ in range(31):
            torch.Stream(root)  # the next one is the first again
        assert len(kept_streams(root)) == 8

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
