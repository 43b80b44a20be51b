"""`FormOptions` are what all forms take by keyword, and `CallOptions` holds those that all calls of a form share.

`scalar_rule` says how scalars that replicas return, such as a loss, become one scalar of the whole batch.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor

from dataparallel.arguments import checked
from dataparallel.batches.gather import Pad, checked_pad
from dataparallel.batches.scatter import ChunkSizes, Split
from dataparallel.devices import DeviceLike, resolve_output, resolve_slots
from dataparallel.replicas.replicate import BUCKET_CAP_MB, cap_in_bytes
from dataparallel.threads.permits import Permits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

F = TypeVar("F", bound=Callable[..., Any])

ScalarRule: TypeAlias = Literal["mean", "sum"] | Callable[[Tensor, tuple[int, ...]], Tensor] | None
"""``"mean"``, ``"sum"``, or a function of the values and of the numbers of samples; ``None``: a vector, as in torch."""


def _mean(values: Tensor, samples: tuple[int, ...]) -> Tensor:
    """Weights each value with its number of samples: the mean over the batch of a mean over each chunk."""
    if not (values.is_floating_point() or values.is_complex()):
        values = values.to(torch.get_default_dtype())
    total = sum(samples)
    if len({*samples}) == 1 or total == 0:
        return values.mean()
    shares = [value * (count / total) for value, count in zip(values.unbind(), samples, strict=True)]
    return torch.stack(shares).sum()


def _sum(values: Tensor, samples: tuple[int, ...]) -> Tensor:
    return values.sum()


_RULES: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {"mean": _mean, "sum": _sum}


def scalar_rule(scalars: ScalarRule) -> Callable[[Tensor, tuple[int, ...]], Tensor] | None:
    """Returns the function that combines the scalars of a call; ``None`` if they become a vector."""
    rule = checked_option("scalars", scalars)
    return _RULES[rule] if isinstance(rule, str) else rule


class FormOptions(TypedDict, total=False):
    """What each form takes by keyword: `DESCRIPTION` says what it means."""

    chunk_sizes: ChunkSizes
    workers: int | None
    serial: bool | None
    compile: bool | dict[str, Any] | None
    graphs: bool | Literal["auto"] | None
    scalars: ScalarRule
    pad: Pad
    sync_batch_norm: bool | Literal["across_machines"]
    devices: Sequence[DeviceLike] | None


class InPlaceOptions(FormOptions, total=False):
    """What the forms that change a module in place take besides."""

    device_ids: Sequence[DeviceLike] | None
    output_device: DeviceLike | None
    dim: int
    process_group: ProcessGroup | None
    mesh: DeviceMesh | None
    ignored_params: Iterable[Tensor] | None


class ReplicateOptions(InPlaceOptions, total=False):
    """What `replicate` takes besides."""

    bucket_cap_mb: float
    first_bucket_mb: float
    broadcast_buffers: bool
    average: bool


DEFAULTS: dict[str, Any] = {
    "dim": 0, "sync_batch_norm": False, "bucket_cap_mb": BUCKET_CAP_MB, "first_bucket_mb": 1,
    "broadcast_buffers": True, "average": True,
}  # fmt: skip
"""Of the other options it is ``None``."""

_EXPECTED: dict[str, tuple[Any, ...]] = {
    "output_device": (int, str, torch.device, None),
    "dim": (int,),
    "workers": (int, None),
    "serial": (bool, None),
    "compile": (bool, dict, None),
    "graphs": (bool, "auto", None),
    "scalars": (*_RULES, Callable, None),
    "sync_batch_norm": (bool, "across_machines"),
    "bucket_cap_mb": (float,),
    "first_bucket_mb": (float,),
    "broadcast_buffers": (bool,),
    "average": (bool,),
    "units": ("auto", None),
    "shard_placement_fn": (Callable, None),
}
"""What `checked` tests of each option. Others have checks of their own, which know the module or the slots."""

DESCRIPTION = """\
device_ids, devices: the slots, two names of one argument: ints (accelerators), strings, ``torch.device``. One
    device may be listed several times: ``["cpu", "cpu"]`` are two slots on the CPU. Default: all accelerators;
    without any the module just runs.
output_device: where outputs are gathered; default the first slot, -1 or ``"cpu"`` for the CPU.
dim: the batch dimension of inputs and outputs.
chunk_sizes: how the slots share a batch, if not equally. Ints are the number of samples for each slot, which
    has to fit every batch. With a float among them they are shares of any batch: ``[0.5, 1, 1]``. How to
    find them: :ref:`uneven-devices`.
workers: how many replicas may run Python at the same time; default: the library chooses. See
    `dataparallel.parallel_apply`.
serial: run all replicas in the calling thread, so that ``breakpoint()`` works; default: the value of the
    environment variable ``DATAPARALLEL_SERIAL``.
compile: compile the replicas: ``True``, or a dict of arguments for ``torch.compile`` (``backend``, ``mode``,
    ``dynamic``, ``fullgraph``, ``options``). The module itself stays as it is. A module that is compiled
    before, as a whole or in parts, needs no argument.
