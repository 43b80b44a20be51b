"""`on_slots`: which devices a test on slots gets."""

import unittest

import pytest
import torch

from dataparallel import DataParallel
from dataparallel.testing.ranks import on_slots, slots


def test_one_call_gets_all_devices(request):
    (rank,) = on_slots(lambda rank: rank, ranks=3)
    assert (rank.number, rank.count, rank.place, rank.device) == (0, 1, "slots", rank.devices[0])
    kind = request.config.getoption("--devices")
    expected = ["cpu"] * 3 if kind == "cpu" else [f"{kind}:{index}" for index in range(3)]
    assert [str(device) for device in rank.devices] == expected


@pytest.mark.smoke
def test_they_are_slots_of_the_library():
    def run(rank, x):
        return DataParallel(torch.nn.Linear(2, 2).to(rank.device), rank.devices)(x.to(rank.device)).shape

    assert on_slots(run, torch.ones(4, 2)) == [(4, 2)]


def test_more_than_there_are_means_the_cpu_and_a_skip_if_another_type_was_asked_for():
    assert slots.choose_devices(1000) == [torch.device("cpu")] * 1000
    with pytest.raises(unittest.SkipTest, match="for 1000 devices of the type cuda; there are"):
        on_slots(print, ranks=1000, device="cuda")


def test_devices_can_be_given():
    given = ["cpu", torch.device("cpu")]
    assert on_slots(lambda rank: rank.devices, device=given) == [[torch.device("cpu")] * 2]
    with pytest.raises(ValueError, match="3 slots have 3 devices; got 2"):
        on_slots(print, ranks=3, device=given)
    with pytest.raises(ValueError, match="1 slot or more; got 0"):
        on_slots(print, ranks=0)


def test_slots_have_no_mesh():
    with pytest.raises(RuntimeError, match="slots are devices of one process, and a DeviceMesh is for several ranks"):
        on_slots(lambda rank: rank.mesh())


def test_seeded_is_torch_s_seed():
    def draw(rank):
        with rank.seeded(3):
            return torch.rand(1)

    (drawn,) = on_slots(draw)
    torch.manual_seed(3)
    assert drawn == torch.rand(1)
