"""Tensors that later calls without a graph use again have the source's values, and nobody else holds them.

On slots of one device parameters share the source's memory, and the promises hold trivially; distinct devices
(``--devices=sim``) show them. What a forward leaves on tensors is in test_kept_replicas.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.replicas.kept_values import MemoryOfCopies
from nets import DOES, Net, on_one_device

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


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


@pytest.mark.devices("cpu")
def test_nested_tensors(slots, x) -> None:
    net = Net()
    net.ragged = nn.Buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    wrapped = DataParallel(net, slots)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(wrapped(x), net(x))


# A tensor that was given other memory gets its former memory back, whatever the storage has become meanwhile.


def test_memory_is_restored_only_for_what_has_moved() -> None:
    copies = [torch.zeros(3, 4), torch.ones(2), torch.empty(0)]
    memory = MemoryOfCopies(copies)
    own = copies[0].data_ptr()
    assert memory.restore()
    copies[0].data = torch.ones(4, 3)
    version = copies[1]._version
    assert memory.restore()
    assert (copies[0].data_ptr(), copies[0].shape) == (own, (3, 4))
    assert copies[1]._version == version
    copies[1].untyped_storage().resize_(0)
    assert not memory.restore()


def test_memory_that_has_been_resized_is_given_back_too() -> None:
    copies = [torch.zeros(3), torch.zeros(2)]
    memory = MemoryOfCopies(copies)
    storage = copies[0].untyped_storage()
    storage.resize_(400)
    copies[0].data = torch.ones(3)
    assert not memory.restore()
    assert copies[0].data_ptr() == storage.data_ptr()


def test_a_conjugate_view_of_its_own_memory_is_other_memory_too() -> None:
    copy = torch.tensor([1 + 2j])
    memory = MemoryOfCopies([torch.ones(1), copy])
    copy.data = copy.data.conj()
    assert memory.restore()
    assert copy.tolist() == [1 + 2j]
