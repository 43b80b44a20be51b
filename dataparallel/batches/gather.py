"""The stage `gather`: joins one structure from each replica into one. Every error names the place in the structure.

The option ``pad=`` first fills tensors up to one size, on the device of each replica.
"""

from __future__ import annotations

import io
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, MappingView, Sequence
from functools import partial
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.autograd.functions import Gather
from dataparallel.autograd.node import OneNode, groups_that_share
from dataparallel.batches.samples import check_entries, joined_samples
from dataparallel.batches.structures import (
    PerReplica,
    Written,
    batch_of,
    container_of,
    leaves,
    path_of_key,
    tensors_in,
    with_leaves,
)
from dataparallel.comm.checks import why_no_batch, why_not_gatherable, why_not_movable
from dataparallel.comm.streams.held import held_together
from dataparallel.devices import CPU, DeviceLike, resolve
from dataparallel.samples import Samples

Pad: TypeAlias = complex | Mapping[Any, Any] | None
"""A number, or by key what holds for the outputs under this key; ``None``: outputs that differ are refused."""

PAD_HINT = (
    "; the argument pad=NUMBER of the form, or of register_forward_method, fills outputs up to one size, "
    "and pad={KEY: NUMBER} those under a key"
)


def checked_pad(pad: Any, name: str = "pad") -> Pad:
    if isinstance(pad, Mapping):
        return {key: checked_pad(value, f"{name}[{key!r}]") for key, value in pad.items()}
    if pad is not None and not isinstance(pad, Number):
        raise TypeError(f"{name}={pad!r}: expected a number, a dict with a number for each key of the outputs, or None")
    number: Any = pad
    return number.item() if hasattr(number, "item") else number  # a number of NumPy becomes one of Python


def pad_under(pad: Pad, path: str) -> Pad:
    if not isinstance(pad, Mapping):
        return pad
    return next((value for key, value in pad.items() if path in (path_of_key(key), f".{key}")), None)


def filled(tensors: Sequence[Tensor], dim: int, pad: complex, path: str) -> list[Tensor]:
    """Returns tensors that have one size in each dimension but ``dim``, if they have the same number of dimensions.

    What a strided tensor lacks is added at the end of the dimension, and is ``pad``. Gradients reach the rest.
    """
    if tensors[0].layout is not torch.strided or len({tensor.dim() for tensor in tensors}) > 1:
        return [*tensors]
    most = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    results = []
    for tensor in tensors:
        missing = [size - own for size, own in zip(most, tensor.shape, strict=True)]
        if missing:
            missing[dim] = 0
        if any(missing):
            _check_value(pad, tensor.dtype, path)
            both_ends = [number for count in reversed(missing) for number in (0, count)]
            tensor = torch.constant_pad_nd(tensor, both_ends, pad)
        results.append(tensor)
    return results


def with_all_entries(outputs: Sequence[tuple[Any, ...]], dim: int, pad: complex, path: str) -> list[tuple[Any, ...]]:
    """Returns tuples as long as the longest. Tensors in entries that a replica lacks have its samples, and are ``pad``.

    A replica that has stopped earlier returns fewer entries, if there is one for each step. A tuple without tensors
    stays as it is.
    """
    longest = max(outputs, key=len)
    results = []
    for output in outputs:
        own = next((tensor for tensor in tensors_in(output) if -tensor.dim() <= dim < tensor.dim()), None)
        if own is not None:
            blank = partial(_blank, own=own, dim=dim, pad=pad, path=path)
            output += tuple(with_leaves(entry, blank) for entry in longest[len(output) :])
        results.append(output)
    return results


