"""`run_subtests`: all combinations, one error."""

import unittest

import pytest
import torch

from dataparallel.testing import run_subtests

pytestmark = pytest.mark.devices("cpu")


def test_all_combinations_with_the_same_seed():
    seen = []
    run_subtests(
        None, {"a": [1, 2], "b": "xy"}, lambda *args, **kwargs: seen.append((args, kwargs, torch.rand(1))), 7, c=8
    )
    assert [(args, *kwargs.values()) for args, kwargs, _ in seen] == [
        ((7,), 1, "x", 8),
        ((7,), 1, "y", 8),
        ((7,), 2, "x", 8),
        ((7,), 2, "y", 8),
    ]
    assert len({drawn.item() for *_, drawn in seen}) == 1


def test_all_failures_are_in_one_error():
    seen = []

    def check(a):
        seen.append(a)
        assert a == 2, "not two"

    with pytest.raises(AssertionError) as raised:
        run_subtests(None, {"a": [1, 2, 3]}, check)
    assert seen == [1, 2, 3]
    text = str(raised.value)
    assert text.startswith("2 of 3 combinations failed")
    assert "a=1: raised AssertionError: not two" in text
    assert "a=2" not in text
    assert "a=3: raised AssertionError: not two" in text
    assert "in run_subtests" not in text  # the traceback begins with the test


def test_a_skip_skips_all_only_if_all_skip():
    def skip(a):
        if a < 3:
            raise unittest.SkipTest("small")

    run_subtests(None, {"a": [1, 3]}, skip)
    with pytest.raises(unittest.SkipTest, match="a=1: small; a=2: small"):
        run_subtests(None, {"a": [1, 2]}, skip)


def test_no_combination_tests_nothing_and_is_refused():
    with pytest.raises(ValueError, match="one value or more for each name"):
        run_subtests(None, {"a": [1], "b": []}, print)
