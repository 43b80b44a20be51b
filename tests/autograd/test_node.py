"""Every autograd function of the library is a `Node`, so that the compiler leaves its backward alone."""

import importlib
import pkgutil

import pytest
import torch
from torch.autograd import Function

import dataparallel
from dataparallel.autograd.node import Node

pytestmark = pytest.mark.devices("cpu")


class Doubles(Node):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        DOUBLED.append(torch.compiler.is_compiling())
        return grad * 2


class DoublesAgain(Doubles):
    """With the backward of its base."""


DOUBLED = []


def test_backward_runs_outside_of_the_compiler():
    x = torch.ones(2, requires_grad=True)
    y = Doubles.apply(x).sum() + DoublesAgain.apply(x).sum()
    torch.compile(lambda loss: loss.backward(), backend="eager")(y)
    assert x.grad.tolist() == [4, 4]
    assert DOUBLED == [False, False]
    assert DoublesAgain.backward is Doubles.backward


def test_all_functions_of_the_library_are_nodes():
    for found in pkgutil.walk_packages(dataparallel.__path__, "dataparallel."):
        # Integrations of other libraries cannot be imported without these.
        if (
            not found.name.startswith(("dataparallel.testing", "dataparallel.integrations"))
            and found.name[-8:] != "__main__"
        ):
            importlib.import_module(found.name)
    waiting, seen = [Function], []
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__.startswith("dataparallel.") and not cls.__module__.startswith("dataparallel.testing"):
            seen.append(cls)
    assert len(seen) > 8
    assert [cls for cls in seen if not issubclass(cls, Node)] == []
