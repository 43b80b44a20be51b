"""`check_op`: an operator on plain tensors and on distributed ones, in every combination of placements.

``calls`` runs the operator and keeps what can be compared; this file asks for each combination, compares and reports.
On a mesh all ranks run this file together. They make all calls, then agree on how each has ended, and only then join
results: joining is collective, and a rank that failed alone would leave the others waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dataparallel.devices import DeviceLike
from dataparallel.testing.sharding.calls import OperatorCall, OperatorOutcome
from dataparallel.testing.sharding.converter import ShardingConverter
from dataparallel.testing.sharding.differences import differences
from dataparallel.testing.sharding.targets import Target

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dataparallel.testing.sharding.on_devices import Placements

RIGHT, REFUSED, WRONG = range(3)


@dataclass(frozen=True)
class Checked:
    """How many combinations of placements gave what.

    Attributes:
        right: the result of plain tensors.
        refused: the library's, or torch's, error for operators that do not work on tensors that are distributed so.
        wrong: another result, or another error.
        refusals: for each combination that was refused a line with the placements and the message.
    """

    right: int
    refused: int
    wrong: int
    refusals: tuple[str, ...] = ()


class OperatorDiffers(AssertionError):
    """An operator on distributed tensors gave another result than on plain ones, or another error than a refusal.

    Attributes:
        checked: the counts of all combinations.
    """

    def __init__(self, message: str, checked: Checked) -> None:
        super().__init__(message)
        self.checked = checked


@dataclass
class _Found:
    """What one combination of placements gave on this rank.

    Attributes:
        name: the placements.
        code: `RIGHT` until something else is known.
        lines: what is not right.
        outcome: what is compared.
        error: what was raised.
    """

    name: str
    code: int = RIGHT
    lines: list[str] = field(default_factory=list)
    outcome: OperatorOutcome | None = None
    error: Exception | None = None

    def has_raised(self, error: Exception, target: Target) -> None:
        self.code = REFUSED if target.is_refusal(error) else WRONG
        self.lines, self.error = [_said(error)], error


def check_op(
    op: Callable[..., Any],
    /,
    *args: Any,
    devices: Sequence[DeviceLike] | DeviceMesh | None = None,
    gradients: bool = False,
    even_only: bool = False,
    **kwargs: Any,
) -> Checked:
    """Calls ``op(*args, **kwargs)`` on plain tensors, then once for each way to distribute them, and compares.

    Compared are results, nested in any way: structure, shapes, dtypes and values, NaNs being equal (float64 and
    complex128 to 1e-9, other dtypes as `torch.testing.assert_close` does); arguments that the operator writes to, and
    that it writes to no others; which results are arguments themselves; gradients on demand. A call is refused if this
    library raises its ``NotImplementedError`` that names ``full_tensor()``, or ``ValueError`` about placements that
    differ; for DTensors, if torch raises ``NotImplementedError`` or says that sharding propagation, mixed arguments or
    a change of placement in place is not possible. Every call starts with the same seed. The caller's random state does
    not change.

    Args:
        op: a function of torch, a method (``torch.Tensor.add_``) or any other callable.
        *args: positional arguments of the operator; see `ShardingConverter`. They are copied for each call.
            Tensors that cannot be distributed are not copied, so the operator must not write to these.
        devices: a list of devices for this library's sharded tensors; a ``DeviceMesh`` for DTensors, then every rank of
            it calls this function with the same values. ``None``: two accelerators, or else two slots on the CPU.
        gradients: compare the gradients of the arguments that require one too.
        even_only: only combinations whose parts have equal sizes.
        **kwargs: keyword arguments of the operator.

    Returns:
        How many combinations were right, and how many were refused.

    Raises:
        OperatorDiffers: an `AssertionError` that lists every combination with a wrong result or another error.
        ValueError: no tensor can be distributed; the operator gives other results for the same seed; ``gradients``
            without an argument or result that requires one.
        Exception: what the operator raises on plain tensors.
    """
    __tracebackhide__ = True
    converter = ShardingConverter(args, kwargs, devices, even_only=even_only)
    target = converter.target
    call = OperatorCall(op, args, kwargs, gradients)
    wanted = call.on_plain(args, kwargs)
    found = []
    for of_one in converter:
        one = _Found(_named(converter.combination))
        found.append(one)
        try:
            one.outcome = call.on_distributed(*of_one, target)
        except Exception as error:
            one.has_raised(error, target)
    _agree(found, target)
    if gradients:
        for one, outcome in _right(found):
            try:
                call.gradients_of_distributed(outcome, target)
            except Exception as error:
                one.has_raised(error, target)
        _agree(found, target)
    for one, outcome in _right(found):
        try:
            one.lines = [*_compared(outcome, wanted, target)]
        except Exception as error:
            one.lines, one.error = [f"the result cannot be joined: {_said(error)}"], error
        one.code = WRONG if one.lines else RIGHT
        one.outcome = None
    _agree(found, target)
    return _concluded(call, found, target)


def _right(found: list[_Found]) -> list[tuple[_Found, OperatorOutcome]]:
    return [(one, one.outcome) for one in found if one.code == RIGHT and one.outcome is not None]


def _agree(found: list[_Found], target: Target) -> None:
    """Where ranks of a mesh have seen different things, all of them know what each has seen; collective."""
    of_ranks = target.codes_of_all([one.code for one in found])
    for place, one in enumerate(found):
        codes = {codes[place] for codes in of_ranks}
        if len(codes) > 1:
            said = target.texts_of_all("; ".join(one.lines) or "nothing wrong")
            one.code, one.lines = WRONG, [", ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _compared(got: OperatorOutcome, wanted: OperatorOutcome, target: Target) -> Iterator[str]:
    def whole(tensor: Tensor) -> Tensor:
        return target.whole(tensor) if target.holds(tensor) else tensor

    yield from differences(got.result, wanted.result, "result", whole)
    for (path, is_argument), (_, expected) in zip(got.identities, wanted.identities, strict=False):
        if is_argument != expected:
            yield f"{path} is {is_argument or 'a new tensor'}, expected {expected or 'a new tensor'}"
    for name, value in wanted.written.items():
        yield from differences(got.written[name], value, f"{name}, which is written to,", whole)
    for name in got.spoilt:
        yield f"{name} has been written to, and is only read by the operator on plain tensors"
    for name, gradient in wanted.gradients.items():
        yield from differences(got.gradients.get(name), gradient, f"the gradient of {name}", whole)


def _concluded(call: OperatorCall, found: list[_Found], target: Target) -> Checked:
    """The counts, or the error. Ranks have agreed."""
    counts = Counter(one.code for one in found)
    refusals = tuple(f"{one.name}: {one.lines[0]}" for one in found if one.code == REFUSED)
    checked = Checked(counts[RIGHT], counts[REFUSED], counts[WRONG], refusals)
    if not checked.wrong:
        return checked
    wrong = [one for one in found if one.code == WRONG]
    lines = [
        f"{call.name} on {target} differs from plain tensors in {checked.wrong} of {len(found)} combinations of "
        f"placements ({checked.right} are right, {checked.refused} refused):",
        *(f"  {one.name}: {'; '.join(one.lines)}" for one in wrong),
    ]
    raise OperatorDiffers("\n".join(lines), checked) from next((one.error for one in wrong if one.error), None)


def _named(combination: dict[str, Placements]) -> str:
    return ", ".join(f"{name} {_short(placements)}" for name, placements in combination.items())


def _short(placements: Placements) -> str:
    words = [
        f"Shard({dim})" if (dim := getattr(each, "dim", None)) is not None else "Replicate()" for each in placements
    ]
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"
