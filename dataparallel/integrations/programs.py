"""``python -m dataparallel SCRIPT ARGS`` runs a program in which this library takes the place of torch's.

``__main__`` calls `main`. Without a program it prints the report of this machine, or writes it as a page.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dataparallel.forks import main_is_the_program
from dataparallel.integrations import torch_rules, torch_wrapper
from dataparallel.integrations.replacement import Replacement, replace_torch
from dataparallel.tracing import trace
from dataparallel.tracing.block import Trace
from dataparallel.tracing.report import look
from dataparallel.tracing.report_page import as_page
from dataparallel.tracing.report_parts import Section, as_text

Plan: TypeAlias = Callable[[Callable[[], Any], str, str], list[Section]]
"""``plan`` of ``testing.model_report``, a room above: of the user's function, its name, and the name of a machine.

It raises ``argparse.ArgumentTypeError`` if one of them is not what it expects.
"""


def main(arguments: Sequence[str], plan: Plan) -> None:
    """Runs the program that ``arguments`` name, as Python would with ``arguments`` in place of its own.

    ``plan`` plans the model of ``--model``.

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
        _describe(parser, options, plan)
        return
    if options.html or options.model or options.machine:
        parser.error(f"--html, --model and --machine describe this machine: leave out the program {program[0]!r}")
    with ExitStack() as stack:
        replacement = stack.enter_context(replace_torch())
        if (reason := _why_not(program[0], is_module)) is not None:
            parser.error(reason)
        if "--report" in program[1:] and not (is_module or "--report" in Path(program[0]).read_text(errors="ignore")):
            stack.callback(_say_where_options_go, program[0])
        recorded = trace() if options.report else None
        # Printed after the trace has ended, and also if the program fails or exits.
        stack.callback(lambda: print(_what_happened(replacement, recorded), end="", file=sys.stderr))
        if recorded is not None:
            stack.enter_context(recorded)
        _run(program, is_module)


def _why_not(name: str, is_module: bool) -> str | None:
    """Says why there is no program to run. As Python does, this imports the packages that a module is in."""
    if not is_module:
        if not os.path.exists(name):
            return f"there is no file {name!r}; for a module: python -m dataparallel -m {name}"
        if os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
            return (
                f"{name!r} is a folder without a __main__.py; pass a script, such as {os.path.join(name, 'train.py')}"
            )
        return None
    try:
        found = importlib.util.find_spec(name)
        is_package = found is not None and found.submodule_search_locations is not None
        if is_package and importlib.util.find_spec(f"{name}.__main__") is None:
            return f"-m {name}: this is a package without a __main__.py; name a module in it: -m {name}.MODULE"
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package lacks something else
        found = None
    if found is None:
        path = f"{name.removesuffix('.py').replace('.', os.sep)}.py"
        return f"-m {name}: there is no such module in {os.getcwd()} or where Python looks; for a script: {path}"
    return None


def _say_where_options_go(script: str) -> None:
    print(
        f"dataparallel: {script} got the option --report, because it came behind it. The library's goes before: "
        f"python -m dataparallel --report {script}",
        file=sys.stderr,
    )


def _what_happened(replacement: Replacement, recorded: Trace | None) -> str:
    """What a program's reader has to know at its end. Without ``--report`` that is nothing, if the library was used."""
    calls = torch_rules.counts.calls()
    report = "" if recorded is None or not calls else f"\n{replacement.report()}\n\n{recorded}\n"
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


def _describe(parser: argparse.ArgumentParser, options: argparse.Namespace, plan: Plan) -> None:
    """Prints the report, or writes the page. What is wrong with the options is found before anything is planned."""
    page = options.html and Path(options.html)
    if page and not page.parent.is_dir():
        parser.error(f"--html {page}: there is no folder {page.parent}")
    if options.machine and not options.model:
        parser.error("--machine is for --model: python -m dataparallel --model package:function --machine H100")
    make = options.model and _function(parser, options.model)
    machine, *others = look()  # before devices are simulated, which are accelerators afterwards
    try:
        planned = plan(make, options.model, options.machine or "A100") if make else []
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    sections = [machine, *planned, *others]
    if page:
        page.write_text(as_page("dataparallel on this machine", sections), encoding="utf-8")
        print(f"{page} is written: open it in a browser")
    else:
        print(as_text(sections))


def _function(parser: argparse.ArgumentParser, name: str) -> Callable[[], Any]:
    wanted = "expected package:function, where function() returns (module, arguments)"
    if ":" not in name:
        parser.error(f"--model {name}: {wanted}")
    try:
        found = pkgutil.resolve_name(name)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(f"--model {name}: {type(error).__name__}: {error}; {wanted}")
    if not callable(found):
        parser.error(f"--model {name}: this is of type {type(found).__name__}; {wanted}")
    return found


def _run(program: Sequence[str], is_module: bool) -> None:
    before = sys.argv, sys.path[0]
    sys.argv = [*program]
    try:
        with main_is_the_program():
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
        "this machine. Options go before the program; what follows it is for the program.",
    )
    parser.add_argument("--report", action="store_true", help="print at the end what was replaced, and where time went")
    parser.add_argument("--html", metavar="FILE", help="write the description of this machine as a page of one file")
    parser.add_argument(
        "--model",
        metavar="PACKAGE:FUNCTION",
        help="predict a training step of the model that function() returns: (module, arguments)",
    )
    parser.add_argument(
        "--machine", help="for --model: a published machine, such as A100 (default), H100, V100, RTX_3090"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module, as for python -m, with arguments"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script with arguments")
    return parser
