"""Every operator that torch tests works on sharded tensors as on plain ones or is refused: none is silently wrong.

The samples are those by which torch tests itself. What a plain tensor on the first device gives is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from zlib import crc32

import hypothesis
import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from dataparallel.sharded import Replicate, Shard
from dataparallel.sharded.placements import over_of
from dataparallel.testing.sharding import Checked
from fake_machines import FakeOver, on_fake_machines, owners_of
from sharding import full, sharded
from swept_operators import RANKS, checked, on_sharded_tensors, swept

# That import chooses hypothesis settings of torch's own for the whole process, and forbids it to set flags of
# torch.backends. Other tests need ours, and set flags.
hypothesis.settings.load_profile("dataparallel")
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

pytestmark = pytest.mark.long

OnOwners = Callable[[Callable[[Any], "list[Outcomes]"]], "list[list[Outcomes]]"]

PARTS = 12
"""Of the operators, so that no test takes too long. The bounds of each part leave room."""

Place = Callable[[Tensor], Any]
ROWS: Place = lambda tensor: Shard(0)  # noqa: E731
SAMPLES: dict[Place, int] = {ROWS: 10, lambda tensor: Shard(-1): 4, lambda tensor: Replicate(): 4}
"""For each operator and dtype, most for what `fully_shard` cuts; over machines three of each."""

NO_VALUES = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose results have no values to compare."""

ROUND = frozenset({"bfloat16", "cfloat", "chalf", "float", "half"})
"""Operators that round to fewer digits, so that gradients in float64 have fewer too."""

READS_MEMORY = "its data is not allocated yet"
"""torch's words where an operator reads the memory of an argument before anything is dispatched."""


@dataclass
class Outcomes:
    """The operators that were right and those that were refused at least once, and for each what else has happened."""

    right: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    wrong: dict[str, list[str]] = field(default_factory=dict)


def outcomes(
    devices: Sequence[Any],
    placements: Mapping[Place, int],
    *,
    dtypes: Sequence[torch.dtype],
    requires_grad: bool,
    chosen: Callable[[str], bool] = lambda name: True,
) -> list[Outcomes]:
    """Runs operators on samples as function, method, in place and as Python's operators, for each placement.

    The first tensor is sharded, then all but the first, then all. ``placements``: for each how many samples.
    """
    found = {placement: Outcomes() for placement in placements}
    for op in op_db:
        if not chosen(op.name):
            continue
        for dtype in dtypes:
            if not op.supports_dtype(dtype, "cpu") or (requires_grad and not op.supports_autograd):
                continue
            for number, sample in enumerate(_samples(op, dtype, requires_grad, max(placements.values()))):
                arguments = _copied((sample.input, sample.args, sample.kwargs), torch.device(devices[0]))
                wanted = [placement for placement, samples in placements.items() if number < samples]
                for variant in _variants(op):
                    if variant is not None:
                        _try({placement: found[placement] for placement in wanted}, op, variant, arguments, devices)
    return [*found.values()]


def _variants(op: Any) -> Sequence[Callable[..., Any] | None]:
    return op.op, op.method_variant, op.inplace_variant, op.operator_variant, op.inplace_operator_variant


def _samples(op: Any, dtype: torch.dtype, requires_grad: bool, count: int) -> Iterator[Any]:
    torch.default_generator.manual_seed(0)
    try:
        given = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        for sample, _ in zip(given, range(count), strict=False):
            yield sample
    except (ImportError, RuntimeError, NotImplementedError):  # torch's own samples need what this machine lacks
        return


def _copied(arguments: Any, device: torch.device) -> Any:
    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return device if isinstance(value, torch.device) else value
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)

    return tree_map(copied, arguments)


