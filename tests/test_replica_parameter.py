"""A replica's parameter is an ``nn.Parameter`` for ``isinstance``, is sent flat, and refuses operations on leaves."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from dataparallel.comm.buckets import PLAIN_TYPES, travels_flat
from dataparallel.replica_parameter import ReplicaParameter


@pytest.fixture
def parameter() -> Tensor:
    made = torch.ones(2, requires_grad=True) * 2
    made.__class__ = ReplicaParameter
    return made


def test_it_is_a_parameter_that_travels_flat(parameter: Tensor) -> None:
    assert isinstance(parameter, nn.Parameter)
    assert travels_flat(parameter)
    assert isinstance(PLAIN_TYPES, frozenset)  # no import can change it


def test_it_is_shown_without_values_if_it_has_no_memory(parameter: Tensor) -> None:
    shown = repr(parameter)
    assert "[2., 2.]" in shown
    parameter.untyped_storage().resize_(0)
    assert repr(parameter) == "<freed parameter of shape [2] and torch.float32 on cpu>"
    assert str(parameter) == repr(parameter)


def test_it_is_refused_what_is_meant_for_leaves(parameter: Tensor) -> None:
    assert parameter.requires_grad_() is parameter
    with pytest.raises(RuntimeError, match=r"on the source module before.* after backward\(\) or after reshard\(\)"):
        parameter.requires_grad_(False)
    with pytest.raises(RuntimeError, match="or take parameter"):
        copy.deepcopy(parameter)


def test_it_is_pickled_as_its_values(parameter: Tensor) -> None:
    found = pickle.loads(pickle.dumps(parameter))
    assert type(found) is Tensor
    assert torch.equal(found, parameter)