def _blank(leaf: Any, own: Tensor, dim: int, pad: complex, path: str) -> Any:
    """Returns a tensor of ``pad`` like another replica's ``leaf``, for the samples and on the device of ``own``."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    _check_value(pad, leaf.dtype, path)
    shape = [*leaf.shape]
    if -len(shape) <= dim < len(shape):
        shape[dim] = own.shape[dim]
    return torch.full(shape, pad, dtype=leaf.dtype, device=own.device)


def _check_value(pad: complex, dtype: torch.dtype, path: str) -> None:
    if dtype.is_complex:
        fits = True
    elif isinstance(pad, complex):
        fits = False
    elif dtype == torch.bool:
        fits = pad in (0, 1)
    elif dtype.is_floating_point:
        fits = not math.isfinite(pad) or abs(pad) <= torch.finfo(dtype).max
    else:
        info = torch.iinfo(dtype)
        fits = math.isfinite(pad) and pad == int(pad) and info.min <= pad <= info.max
    if not fits:
        raise ValueError(
            f"cannot gather {path}: pad={pad!r} is no value of dtype {dtype}; pass one that is, or one for each key"
        )


_SOME_HAVE = (
    "; return the same structure from all replicas. What only some of them have can be dataparallel.samples([value]), "
    "and dataparallel.samples([]) in the others: then the output is a list with all values"
)
_HINT = "; if the list has one entry for each sample, return dataparallel.samples(list) from forward"
_HOW_TO_JOIN = (
    "; return one kind from all replicas, or say how they are joined: dataparallel.batch_types.register_batch"
)


@_torch.not_traced
def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0, *, pad: Pad = None) -> Any:
    """Joins one structure from each replica into one structure on ``target_device``.

    Tensors are concatenated along ``dim``; 0-dim tensors become a vector. Lists marked with `dataparallel.samples`
    become one list with all entries. For leaves that are no tensors the result has the first replica's if all are
    equal, else a `PerReplica` with one entry for each replica. Containers have the type and the further attributes of
    the first replica's container.

    Args:
        outputs: one structure for each replica, at least one.
        target_device: a device. -1 or ``"cpu"`` is the CPU; the values are there when the call returns.
        dim: the batch dimension.
        pad: fills outputs up to one size, as for `dataparallel.DataParallel`.

    Raises:
        TypeError: ``pad`` is something else; an output is an iterator, a view of a dict or a coroutine.
        ValueError: outputs cannot be joined, because types, keys, lengths, shapes or dtypes differ; the message names
            the place, such as ``output["logits"][2]``.
    """
    return gather_outputs(outputs, target_device, checked("dim", dim, int), pad=checked_pad(pad))


def gather_outputs(
    outputs: Sequence[Any],
    target_device: DeviceLike,
    dim: int,
    combine: Callable[[Tensor], Tensor] | None = None,
    pad: Pad = None,
    written: Sequence[Written] = (),
) -> Any:
    """`gather` for the forms. The vector of 0-dim tensors, if there is one, goes through ``combine``.

    Entries that replicas have ``written`` into containers among the arguments are joined and handed back. One that
    cannot be joined is handed back as a `PerReplica`: the caller may not need it.
    """
    if not outputs:
        raise ValueError("gather needs the output of at least one replica; got none")
    target = CPU if target_device == -1 else resolve(target_device)
    of_replicas = [*zip(outputs, *(entry.values for entry in written), strict=True)] if written else outputs
    joins = _Joins(target, dim, _of_one_node(of_replicas), combine, pad, {})
    with held_together():  # memory is held for peers once, not for each tensor
        output = _joined(list(outputs), joins, "output", ())
        for entry in written:
            try:
                path = path_of_key(entry.key)
                value = _joined(entry.values, joins._replace(pad=pad_under(pad, path)), path, ())
            except (NotImplementedError, TypeError, ValueError):
                value = PerReplica(entry.values)
            entry.hand_back(value)
    return output


def _of_one_node(outputs: Sequence[Any]) -> dict[int, Tensor]:
    """Passes tensors of a replica that share a graph through one `OneNode`. Returns its outputs by the tensors' ids."""
    found: dict[int, Tensor] = {}
    groups: dict[int, list[list[int]]] = {}  # by the number of tensors: replicas that return as many are alike
    for output in outputs if len(outputs) > 1 else ():
        tensors = [leaf for _, leaf in leaves(output, "output") if type(leaf) is Tensor and leaf.grad_fn is not None]
        made = [*{id(leaf): leaf for leaf in tensors if leaf.layout is torch.strided}.values()]
        makers = [leaf.grad_fn for leaf in made]
        if len({*makers}) < 2:
            continue
        if len(made) not in groups:
            groups[len(made)] = groups_that_share(makers)
        for group in groups[len(made)]:
            of_group = [made[i] for i in group]
            found.update(zip(map(id, of_group), OneNode.apply(*of_group), strict=True))
    return found


