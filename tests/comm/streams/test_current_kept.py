"""The library keeps eight streams on a device, whatever forms there are."""

import pytest
import torch
from torch import nn

from clocked import check_clocks
from dataparallel import DataParallel
from dataparallel.comm.streams import current
from dataparallel.composable import MixedPrecisionPolicy, fully_shard, replicate
from spare_streams import kept_streams


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(3, 8)
def test_there_are_eight_for_all_purposes_and_steps_make_no_others(
    slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        current, "_kept", {}
    )  # torch gives out 32 streams again and again: older ones may be one stream
    assert len(kept_streams(root)) == 8
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for form in (
        DataParallel,
        lambda net, used: replicate(net, devices=used),
        lambda net, used: fully_shard(net, devices=used, mp_policy=policy),
    ):
        for used in (slots, [*slots, *slots]):  # several slots on a device
            model = form(nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 8)).to(root), used)
            for _ in range(2):
                model(torch.randn(2 * len(used), 8)).float().sum().backward()
                model.zero_grad()
            check_clocks()
    for device in slots:
        assert sum(1 for where, _ in current._kept if where == device) <= 8


@pytest.mark.devices("cuda")
def test_a_capture_takes_a_stream_that_another_one_has_left(root: torch.device) -> None:
    """A new one would cost cuBLAS's workspace, and torch would sooner hand out a stream of the user's again."""
    first, second = (current.new_capture_stream(root) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first != second
    current.drop_capture_stream(first)
    assert current.new_capture_stream(root) == first
    for stream in (first, second):
        current.drop_capture_stream(stream)