graphs: capture the replicas on CUDA devices as graphs, so that one call of the host launches many operators:
    see :doc:`/guide/graphs`. What cannot be captured runs as it is, and the reason is logged. Between calls the
    replicas keep copies of the parameters on their devices. ``"auto"``: only if all devices have graphs. By
    default it is ``"auto"`` for what is compiled with CUDA graphs, by ``mode="reduce-overhead"`` for example,
    and ``False`` for all else.
scalars: how scalars that the module returns, such as a loss of its own, become one: ``"mean"``, in which each
    chunk counts by its samples, ``"sum"``, or a function of a vector of the values and a tuple with the number
    of samples of each chunk. Without it they become a vector, as in torch. A single replica's stay as they are.
pad: for outputs whose sizes differ between replicas in another dimension than ``dim``, such as generated
    tokens: a number, which fills each of them at its end up to the largest one. In a tuple of tensors, entries
    that a replica lacks are filled too. Or a dict of numbers for outputs by key or field, which may be nested:
    ``{"ids": 0, "scores": -1.0}``. Other outputs may not differ then.
sync_batch_norm: make each BatchNorm of the module a `dataparallel.nn.SyncBatchNorm`, in place, so that its
    statistics are those of the whole batch; with ``"across_machines"`` of the batch of all machines. A
    ``torch.nn.SyncBatchNorm`` is refused otherwise."""
"""The arguments of all forms, in the place of ``<options>`` in a docstring."""


def takes(options: type) -> Callable[[F], F]:
    """Decorates a function with ``**options``: its signature shows each, and its docstring the `DESCRIPTION`."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named, _ = signature.parameters.values()
        for name, annotation in options.__annotations__.items():
            kind, kept = inspect.Parameter.KEYWORD_ONLY, annotation.__forward_arg__
            named.append(inspect.Parameter(name, kind, default=DEFAULTS.get(name), annotation=kept))
        function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        function.__doc__ = described(function.__doc__)
        return function

    return decorate


def described(docstring: str | None) -> str | None:
    if docstring is None:
        return None
    return inspect.cleandoc(docstring).replace("    <options>", textwrap.indent(DESCRIPTION, "    "))


def completed(options: type, given: Mapping[str, Any], form: str, **own: Any) -> dict[str, Any]:
    """Returns the options, with defaults for those that are not given, and the form's own, all by `checked_option`."""
    if unknown := [name for name in given if name not in options.__annotations__]:
        raise TypeError(f"{form}() got an unexpected keyword argument {unknown[0]!r}")
    complete = {**{name: DEFAULTS.get(name) for name in options.__annotations__}, **given, **own}
    return {name: checked_option(name, value) for name, value in complete.items()}


def checked_option(name: str, value: Any) -> Any:
    """Returns the value, with numbers of Python. Raises as `checked` if it has a type or range that is not expected."""
    above = None if name in ("dim", "output_device") else 0
    return checked(name, value, *_EXPECTED[name], above=above) if name in _EXPECTED else value


class CallOptions:
    """The options of a form, which all its calls share. The user reads them, and assigns some of them between calls.

    An option is checked when it is assigned. If it is refused, nothing changes.

    Attributes:
        chunk_sizes, workers, serial, bucket_cap_mb, scalars, pad: as given; a sequence is a tuple here.
        permits: says how many replicas run at a time, and learns from the first calls.
    """

    assignable: ClassVar[tuple[str, ...]] = (
        "chunk_sizes", "workers", "serial", "scalars", "pad", "output_device", "dim"
    )  # fmt: skip

    taken: ClassVar[Set[str]] = {*assignable, "bucket_cap_mb"}
    """Those that it takes out of a form's `FormOptions`."""

    slots: Sequence[DeviceLike]
    output_device: DeviceLike | None
    dim: int
    chunk_sizes: ChunkSizes
    workers: int | None
    serial: bool | None
    bucket_cap_mb: float
    scalars: ScalarRule
    pad: Pad
    split: Split
    cap_bytes: int
    combines: Callable[[Tensor, tuple[int, ...]], Tensor] | None
    permits: Permits

    def __init__(self, slots: Sequence[DeviceLike], given: Mapping[str, Any]) -> None:
        vars(self).update(slots=slots, permits=Permits())
        for name in given:
            if name in self.taken:
                vars(self).update(self._checked(name, given[name]))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.assignable:
            of_model = f": write model.{name}, as in torch" if name in CallOptions.assignable else ""
            raise AttributeError(
                f"options.{name} cannot be assigned{of_model}. Between calls one may assign "
                f"{', '.join(self.assignable)}; pass other options where you give the module its form"
            )
        vars(self).update(self._checked(name, value))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.assignable)})"

    def _checked(self, name: str, value: Any) -> dict[str, Any]:
        value = checked_option(name, value)
        if name == "chunk_sizes":
            split = Split(value, len(self.slots) or None)
            return {name: split.given, "split": split}
        if name == "bucket_cap_mb":
            return {name: value, "cap_bytes": cap_in_bytes(value)}
        if name == "scalars":
            return {name: value, "combines": scalar_rule(value)}
        if name == "pad":
            return {name: checked_pad(value)}
        if name == "output_device" and self.slots:
            resolve_output(value, resolve_slots(self.slots))
        return {name: value}