class _Joins(NamedTuple):
    """``done``: joined tensors, by what fills them and the ids of their parts. An output may be a written entry too."""

    target: torch.device
    dim: int
    of_one_node: dict[int, Tensor]
    combine: Callable[[Tensor], Tensor] | None
    pad: Pad
    done: dict[tuple[Any, ...], Tensor]

    @property
    def pad_value(self) -> complex | None:
        return None if isinstance(self.pad, Mapping) else self.pad


def _joined(outputs: list[Any], joins: _Joins, path: str, above: tuple[int, ...]) -> Any:
    first = outputs[0]
    if any(isinstance(output, Tensor) for output in outputs):
        key = (joins.pad_value, *map(id, outputs))
        if key not in joins.done:
            joins.done[key] = _joined_tensors(outputs, joins, path)
        return joins.done[key]
    if isinstance(first, Samples):
        _check_same_type(outputs, path)
        for output in outputs:
            check_entries(output, path)
        return joined_samples(outputs, joins.target)
    batch = batch_of(first)
    if batch is not None:
        _check_same_type(outputs, path)
        return batch.merge([batch.to(output, joins.target) for output in outputs])
    container = container_of(first)
    if container is None:
        return _joined_leaves(outputs, path)
    if id(first) in above:
        raise ValueError(f"{path} contains itself; a structure to scatter or gather must be a tree")
    _check_same_type(outputs, path)
    if type(first) is tuple and joins.pad_value is not None:
        outputs = with_all_entries(outputs, joins.dim, joins.pad_value, path)
    rows = [container.children(output) for output in outputs]
    keys = [key for key, _ in rows[0]]
    for replica, row in enumerate(rows):
        keys_here = [key for key, _ in row]
        if sorted(keys_here) != sorted(keys):
            hints: dict[type, str] = {list: _HINT, tuple: PAD_HINT, dict: _SOME_HAVE}
            raise ValueError(
                f"cannot gather {path}: replica 0 returned {len(keys)} elements {keys}, "
                f"replica {replica} {len(row)} elements {keys_here}{hints.get(type(first), _HOW_TO_JOIN)}"
            )
        if keys_here != keys:  # the same keys in another order
            rows[replica] = sorted(row, key=lambda pair: keys.index(pair[0]))
    above = (*above, id(first))
    values = [
        _joined([value for _, value in column], joins._replace(pad=pad_under(joins.pad, key)), path + key, above)
        for key, column in zip(keys, zip(*rows, strict=True), strict=True)
    ]
    return container.rebuild(first, values)


def _joined_tensors(outputs: list[Any], joins: _Joins, path: str) -> Tensor:
    dim, (at, first) = joins.dim, next((i, found) for i, found in enumerate(outputs) if isinstance(found, Tensor))
    have_dims = any(isinstance(output, Tensor) and output.dim() > 0 for output in outputs)
    problem: str | None
    for replica, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            problem = f"replica {at} returned a tensor, replica {replica} returned {kind}{_SOME_HAVE}"
        elif why := why_not_movable(output):
            problem = f"the tensor of replica {replica} {why}"
        elif (output.layout, output.is_nested) != (first.layout, first.is_nested):
            layouts = f"a tensor of layout {first.layout}, replica {replica} one of layout {output.layout}"
            problem = f"replica {at} returned {layouts}"
        elif why := why_no_batch(output):
            problem = (
                f"{why}; return a strided or a sparse COO tensor, dataparallel.samples(list) of its entries, or a "
                "class of your own for which dataparallel.batch_types.register_batch says how"
            )
        elif have_dims and not -output.dim() <= dim < output.dim():
            problem = f"replica {replica} returned shape {tuple(output.shape)}, which has no dimension {dim}"
        else:
            continue
        raise ValueError(f"cannot gather {path}: {problem}")
    outputs = [joins.of_one_node.get(id(output), output) for output in outputs]
    if joins.pad_value is not None:
        outputs = filled(outputs, dim, joins.pad_value, path)
    problem = why_not_gatherable(outputs, dim)
    if problem:
        can_be_filled = outputs[0].layout is torch.strided and len({(o.dim(), o.dtype) for o in outputs}) == 1
        hint = f"{PAD_HINT}{_turned(outputs, dim)}" if can_be_filled else ""
        raise ValueError(f"cannot gather {path}: {problem.replace('tensor', 'replica')}{hint}")
    join = Gather.apply if torch.is_grad_enabled() or _torch.is_in_dual_level() else Gather.unrecorded
    joined = join(joins.target, dim, *outputs)
    return joined if joins.combine is None or outputs[0].dim() > 0 else joins.combine(joined)


