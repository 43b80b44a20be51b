"""One operator, called on plain and on distributed arguments so that the outcomes can be compared. `check_op` calls it.

Nothing is compared here, but for one question: whether two calls on plain tensors with the same seed agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.batches.structures import leaves
from dataparallel.testing.sharding.converter import can_be_distributed, flattened, looks_like_a_tensor, replaced
from dataparallel.testing.sharding.differences import differences, same_bits
from dataparallel.testing.sharding.targets import Target


@dataclass
class OperatorOutcome:
    """What a call has done.

    Attributes:
        inputs: by name, the arguments that are or could be distributed.
        result: what the operator returned.
        identities: for each tensor of the result its place, and the name of the argument that it is, or "".
        written: by name, the arguments that the operator writes to.
        spoilt: names of arguments that it should not have written to.
        gradients: by name, those of the arguments that require one.
    """

    inputs: dict[str, Tensor]
    result: Any
    identities: list[tuple[str, str]]
    written: dict[str, Any]
    spoilt: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class OperatorCall:
    """A call that is repeated on other tensors.

    Attributes:
        name: the operator's.
    """

    def __init__(
        self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], gradients: bool
    ) -> None:
        self.op = op
        self.name = str(getattr(op, "__name__", op))
        self.gradients = gradients
        self.written: set[str] = set()
        self._on_clones = False
        # Tensors keep their places in the arguments, whatever they are distributed as.
        flat = flattened(args, kwargs)
        tensors = [place for place, (_, value) in enumerate(flat) if looks_like_a_tensor(value)]
        self._places = [place for place in tensors if can_be_distributed(flat[place][1])]
        if not self._places:
            raise ValueError(
                f"{self.name} is called with no tensor that can be distributed, so there is nothing to check: pass a "
                f"dense tensor; got {', '.join(type(value).__name__ for _, value in flat) or 'no arguments'}"
            )
        if gradients and not any(flat[place][1].requires_grad for place in self._places):
            raise ValueError(f"gradients of {self.name} are to be compared, but no argument requires one")

    def on_plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OperatorOutcome:
        """What is right: the outcome on copies of the arguments. Finds out what the operator writes to.

        Raises:
            ValueError: two calls with the same seed differ; nothing that comes out requires a gradient.
        """
        first, again = self._on_copies(args, kwargs), self._on_copies(args, kwargs)
        for one, other, what in ((first.result, again.result, "result"), (first.written, again.written, "arguments")):
            for difference in differences(other, one, what, lambda tensor: tensor):
                raise ValueError(
                    f"{self.name} gives something else in each call, although every call starts with the same seed, so "
                    f"there is nothing to compare with: {difference}"
                )
        return first

    def on_distributed(self, args: Any, kwargs: Any, target: Target) -> OperatorOutcome:
        """The outcome on distributed arguments, without gradients."""
        inputs = self._inputs(args, kwargs)
        given_args, given_kwargs = self._given(args, kwargs, inputs)
        given = self._inputs(given_args, given_kwargs)
        read = {name: tensor for name, tensor in given.items() if name not in self.written}
        before = {name: [part.detach().clone() for part in target.local(tensor)] for name, tensor in read.items()}
        with _seeded():
            result = self.op(*given_args, **given_kwargs)
        spoilt = [
            name
            for name, tensor in read.items()
            if not all(map(same_bits, before[name], (part.detach() for part in target.local(tensor))))
        ]
        written = {name: given[name] for name in self.written}
        return OperatorOutcome(inputs, result, _identities(result, given), written, spoilt)

    def gradients_of_distributed(self, outcome: OperatorOutcome, target: Target) -> None:
        """Adds the gradients to an outcome of `on_distributed`; collective on a mesh."""

        def start(output: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
            return target.for_backward(output, cotangent) if target.holds(output) else (output, cotangent)

        outcome.gradients = self._backward(outcome, start)

    def _on_copies(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OperatorOutcome:
        original = self._inputs(args, kwargs)
        copied_args, copied_kwargs = replaced(args, kwargs, {id(value): _copy(value) for value in original.values()})
        inputs = self._inputs(copied_args, copied_kwargs)
        try:
            return self._plain(copied_args, copied_kwargs, inputs, original)
        except RuntimeError as error:
            # An operator in place cannot write to a leaf that requires a gradient; to a clone of it, it can.
            if self._on_clones or not self.gradients or "leaf Variable" not in str(error):
                raise
            self._on_clones = True
            return self._on_copies(args, kwargs)

    def _plain(self, args: Any, kwargs: Any, inputs: dict[str, Tensor], original: dict[str, Tensor]) -> OperatorOutcome:
        args, kwargs = self._given(args, kwargs, inputs)
        given = self._inputs(args, kwargs)
        with _seeded():
            result = self.op(*args, **kwargs)
        written = {name: given[name] for name, value in original.items() if not same_bits(given[name], value)}
        self.written = {*written}
        outcome = OperatorOutcome(inputs, result, _identities(result, given), written)
        if self.gradients:
            outcome.gradients = self._backward(outcome, lambda output, cotangent: (output, cotangent))
        return outcome

    def _inputs(self, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """By name, the tensors that are or could be distributed; one that occurs twice has one name."""
        flat = flattened(args, kwargs)
        named: dict[int, tuple[str, Tensor]] = {}
        for place in self._places:
            name, value = flat[place]
            named.setdefault(id(value), (name, value))
        return dict(named.values())

    def _given(self, args: Any, kwargs: Any, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
        if not self._on_clones:
            return args, kwargs
        return replaced(args, kwargs, {id(value): value.clone() for value in inputs.values()})

    def _backward(
        self, outcome: OperatorOutcome, start: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor | None]:
        """Gradients of everything that comes out, in fixed directions."""
        results = [value for _, value in leaves(outcome.result, "result") if isinstance(value, Tensor)]
        outputs = {id(value): value for value in (*results, *outcome.written.values()) if value.requires_grad}
        if not outputs:
            raise ValueError(f"gradients of {self.name} are to be compared, but nothing that it returns requires one")
        pairs = [start(output, _cotangent(output, place)) for place, output in enumerate(outputs.values())]
        wanted = {name: value for name, value in outcome.inputs.items() if value.requires_grad}
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [*wanted.values()],
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
        return dict(zip(wanted, found, strict=True))


def _identities(result: Any, given: dict[str, Tensor]) -> list[tuple[str, str]]:
    names = {id(value): name for name, value in given.items()}
    return [(path, names.get(id(value), "")) for path, value in leaves(result, "result") if isinstance(value, Tensor)]


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _cotangent(output: Tensor, place: int) -> Tensor:
    """Different for each element, and for each output."""
    angles = torch.arange(output.numel(), dtype=torch.float64) + place
    values = torch.complex(angles.sin(), angles.cos()) if output.is_complex() else angles.sin()
    return values.reshape(output.shape).to(dtype=output.dtype, device=output.device)


@contextmanager
def _seeded() -> Iterator[None]:
    """Inside, random numbers are those of seed 0. Afterwards the caller's are as they were."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cuda" if accelerator is None else accelerator.type
    devices = [] if accelerator is None else range(torch.accelerator.device_count())
    with torch.random.fork_rng(devices, device_type=kind):
        # torch.manual_seed asks all types of devices, and keeps a stack trace for those that have not been used.
        torch.default_generator.manual_seed(0)
        if accelerator is not None:
            torch.get_device_module(accelerator).manual_seed_all(0)
        yield
