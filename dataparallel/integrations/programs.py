"""``python -m dataparallel SCRIPT ARGS`` runs a program in which this library takes the place of torch's."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from dataparallel.integrations import torch_wrapper
from dataparallel.integrations.machine import description
from dataparallel.integrations.replacement import replace_torch


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    is_module = options.module is not None
    program = options.module if is_module else options.program
    if not program:
        if is_module:
            parser.error("-m needs a program: python -m dataparallel -m MODULE")
        print(description())
        return
    with replace_torch():
        try:
            _run(program, is_module)
        finally:  # also if the program fails or exits
            print(_what_happened(), end="", file=sys.stderr)


def _what_happened() -> str:
    """What a program's reader has to know at its end: nothing, if the library was used."""
    calls = torch_wrapper.counts.calls
    if not calls:
        what = "the program called neither torch.nn.DataParallel nor its relatives, and ran as it is"
    elif torch_wrapper.WITHOUT_SLOTS in calls:
        what = "a DataParallel without slots ran its model as it is"
    else:
        return ""
    return (
        f"\ndataparallel: {what}; here are {torch.cuda.device_count()} GPUs. To try two replicas on the CPU: "
        'torch.nn.DataParallel(model, device_ids=["cpu", "cpu"])\n'
    )


def _run(program: Sequence[str], is_module: bool) -> None:
    before = sys.argv, sys.path[0]
    sys.argv = [*program]
    try:
        with _main_is_the_program():
            if is_module:
                runpy.run_module(program[0], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
                runpy.run_path(program[0], run_name="__main__")
    finally:
        sys.argv, sys.path[0] = before


@contextmanager
def _main_is_the_program() -> Iterator[None]:
    """Around a program that ``runpy`` runs: objects of its classes can come from spawned processes.

    These processes run the program under the name ``__mp_main__``, and pickle its classes by this name. In this
    process it would mean the command that runs the program.
    """
    before = sys.modules.get("__mp_main__")
    sys.modules["__mp_main__"] = _Main("__main__")
    try:
        yield
    finally:
        if before is None:
            del sys.modules["__mp_main__"]
        else:
            sys.modules["__mp_main__"] = before


class _Main(ModuleType):
    """Has the names of the program that runs: ``runpy`` makes its module, and takes it away."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataparallel",
        description="Runs a program with this library in place of torch.nn.DataParallel. Without a program: describes "
        "this machine; with --check alone, checks it (--check --help). Options go before the program; what follows it "
        "is for the program.",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module, as for python -m, with arguments"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script with arguments")
    return parser
