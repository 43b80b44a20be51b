"""``python -m dataparallel SCRIPT ARGS`` runs a program in which this library takes the place of torch's."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from dataparallel.integrations import torch_wrapper
from dataparallel.integrations.machine import description
from dataparallel.integrations.replacement import Replacement, replace_torch
from dataparallel.tracing import Trace


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    is_module = options.module is not None
    program = options.module if is_module else options.program
    if not program:
        if options.report or is_module:
            parser.error("--report and -m need a program: python -m dataparallel --report SCRIPT")
        print(description())
        return
    with ExitStack() as stack:
        replacement = stack.enter_context(replace_torch())
        times = FewCalls() if options.report else None
        # Printed after the trace has ended, and also if the program fails or exits.
        stack.callback(lambda: print(_what_happened(replacement, times), end="", file=sys.stderr))
        if times is not None:
            stack.enter_context(times)
        _run(program, is_module)


_SETTLED, _ENOUGH = 4, 14


class FewCalls:
    """A trace of a few calls of a program: the fourth to the thirteenth or, if there are fewer, the first three.

    A profile of a whole training would fill the memory, and the first calls allocate and compile. By the first call a
    program has chosen its devices. ``table``: what to print.
    """

    def __init__(self) -> None:
        self.table = "Where the time goes is not known: there was no call of DataParallel or data_parallel."
        self._name = ""
        self._trace: Trace | None = None

    def __enter__(self) -> FewCalls:
        torch_wrapper.counts.before_call = self._before_call
        return self

    def __exit__(self, *error: Any) -> None:
        torch_wrapper.counts.before_call = None
        self._switch(False, error)

    def _before_call(self, name: str, number: int) -> None:
        if name in ("DataParallel.forward", "data_parallel") and self._name in ("", name):
            self._name = name
            if number in (1, _SETTLED, _ENOUGH):
                self._switch(number != _ENOUGH)

    def _switch(self, begins: bool, error: Sequence[Any] = (None, None, None)) -> None:
        trace, self._trace = self._trace, None
        try:
            if trace is not None:
                trace.__exit__(*error)
                self.table = f"Where the time of a few calls of {self._name} went:\n{trace}"
            if begins:
                self._trace = Trace(prints=False).__enter__()
        except RuntimeError as failure:  # the program has a profiler of its own, for example
            self.table = f"Where the time goes is not known: {failure}."


def _what_happened(replacement: Replacement, times: FewCalls | None) -> str:
    """What a program's reader has to know at its end. Without ``--report`` that is nothing, if the library was used."""
    calls = torch_wrapper.counts.calls
    report = "" if times is None or not calls else f"\n{replacement.report()}\n\n{times.table}\n"
    if not calls:
        what = "the program called neither torch.nn.DataParallel nor its relatives, and ran as it is"
    elif torch_wrapper.WITHOUT_SLOTS in calls:
        what = "a DataParallel without slots ran its model as it is"
    else:
        return report
    return (
        f"{report}\ndataparallel: {what}; here are {torch.cuda.device_count()} GPUs. To try two replicas on the CPU: "
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
    parser.add_argument("--report", action="store_true", help="print at the end what was replaced, and where time went")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module, as for python -m, with arguments"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script with arguments")
    return parser
