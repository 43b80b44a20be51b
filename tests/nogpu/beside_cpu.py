"""A script: every operator of torch's own database of samples, on a device without hardware and on the CPU.

For each operator and dtype it prints one line of JSON: how many samples were right, which errors refused others, and
what was wrong. Before it begins with an operator it prints its name, so that whoever reads this knows where it crashed.
`test_op_db` starts it, with ``sim --piece 2/8`` and the like; by hand, ``python beside_cpu.py cuda --names add,mm``.

Right means: the same values as on the CPU, forwards, and backwards for float64. Numbers that are drawn are as the CPU's
in shape and dtype only, but a seed repeats them. Of numbers that nobody has set, shape and dtype are compared. A sample
that the CPU refuses is not counted.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nogpu import cuda

if sys.argv[1] == "cuda":  # before torch is imported
    cuda.stand_in(2)

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if sys.argv[1] == "sim":
    from nogpu import simulate

    simulate(2)

FIRST, DEVICE = f"{sys.argv[1]}:0", f"{sys.argv[1]}:1"
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.bfloat16)

# Their results, or a part of them, are memory that nobody has written.
UNSET = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_"),
}
# An error that says what is missing: a kernel by its name, or an operator. tensor_split is refused on every GPU.
NAMES = re.compile(r"the kernel \S+|aten::\w+|^RuntimeError: tensor_split expected")


@dataclass
class Found:
    """What came of the samples of one operator with one dtype."""

    right: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Notices if an operator draws. Its values are not to be trusted: below a mode, torch forgets conjugate bits."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def copied_to_device(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, over as much memory: a view of a part of it stays one."""
    is_view = value.layout is torch.strided and not value.is_nested and not (value.is_conj() or value.is_neg())
    if is_view and value.untyped_storage().nbytes() > value.numel() * value.element_size():
        count = value.untyped_storage().nbytes() // value.element_size()
        whole = torch.as_strided(value, (count,), (1,), 0).to(DEVICE)
        return torch.as_strided(whole, value.shape, value.stride(), value.storage_offset())
    return value.to(DEVICE)


def copied(values: Any, copy: Callable[[torch.Tensor], torch.Tensor] = copied_to_device) -> Any:
    """The values with copies of their tensors, one for each. Devices become that of the copies."""
    copies: dict[int, torch.Tensor] = {}

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = copy(value.detach()).requires_grad_(value.requires_grad)
            return copies[id(value)]
        if copy is copied_to_device and (
            isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu")
        ):
            return torch.device(DEVICE)
        return value

    return tree_map(each, values)


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


class Trial:
    """One sample on one device: `forward` and then, if the operator can, `backward`."""

    def __init__(self, call: Callable[..., Any], finish: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.call, self.finish = call, finish
        self.input, self.args, self.kwargs = arguments
        self.out: Any = None

    def forward(self) -> Any:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.out = self.call(self.input, *self.args, **self.kwargs)
        return self.out

    def backward(self) -> list[torch.Tensor | None]:
        leaves = [leaf for leaf in tensors_of((self.input, self.args, self.kwargs)) if leaf.requires_grad]
        outs = [out for out in tensors_of(self.finish(self.out)) if out.requires_grad]
        if not leaves or not outs:
            return []
        generator = torch.Generator().manual_seed(1)
        cotangents = [
            torch.randn(out.shape, dtype=out.dtype, generator=generator).to(out.device)
            if out.layout is torch.strided
            else torch.ones_like(out)
            for out in outs
        ]
        return list(torch.autograd.grad(outs, leaves, cotangents, allow_unused=True))


def check_same(found: Any, expected: Any, values: bool = True, moves: bool = True) -> None:
    """Raises AssertionError if tensors differ, or are not on the device. Without `moves`, the CPU is one too."""
    found_parts, expected_parts = tree_flatten(found)[0], tree_flatten(expected)[0]
    assert len(found_parts) == len(expected_parts), f"{len(found_parts)} results, the CPU has {len(expected_parts)}"
    for ours, theirs in zip(found_parts, expected_parts, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert not values or ours == theirs or theirs != theirs, f"{ours!r}, the CPU has {theirs!r}"
            continue
        places = {DEVICE, "cpu"} if theirs.is_cpu and not moves else {DEVICE} if theirs.is_cpu else {DEVICE, FIRST}
        assert str(ours.device) in places, f"a result on {ours.device}"
        if values:
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach().cpu(), equal_nan=True)
        else:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{ours.shape}, {ours.dtype}"


def try_sample(op: Any, sample: Any, backward: bool, found: Found) -> None:
    finish = sample.output_process_fn_grad
    arguments = (sample.input, sample.args, sample.kwargs)
    here = Trial(op.op, finish, arguments)
    there = Trial(op.op, finish, copied(arguments))
    again = Trial(op.op, finish, copied(arguments))
    watch = Watch()
    try:
        with watch:
            Trial(op.op, finish, copied(arguments, torch.clone)).forward()
        expected = here.forward()
    except Exception:
        return  # the CPU refuses it
    drawn, unset = watch.drawn, op.name in UNSET
    moves = any(isinstance(value, torch.Tensor | torch.device | str) for value in tree_flatten(arguments)[0])
    outcome(found, lambda: forward(there, again, expected, not unset, drawn, moves))
    if not backward or drawn or unset or there.out is None:
        return
    try:
        gradients = here.backward()
    except Exception:
        return
    outcome(found, lambda: check_same(there.backward(), gradients))


def forward(there: Trial, again: Trial, expected: Any, is_set: bool, drawn: bool, moves: bool) -> None:
    result = there.forward()
    check_same(result, expected, values=is_set and not drawn, moves=moves)
    if drawn:
        check_same(result, again.forward(), moves=moves)


def outcome(found: Found, work: Callable[[], None]) -> None:
    try:
        work()
    except AssertionError as error:
        found.wrong.append(" ".join(str(error).split())[:300])
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if NAMES.search(text):
            found.refused[text[:300]] += 1
        else:
            found.wrong.append(text[:300])
    else:
        found.right += 1


def try_operator(op: Any, dtype: torch.dtype, samples: int) -> Found:
    found = Found()
    backward = dtype is torch.float64 and op.supports_autograd
    torch.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=backward), samples):
        try_sample(op, sample, backward, found)
    return found


def key(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def chosen(names: str, piece: str) -> Iterator[Any]:
    index, count = map(int, piece.split("/"))
    ops = [op for op in op_db if not names or key(op) in names.split(",") or op.name in names.split(",")]
    yield from ops[index::count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["sim", "cuda"])
    parser.add_argument("--names", default="", help="only these operators, with commas between them")
    parser.add_argument("--piece", default="0/1", help="one piece of how many, as in 0/8")
    parser.add_argument("--samples", type=int, default=1_000_000, help="at most so many of each operator and dtype")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for op in chosen(asked.names, asked.piece):
        print(json.dumps({"begins": key(op)}), flush=True)
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            found = try_operator(op, dtype, asked.samples)
            line = {"op": key(op), "dtype": str(dtype), **vars(found)}
            print(json.dumps(line), flush=True)
    print(json.dumps({"ends": True}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # without the end of an interpreter that has many devices


if __name__ == "__main__":
    main()
