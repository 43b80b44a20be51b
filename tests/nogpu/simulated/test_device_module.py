"""``torch.sim`` has the names of ``torch.cuda``, so code can be ported by changing the name."""

import pytest
import torch

from like_the_cpu import DEVICE

pytestmark = pytest.mark.devices("sim")


@pytest.mark.parametrize("one", [1, "sim:1", torch.device("privateuseone", 1)])
def test_a_device_is_current_inside_and_the_block_can_be_entered_again(one):
    block = torch.sim.device(one)
    for _ in range(2):
        with block, torch.sim.device(2):
            assert torch.sim.current_device() == 2
        assert torch.sim.current_device() == 0
    with block:
        assert torch.sim.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.empty(1, device="sim").device == DEVICE


@pytest.mark.parametrize("wrong", [8, -2, "sim:8", "cpu", torch.device("cuda", 0)])
def test_a_device_that_there_is_not(wrong):
    for ask in (torch.sim.set_device, torch.sim.device, torch.sim.memory_allocated, torch.sim.current_stream):
        with pytest.raises(ValueError, match=r"simulates 8 devices|is about simulated devices"):
            ask(wrong)


def test_a_stream_and_its_device_are_current_inside_and_the_block_can_be_entered_again():
    side = torch.sim.Stream(device=DEVICE)
    block = torch.sim.stream(side)
    assert isinstance(block, torch.sim.StreamContext)
    for _ in range(2):
        with block:
            assert torch.sim.current_stream() == side
            assert torch.sim.current_device() == 1
            with torch.sim.stream(None):
                assert torch.sim.current_stream() == side
        assert torch.sim.current_device() == 0
        assert torch.sim.current_stream(DEVICE) == torch.sim.default_stream(DEVICE)


def test_streams_of_other_kinds_are_refused_with_a_sentence():
    with pytest.raises(RuntimeError, match="expected a stream of a simulated device"):
        torch.ones(2, device=DEVICE).record_stream(torch.Stream("cpu"))


def test_questions_about_a_device():
    assert torch.sim.is_available()
    assert torch.sim.is_initialized()
    assert torch.sim.device_count() == torch.accelerator.device_count() == 8
    assert torch.sim.get_device_name(1) == "simulated device 1"
    assert torch.sim.get_device_capability(1) == (0, 0)
    assert torch.sim.get_device_properties(1).total_memory == 0
    assert torch.sim.can_device_access_peer(0, 1)
    assert not torch.sim.is_current_stream_capturing()
    assert torch.sim.is_bf16_supported()
    assert torch.accelerator.current_accelerator().type == "sim"


def test_statistics_of_memory_under_the_usual_names():
    tensor = torch.empty(1000, device=DEVICE)
    stats = torch.sim.memory_stats(DEVICE)
    for kind in ("allocated", "reserved", "active"):
        assert stats[f"{kind}_bytes.all.current"] == torch.sim.memory_allocated(DEVICE) >= tensor.nbytes
        assert stats[f"{kind}_bytes.all.peak"] == torch.sim.max_memory_allocated(DEVICE)
    assert f"{torch.sim.memory_allocated(DEVICE):,} bytes allocated" in torch.sim.memory_summary(DEVICE)
    torch.sim.reset_max_memory_allocated(DEVICE)
    torch.sim.reset_accumulated_memory_stats(DEVICE)
    torch.sim.empty_cache()
    torch.sim.ipc_collect()
    assert torch.sim.max_memory_reserved(DEVICE) == torch.sim.memory_reserved(DEVICE)