def _is_plain(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def _try(
    found: Mapping[Place, Outcomes],
    op: Any,
    variant: Callable[..., Any],
    arguments: Any,
    devices: Sequence[Any],
) -> None:
    is_in_place = variant in (op.inplace_variant, op.inplace_operator_variant)
    tensors = sum(isinstance(value, Tensor) for value in tree_leaves(arguments))
    if not tensors:
        return
    if not all(_is_plain(value) for value in tree_leaves(arguments) if isinstance(value, Tensor)):
        return
    try:
        expected = _result(variant, _copied(arguments, torch.device(devices[0])), is_in_place)
    except Exception:  # not for plain tensors either
        return
    for placement, of_placement in found.items():
        for chosen in [{0}, {*range(1, tensors)}, {*range(tensors)}] if tensors > 1 else [{0}]:
            _try_sharded(of_placement, op, variant, arguments, devices, placement, chosen, expected)


def _try_sharded(
    found: Outcomes,
    op: Any,
    variant: Callable[..., Any],
    arguments: Any,
    devices: Sequence[Any],
    placement: Place,
    chosen: Collection[int],
    expected: list[Any],
) -> None:
    """With these of the tensors sharded, by their numbers."""
    outcome, words = _outcome(op, variant, arguments, devices, placement, chosen, expected)
    if (over := over_of(devices)) is not None:
        over = cast("FakeOver", over)
        over.sync()
        of_all = over.objects((outcome, words))
        if len({outcome for outcome, _ in of_all}) > 1:
            outcome, words = "wrong", f"machines differ: {of_all}"
    if outcome == "wrong":
        found.wrong.setdefault(op.name, []).append(words)
        return
    if outcome != "unreached":
        (found.right if outcome == "right" else found.refused).add(op.name)


def _outcome(
    op: Any,
    variant: Callable[..., Any],
    arguments: Any,
    devices: Sequence[Any],
    placement: Place,
    chosen: Collection[int],
    expected: list[Any],
) -> tuple[str, str]:
    """What happens, in a word, and the words of the error."""
    is_in_place = variant in (op.inplace_variant, op.inplace_operator_variant)
    seen = -1

    def divided(value: Any) -> Any:
        nonlocal seen
        if not isinstance(value, Tensor):
            return value
        seen += 1
        return sharded(value, devices, placement(value)) if seen in chosen else value

    on_devices = _copied(arguments, torch.device(devices[0]))
    try:
        got = _result(variant, tree_map(divided, on_devices), is_in_place)
        _compare(op.name, got, expected)
    except Exception as error:
        is_known = "refused" if _is_refusal(error) else "unreached" if READS_MEMORY in str(error) else "wrong"
        return is_known, f"{type(error).__name__}: {error}"
    return "right", ""


def _is_refusal(error: Exception) -> bool:
    """Of ``plain += sharded`` a TypeError would not arrive."""
    message = str(error)
    if isinstance(error, TypeError):
        return "full_tensor()" in message or "unsupported operand type" in message
    return isinstance(error, RuntimeError) and "if it writes to a plain tensor; use full_tensor()" in message


def _result(variant: Callable[..., Any], arguments: Any, is_in_place: bool) -> list[Any]:
    """Results, the tensor that was written to, and the gradients of leaves."""
    leaves = [value for value in tree_leaves(arguments) if isinstance(value, Tensor) and value.requires_grad]
    if is_in_place and leaves:  # leaves cannot be written to
        arguments = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, arguments)
    first, others, named = arguments
    for device in {value.device for value in tree_leaves(arguments) if isinstance(value, Tensor)}:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps a traceback for each kind of devices
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed_all(0)
    result = variant(first, *others, **named)
    if result is NotImplemented:
        raise TypeError("unsupported operand type(s), as Python says then")
    gradients: list[Any] = []
    graphs = [value for value in tree_leaves(result) if isinstance(value, Tensor) and value.requires_grad]
    if leaves and graphs:
        loss = sum((value.abs() if value.is_complex() else value * value).sum() for value in graphs)
        assert isinstance(loss, Tensor)
        loss.backward()
        gradients = [leaf.grad for leaf in leaves]
    written = [first] if is_in_place and isinstance(first, Tensor) else []
    return [result, result is first, written, gradients]


def _compare(name: str, got: Any, expected: Any) -> None:
    def whole(value: Any) -> Any:
        return full(value, has_values=name not in NO_VALUES) if isinstance(value, Tensor) else value

    gots, expecteds = [whole(value) for value in tree_leaves(got)], [whole(value) for value in tree_leaves(expected)]
    assert len(gots) == len(expecteds), (len(gots), len(expecteds))
    for one, other in zip(gots, expecteds, strict=True):
        if isinstance(other, Tensor):
            assert isinstance(one, Tensor), one
            assert (one.shape, one.dtype) == (other.shape, other.dtype), (one.shape, one.dtype, other)
            if name not in NO_VALUES:
                # Vectorised and remaining elements of a part may differ in the last bits.
                is_double = other.dtype in (torch.float64, torch.complex128) and name not in ROUND
                tolerance = 1e-9 if is_double else 1e-5
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert one == other or one is other, (one, other)


@pytest.fixture(autouse=True)
def samples_warn() -> Iterator[None]:
    """torch's samples are made with functions that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(
    on_owners: OnOwners, samples: Mapping[Any, int], requires_grad: bool, right: int, refused: int, **which: Any
) -> None:
    """Nothing is wrong with any placement, and as many operators at least were right and refused."""

    def sweep(owners: Any) -> list[Outcomes]:
        wanted = samples if over_of(owners) is None else dict.fromkeys(samples, 3)
        return outcomes(owners, wanted, requires_grad=requires_grad, **which)

    for all_found in on_owners(sweep):
        for found in all_found:
            assert found.wrong == {}
            assert len(found.right) >= right
            assert len(found.refused) >= refused


def part(number: int) -> Callable[[str], bool]:
    return lambda name: crc32(name.encode()) % PARTS == number


@pytest.mark.devices("cpu")
@pytest.mark.slots(4)
@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize(("requires_grad", "right", "refused"), [(False, 14, 20), (True, 9, 19)])
def test_every_one_is_right_or_refused(
    on_owners: OnOwners, number: int, requires_grad: bool, right: int, refused: int
) -> None:
    """Gradients too."""
    dtypes = [torch.float64, torch.complex128] if requires_grad else [torch.float64, torch.int64, torch.complex128]
    check(on_owners, SAMPLES, requires_grad, right, refused, dtypes=dtypes, chosen=part(number))


@pytest.mark.devices("sim")
@pytest.mark.parametrize("number", range(PARTS))
def test_every_one_is_right_or_refused_on_devices(slots: list, number: int) -> None:
    check(lambda sweep: [sweep(slots)], {ROWS: 2}, False, 11, 16, dtypes=[torch.float64], chosen=part(number))


@pytest.mark.slots(RANKS)
@pytest.mark.parametrize("machines", [2, 4])
def test_those_of_the_manual_do_over_machines_what_they_do_on_one(slots: list, machines: int) -> None:
    def sweep(over: FakeOver) -> dict[str, Checked]:
        return {one.name: checked(one, owners_of(slots, over)) for one in swept()}

    expected = on_sharded_tensors(slots)
    for found in on_fake_machines(sweep, machines):
        for name, counts in found.items():
            assert (counts.right, counts.refused, counts.wrong) == (expected[name].right, expected[name].refused, 0), (
                name
            )
