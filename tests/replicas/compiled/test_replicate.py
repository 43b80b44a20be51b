"""`replicate` with compiled modules: the replicas are compiled, and the module's own call is not."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from compiled_nets import (
    assert_same,
    batch,
    build,
    compile_argument,
    compiled_after,
    compiled_before,
    compiled_in_place,
    parts_compiled,
)
from each_form import replicated

pytestmark = pytest.mark.few(2)  # each way is compiled with `DataParallel`, too

WAYS = [compile_argument, compiled_before, compiled_in_place, compiled_after, parts_compiled]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Callable[..., nn.Module]:
    return partial(request.param, form=replicated)


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
