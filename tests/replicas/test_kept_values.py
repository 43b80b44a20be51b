"""A copy that was given other memory gets its former memory back, whatever the storage has become meanwhile."""

import torch

from dataparallel.replicas.kept_values import MemoryOfCopies


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