def _turned(outputs: list[Tensor], dim: int) -> str:
    """Returns what to do if tensors of different sizes in one dimension have their samples there, as a state has."""
    shapes = zip(*(output.shape for output in outputs), strict=True)
    differ = [at for at, sizes in enumerate(shapes) if len({*sizes}) > 1 and at != dim % outputs[0].dim()]
    if len(differ) != 1:
        return ""
    return (
        f". But if the samples are along dimension {differ[0]}, do not fill it: return it transposed, so that they are "
        f"along dimension {dim}, or dataparallel.samples([tensor]), which gives a list with one entry for each "
        "replica. If forward is not yours, do so in the forward of a module around it, or leave this output out there"
    )


def _joined_leaves(outputs: list[Any], path: str) -> Any:
    first = outputs[0]
    for replica, output in enumerate(outputs):
        if isinstance(output, (Iterator, AsyncIterator, Coroutine, MappingView)) and not isinstance(output, io.IOBase):
            for each in outputs:
                if isinstance(each, Coroutine):
                    each.close()  # otherwise Python warns that nobody has awaited it
            raise TypeError(
                f"cannot gather {path}: replica {replica} returned {type(output).__name__}, which gives its values "
                "when the call has ended; let forward return the values, in a list or a tuple"
            )
    for replica, output in enumerate(outputs[1:], start=1):
        if container_of(output) is not None or batch_of(output) is not None or isinstance(output, Samples):
            _check_same_type(outputs, path)
            raise ValueError(f"cannot gather {path}: replica {replica} returned a {type(output).__name__}")
    # A `PerReplica` that a wrapper inside a replica returned belongs to that replica, even if all are equal.
    own = len(outputs) > 1 and any(isinstance(output, PerReplica) for output in outputs)
    return first if not own and all(_equal(first, output) for output in outputs[1:]) else PerReplica(outputs)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        if any(getattr(a, name, None) != getattr(b, name, None) for name in ("shape", "dtype", "mask")):
            return False  # NumPy repeats entries where shapes differ, and leaves out what is masked
        answer = a == b
        # Arrays of one shape answer with an array; NaN is not even equal to itself.
        equal = bool(answer.all() if hasattr(answer, "all") else answer)
        return equal or bool(isinstance(a, float) and a != a and b != b)
    except Exception:  # a user's == may raise anything; the values are not known to be equal then
        return False


def _check_same_type(outputs: list[Any], path: str) -> None:
    """Checks that all are of one kind. A class that ``forward`` makes is another one in each replica."""
    first = outputs[0]
    for replica, output in enumerate(outputs[1:], start=1):
        if type(output) is type(first):
            continue
        names = [type(each).__name__ for each in (first, output)]
        if type(output).__qualname__ == type(first).__qualname__:
            if batch_of(output) is batch_of(first) and container_of(output) is container_of(first):
                continue  # the caller compares the fields
            names = [f"{type(each).__name__}({type(each).__mro__[1].__name__})" for each in (first, output)]
        raise ValueError(
            f"cannot gather {path}: replica 0 returned {names[0]}, replica {replica} returned {names[1]}{_HOW_TO_JOIN}"
        )
