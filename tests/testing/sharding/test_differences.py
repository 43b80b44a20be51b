"""What differs between two results is named by its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataparallel.testing.sharding.differences import differences

pytestmark = pytest.mark.devices("cpu")

X = torch.tensor([1.0, float("nan")], dtype=torch.float64)


def found(got: Any, wanted: Any) -> list[str]:
    return [*differences(got, wanted, "result", lambda tensor: tensor)]


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (X, X.clone()),
        (X + 1e-10, X),
        (X.to(torch.bfloat16) * 1.004, X.to(torch.bfloat16)),
        ({"a": [X, 1]}, {"a": [X.clone(), 1]}),
        (float("nan"), float("nan")),
    ],
)
def test_what_is_equal(got: Any, wanted: Any) -> None:
    assert found(got, wanted) == []


@pytest.mark.parametrize(
    ("got", "wanted", "sentence"),
    [
        (X + 1e-6, X, "result has other values: Tensor-likes are not close!"),
        (X.float(), X, "result has the dtype torch.float32, expected torch.float64"),
        (X[:1], X, "result has the shape (1,), expected (2,)"),
        (None, X, "result is None, expected a tensor of shape (2,)"),
        ((X,), [X], "result is (tensor("),
        ({"a": X}, {"b": X}, """result has ['result["a"]'], expected ['result["b"]']"""),
        ([X, (X, X + 1)], [X, (X, X)], "result[1][1] has other values"),
        (1.0, 1.001, "result is 1.0, expected 1.001"),
    ],
)
def test_what_differs(got: Any, wanted: Any, sentence: str) -> None:
    (only,) = found(got, wanted)
    assert only.startswith(sentence)
