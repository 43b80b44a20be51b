"""The marks, on functions, methods and classes."""

import unittest

import pytest
import torch

from dataparallel.testing import skip_unless_devices, skip_unless_distributed


def count() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def test_a_function_is_skipped_when_it_runs_and_not_before():
    called = []
    function = skip_unless_devices(1000)(called.append)
    with pytest.raises(unittest.SkipTest, match=f"for 1000 accelerators; there are {count()}"):
        function(1)
    assert called == []


@pytest.mark.devices("sim", "cuda")
def test_simulated_devices_count():
    assert skip_unless_devices(count())(lambda: 5)() == 5


def test_a_class_is_skipped_method_by_method():
    @skip_unless_devices(1000)
    class Test:
        def test_it(self):
            raise AssertionError

        def helper(self):
            return 5

    assert Test().helper() == 5
    with pytest.raises(unittest.SkipTest):
        Test().test_it()


@pytest.mark.parametrize("n", [0, -1, True, "2", None])
def test_a_number_is_required(n):
    with pytest.raises(ValueError, match="takes the number of devices that a test needs"):
        skip_unless_devices(n)


def test_without_distributed_there_is_a_sentence(monkeypatch):
    function = skip_unless_distributed(lambda: 5)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(unittest.SkipTest, match=f"torch {torch.__version__.split('+')[0]}.* without torch.distributed"):
        function()
