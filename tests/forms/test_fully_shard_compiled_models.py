"""Models with compiled units train as on one device: by Inductor on CPU slots, by aot_eager on simulated devices."""

import pytest
import torch

from sharded_compiled import WAYS, assert_same_compiled
from sharded_steps import LOOPS, MODELS

pytestmark = [pytest.mark.usefixtures("one_intra_op_thread"), pytest.mark.long]


def backend_for(slots: list) -> tuple[str, float]:
    """The backend, and how far results may be apart: Inductor adds up in another order."""
    return ("inductor", 1e-7) if torch.device(slots[0]).type == "cpu" else ("aot_eager", 1e-9)


@pytest.mark.watchdog(1200)
@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("model", MODELS)
def test_each_model(model, slots):
    backend, atol = backend_for(slots)
    assert_same_compiled("units_before", MODELS[model], slots, backend, atol=atol)


@pytest.mark.watchdog(1200)
@pytest.mark.slots(3)
@pytest.mark.parametrize("way", WAYS)
def test_each_way(way, slots):
    backend, atol = backend_for(slots)
    assert_same_compiled(way, MODELS["gpt, units of several kinds"], slots, backend, atol=atol)


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_by_aot_eager(way, slots):
    assert_same_compiled(way, MODELS["gpt"], slots, "aot_eager")


@pytest.mark.slots(3)
@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop(loop, slots):
    assert_same_compiled("units_before", MODELS["gpt, units of several kinds"], slots, "aot_eager", loop=LOOPS[loop])
