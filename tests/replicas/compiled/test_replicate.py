"""`replicate` with compiled modules: the replicas are compiled, and the module's own call is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from compiled_nets import (
    BACKEND,
    Net,
    assert_same,
    batch,
    build,
    compile_argument,
    compiled_after,
    compiled_before,
    compiled_in_place,
    parts_compiled,
    replicated,
)

Since = Callable[[], Any]

pytestmark = pytest.mark.few(2)  # each way is compiled with `DataParallel`, too

WAYS = [compile_argument, compiled_before, compiled_in_place, compiled_after, parts_compiled]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Callable[..., nn.Module]:
    return partial(request.param, form=replicated)


@pytest.mark.few(1)
def test_one_compilation_for_each_device_and_mode(way: Callable, slots: list, root: torch.device, since: Since):
    net = build(root)
    model = way(net, slots)
    parts = 1 if way.func is not parts_compiled else 3
    devices = {torch.device(slot) for slot in slots}
    for _ in range(4):
        model(batch(root)).sum().backward()
    assert since().compilations == dict.fromkeys(devices, parts)
    net.eval()
    expected = net.last(net.norm(net.first(batch(root))).relu()).detach() if parts == 1 else None
    with torch.no_grad():
        for _ in range(4):
            found = model(batch(root))
    assert since().compilations == dict.fromkeys(devices, 2 * parts)
    if expected is not None:
        torch.testing.assert_close(found, expected)


def test_hooks_on_the_module_run_once_on_the_whole_batch(way: Callable, slots: list, root: torch.device):
    net = build(root)
    model = way(net, slots)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model(batch(root))
    assert seen == [12]


def test_accumulation_without_sums(way: Callable, slots: list, root: torch.device):
    def gradients(make: Callable) -> list:
        net = build(root)
        model = make(net, slots)
        with model.no_sync():
            model(batch(root)).square().sum().backward()
        model(batch(root, 9)).square().sum().backward()
        return [p.grad for p in net.parameters()]

    expected = gradients(replicated)
    assert_same(gradients(way), expected)


def test_a_compiled_module_needs_no_argument(slots: list, root: torch.device):
    net = build(root)
    net.compile(backend=BACKEND)
    with pytest.raises(ValueError, match="this Net is compiled already"):
        replicated(net, slots, compile=True)
    assert type(net) is Net
