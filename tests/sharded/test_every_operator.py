"""Every operator that torch tests works on sharded tensors as on plain ones or is refused: none is silently wrong.

The samples are those by which torch tests itself. `check_op` compares with plain tensors, in each combination of
placements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import hypothesis
import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from dataparallel.testing import check_op
from dataparallel.testing.sharding import OperatorDiffers

# That import chooses hypothesis settings of torch's own for the whole process, and forbids it to set flags of
# torch.backends. Other tests need ours, and set flags.
hypothesis.settings.load_profile("dataparallel")
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

pytestmark = [pytest.mark.long, pytest.mark.watchdog(900)]

PARTS = 12
"""Of the operators, so that no test takes too long. The bounds of each part leave room."""

NO_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators whose results have no values to compare."""

READS_MEMORY = "its data is not allocated yet"
"""torch's words where an operator reads the memory of an argument before anything is dispatched."""


@dataclass
class Outcomes:
    """The operators that were right and those that were refused at least once, and for each what else has happened."""

    right: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    wrong: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def samples_warn() -> Iterator[None]:
    """torch's samples are made with functions that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def samples_of(op: Any, dtype: torch.dtype, requires_grad: bool, count: int) -> Iterator[Any]:
    if not op.supports_dtype(dtype, "cpu") or (requires_grad and not op.supports_autograd):
        return
    torch.default_generator.manual_seed(0)
    try:
        given = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        for sample, _ in zip(given, range(count), strict=False):
            yield sample
    except (ImportError, RuntimeError, NotImplementedError):  # torch's own samples need what this machine lacks
        return


def as_python_calls(method: Callable[..., Any]) -> Callable[..., Any]:
    """``__radd__`` and the like may leave the operands to others, which there are not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if result is NotImplemented:
            raise TypeError("unsupported operand type(s), as Python says then")
        return result

    return call


def calls_of(op: Any, sample: Any, mixes: bool) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """As function, method, in place and as Python's operators: of all tensors; of the first, and of all others."""
    first, args, kwargs = sample.input, sample.args, sample.kwargs
    has_others = any(isinstance(value, Tensor) for value in tree_leaves((args, kwargs)))
    for variant in (op.op, op.method_variant, op.inplace_variant, op.operator_variant, op.inplace_operator_variant):
        if variant is not None:
            run = as_python_calls(variant)
            yield run, (first, *args), kwargs
            if mixes and has_others and isinstance(first, Tensor):
                yield lambda x, run=run: run(x, *args, **kwargs), (first,), {}
                yield lambda *a, run=run, **k: run(first.clone(), *a, **k), args, kwargs


def outcomes(owners: Any, number: int, dtypes: list[torch.dtype], requires_grad: bool, count: int) -> Outcomes:
    """Of one part of the operators, with ``count`` samples of each. Those are on the CPU."""
    found = Outcomes()
    for op in op_db:
        if op.name in NO_VALUES or crc32(op.name.encode()) % PARTS != number:
            continue
        for dtype in dtypes:
            for sample in samples_of(op, dtype, requires_grad, count):
                for run, args, kwargs in calls_of(op, sample, torch.device(owners[0]).type == "cpu"):
                    try:
                        counts = check_op(run, *args, devices=owners, gradients=requires_grad, **kwargs)
                    except OperatorDiffers as error:
                        counts = error.checked
                        if not all(READS_MEMORY in line for line in str(error).splitlines()[1:]):
                            found.wrong.setdefault(op.name, []).append(str(error))
                    except Exception:  # not for plain tensors either
                        continue
                    found.right |= {op.name} if counts.right else set()
                    found.refused |= {op.name} if counts.refused else set()
    return found


@pytest.mark.devices("cpu")
@pytest.mark.slots(4)
@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize(("requires_grad", "right", "refused"), [(False, 14, 20), (True, 9, 19)])
def test_every_one_is_right_or_refused(
    on_owners: Any, number: int, requires_grad: bool, right: int, refused: int
) -> None:
    """Gradients too."""
    dtypes = [torch.float64, torch.complex128] if requires_grad else [torch.float64, torch.int64, torch.complex128]
    for found in on_owners(lambda owners: outcomes(owners, number, dtypes, requires_grad, 4)):
        assert found.wrong == {}
        assert len(found.right) >= right
        assert len(found.refused) >= refused


@pytest.mark.devices("sim")
@pytest.mark.parametrize("number", range(PARTS))
def test_every_one_is_right_or_refused_on_devices(slots: list, number: int) -> None:
    found = outcomes(slots, number, [torch.float64], False, 2)
    assert found.wrong == {}
    assert len(found.right) >= 11
    assert len(found.refused) >= 16
