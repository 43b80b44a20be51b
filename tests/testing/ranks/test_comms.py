"""`with_comms` where there is no process group to make, and the choice of a backend."""

import os
import unittest

import pytest
import torch

from dataparallel.testing import Rank, with_comms
from dataparallel.testing.ranks import comms, on_processes, on_slots, on_threads

pytestmark = pytest.mark.devices("cpu")


@with_comms
def plain(rank):
    return torch.distributed.is_initialized()


@with_comms(eager_init=True)
def with_arguments(rank):
    return torch.distributed.is_initialized()


def test_it_passes_through_on_slots_and_threads():
    assert on_slots(plain) == [False]
    assert on_threads(plain) == [True, True]
    assert on_threads(with_arguments) == [True, True]
    assert plain.__name__ == "plain"


def test_the_backend_is_what_is_there(monkeypatch):
    if not torch.distributed.is_gloo_available():
        pytest.skip("for a torch with gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert comms.choose_backend(2) == "nccl"
    assert comms.choose_backend(3) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert comms.choose_backend(2) == "gloo"
    assert comms.why_not("cpu:gloo,cuda:nccl").endswith("without the backend nccl of torch.distributed")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(unittest.SkipTest, match="without the backend gloo"):
        comms.choose_backend(2)


def debug_level(rank: Rank) -> str:
    return torch.distributed.get_debug_level().name


@pytest.mark.skipif(bool(comms.why_not("gloo")) or not hasattr(os, "fork"), reason="processes with gloo")
@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_ranks_have_the_debug_level_that_the_environment_asks_for(level, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    assert on_processes(debug_level, ranks=1) == [level]
