"""The tensors of replicas in calls without a graph: they have the source's values, and are leaves, in every mode.

On slots of one device parameters share the source's memory, and the promises hold trivially; distinct devices
(``--devices=sim``) show them.
"""

from collections.abc import Callable

import pytest
import torch

from dataparallel import DataParallel
from nets import DOES, Net, on_one_device


@pytest.fixture
def same_as_one_device(wrapped, net, call, x) -> Callable[[], None]:
    def same_as_one_device() -> None:
        torch.testing.assert_close(call(), on_one_device(net, x))

    return same_as_one_device


def test_a_view_of_data_taken_before_and_written_after(net, same_as_one_device) -> None:
    view = net.linear.weight.data[1:3]
    version = net.linear.weight._version
    same_as_one_device()
    same_as_one_device()
    view.fill_(7)
    assert net.linear.weight._version == version
    same_as_one_device()


def test_requires_grad_is_that_of_the_source(net, call) -> None:
    seen = []
    DOES.append(lambda replica: seen.append(replica.linear.weight.requires_grad))
    call()
    net.requires_grad_(False)
    call()
    net.requires_grad_(True)
    call()
    assert seen == [True] * 3 + [False] * 3 + [True] * 3


def test_tensors_are_normal_ones_in_every_mode(wrapped, x) -> None:
    seen = []
    DOES.append(lambda replica: seen.extend(t.is_inference() for t in replica.state_dict(keep_vars=True).values()))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            wrapped(x)
    assert seen == [False] * 9 * len(wrapped.module.state_dict())


def test_a_source_made_in_inference_mode(slots, root, x) -> None:
    with torch.inference_mode():
        net = Net().to(root)
        expected = net(x)
    wrapped = DataParallel(net, slots)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(wrapped(x), expected)
            torch.testing.assert_close(wrapped(x), expected)
