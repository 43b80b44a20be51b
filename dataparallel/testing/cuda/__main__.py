"""``python -m dataparallel.testing.cuda SCRIPT`` runs a program that sees CUDA devices on a machine without a GPU.

This is only the entry point: `stand_in` does the work. The interpreter runs it, and nobody imports it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from dataparallel.forks import main_is_the_program
from dataparallel.testing.cuda import SimulationUnavailable, stand_in
from dataparallel.testing.cuda.machine import LIKE

PROGRAM = "python -m dataparallel.testing.cuda"


def parser() -> argparse.ArgumentParser:
    """The arguments, as ``--help`` shows them."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--devices N] [--like NAME] [--hide-gpus] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description="Runs a program of torch's CUDA build on a stand-in for CUDA, on a machine without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="how many CUDA devices (default: 8)")
    parser.add_argument("--like", choices=LIKE, default="a100", help="what they are like (default: a100)")
    parser.add_argument("--hide-gpus", action="store_true", help="hide the GPUs of a machine that has some")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module, such as pytest")
    parser.add_argument("program", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    return parser


def main() -> None:
    """Starts the stand-in, and runs the program in this process as Python itself would run it."""
    options = parser().parse_args()
    if not options.is_module and not os.path.exists(options.program):
        _end(f"there is no file {options.program!r} to run; a module is run with -m")
    sys.argv[:] = [options.program, *options.arguments]
    if not options.is_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(options.program))
    try:
        stand_in(options.devices, like=options.like, hide_gpus=options.hide_gpus)
    except (SimulationUnavailable, ValueError) as error:
        _end(str(error))
    with main_is_the_program():
        if not options.is_module:
            runpy.run_path(options.program, run_name="__main__")
            return
        try:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        except ImportError as error:
            if error.name is not None:
                raise
            _end(str(error))


def _end(message: str) -> None:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
