"""A module has to be on the first slot before its forward; if it is not, the error says what to call."""

import re

import pytest
import torch
from torch import nn

from dataparallel.replicas.plan import check_placement

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough

ELSEWHERE = torch.device("cuda", 1)  # it is compared only


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(("move", "where"), [(lambda net: net, "cpu"), (lambda net: net.to("meta"), "meta")])
def test_the_words_are_those_of_torch(net, move, where):
    words = (
        "module must have its parameters and buffers on device cuda:1 (device_ids[0]) but found one of them on device: "
    )
    with pytest.raises(RuntimeError, match=re.escape(words + where)):
        check_placement(move(net), ELSEWHERE)


def test_buffers_count(net):
    net[1].running_var = net[1].running_var.to("meta")
    with pytest.raises(RuntimeError, match=r"buffer '1\.running_var', which has no values there"):
        check_placement(net, torch.device("cpu"))


def test_what_is_ignored_may_be_anywhere(net):
    net.to("meta")
    net[0] = nn.Linear(2, 2)
    check_placement(net, torch.device("cpu"), ignored_modules=[net[1]])
    net[0].to("meta")
    ids = {id(parameter) for parameter in net[0].parameters()}
    check_placement(net, torch.device("cpu"), ignored_modules=[net[1]], ignored_parameters=ids)
    with pytest.raises(RuntimeError, match=r"'1\.weight'"):
        check_placement(net, torch.device("cpu"), ignored_parameters=ids)
