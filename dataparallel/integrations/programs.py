"""``python -m dataparallel SCRIPT ARGS`` runs a program in which this library takes the place of torch's.

``__main__`` calls `main`. Without a program it prints the report of this machine.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from dataparallel.integrations.replacement import replace_torch
from dataparallel.tracing import trace
from dataparallel.tracing.report import report


def main(arguments: Sequence[str]) -> None:
    """Runs the program that ``arguments`` name, as Python would with ``arguments`` in place of its own.

    Raises:
        SystemExit: the arguments are wrong (status 2), or the program has called ``sys.exit``.
        Exception: the program raised it.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    is_module = options.module is not None
    program = options.module if is_module else options.program
    if not program:
        if options.report or is_module:
            parser.error("--report and -m need a program: python -m dataparallel --report SCRIPT")
        print(report())
        return
    with ExitStack() as stack:
        replacement = stack.enter_context(replace_torch())
        if options.report:
            recorded = trace()
            # Printed after the trace has ended, and also if the program fails or exits.
            stack.callback(lambda: print(f"\n{replacement.report()}\n\n{recorded}", file=sys.stderr))
            stack.enter_context(recorded)
        _run(program, is_module)


def _run(program: Sequence[str], is_module: bool) -> None:
    before = sys.argv, sys.path[0]
    sys.argv = [*program]
    try:
        if is_module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    finally:
        sys.argv, sys.path[0] = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataparallel",
        description="Runs a program with this library in place of torch.nn.DataParallel. Without a program: describes "
        "this machine.",
    )
    parser.add_argument("--report", action="store_true", help="print at the end what was replaced, and where time went")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module, as for python -m, with arguments"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script with arguments")
    return parser
