"""``python -m nogpu.cuda SCRIPT`` runs a program that sees CUDA devices on a machine without a GPU.

This is only the entry point: it opens what `stand_in` opens, to find what is missing, and becomes the Python that runs
the program. That one has the devices as every child of a stand-in has: `start` tells it by the environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from nogpu.compiling import SimulationUnavailable
from nogpu.cuda import start
from nogpu.cuda.machine import LIKE, machine_like

PROGRAM = "python -m nogpu.cuda"


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
    """Starts the stand-in, and replaces this process by the Python that runs the program."""
    options = parser().parse_args()
    if not options.is_module and not os.path.exists(options.program):
        _end(f"there is no file {options.program!r} to run; a module is run with -m")
    if sys.flags.ignore_environment or sys.flags.no_site:
        _end("this Python was started with -E, -I or -S, by which it does not read PYTHONPATH or sitecustomize")
    try:
        start.begin(machine_like(options.like, options.devices), options.hide_gpus)
    except (SimulationUnavailable, ValueError) as error:
        _end(str(error))
    # As multiprocessing does: -W, -X, -P and so on hold for the program too.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    program = ["-m", options.program] if options.is_module else [options.program]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, *program, *options.arguments])


def _end(message: str) -> None:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
