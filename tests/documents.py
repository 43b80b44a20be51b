"""The code in the README and in docs/: how a page is read and how its code is run.

``test_documents`` describes the marks that a page may contain and runs the pages; ``test_documents_simulated`` runs the
pages that show files. This file only parses and executes, and knows no page in particular.
"""

import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

__all__ = ["DOCS", "README", "Block", "blocks_of", "pages", "parse", "run", "run_page"]

ROOT = Path(__file__).parents[1]
README = ROOT / "README.rst"
DOCS = ROOT / "docs"

_CODE = re.compile(r"( *)\.\. (?:code-block|sourcecode|code):: *python3? *$")
_MARK = re.compile(r"( *)\.\. test:(?: +(\w+))?(?: +(.*?))? *$")
_OPTION = re.compile(r" +:[\w-]+:")
_FILE = re.compile(r"# ([\w/]+\.py)$")


@dataclass(frozen=True)
class Block:
    """A piece of Python code on a page.

    Attributes:
        page: the file that it is in.
        line: the number of its first line there, from 1.
        text: the code, without its indentation.
        skip: why it is not run, empty where it is.
        kinds: with which values of ``--devices`` it is run; with all if there are none.
        packages: what has to be installed for it.
    """

    page: Path
    line: int
    text: str
    skip: str = ""
    kinds: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def file(self) -> str | None:
        """The name of the file that the block shows: its first line is ``# name.py``."""
        found = _FILE.match(self.text.partition("\n")[0])
        return None if found is None else found[1]

    def compiled(self) -> Any:
        """The code, whose tracebacks name the page and its lines."""
        return compile("\n" * (self.line - 1) + self.text, str(self.page), "exec")


def pages() -> list[Path]:
    """The README and the pages in docs/, without what Sphinx has built there, as far as they contain Python code."""
    sources = [
        page
        for page in sorted(DOCS.rglob("*.rst"))
        if not any(part.startswith(("_", ".")) for part in page.relative_to(DOCS).parts)
    ]
    return [
        page
        for page in (README, *sources)
        if any(_CODE.match(line) or _MARK.match(line) for line in page.read_text(encoding="utf-8").splitlines())
    ]


def blocks_of(page: Path) -> list[Block]:
    """All code of a page, hidden code included, in its order."""
    return list(parse(page.read_text(encoding="utf-8"), page))


def parse(text: str, page: Path) -> Iterator[Block]:
    """The code in a text.

    Raises:
        ValueError: a mark that is unknown or incomplete, or that no code follows; the message names page and line.
    """
    lines = text.splitlines()
    marks: dict[str, Any] = {}
    at = 0
    while at < len(lines):
        line, number = lines[at], at + 1
        code, mark = _CODE.match(line), _MARK.match(line)
        at += 1
        if code is None and mark is None:
            if line.strip() and marks:
                raise ValueError(f"{page}:{number}: a '.. test:' mark belongs directly before a Python code block")
            continue
        if mark is not None and mark[2] != "hidden":
            marks.update(_marks(mark[2], mark[3], f"{page}:{number}"))
            continue
        indentation = len((code or mark)[1])
        start = at
        while at < len(lines) and (not lines[at].strip() or _indentation(lines[at]) > indentation):
            at += 1
        while code is not None and start < at and _OPTION.match(lines[start]):
            start += 1
        while start < at and not lines[start].strip():
            start += 1
        if start == at:
            raise ValueError(f"{page}:{number}: no code follows")
        yield Block(page, start + 1, textwrap.dedent("\n".join(lines[start:at])).rstrip() + "\n", **marks)
        marks = {}
    if marks:
        raise ValueError(f"{page}:{len(lines)}: a '.. test:' mark belongs directly before a Python code block")


def _marks(name: str | None, value: str | None, place: str) -> dict[str, Any]:
    if name not in ("skip", "devices", "needs"):
        raise ValueError(f"{place}: '.. test: {name}' is none of 'skip', 'devices', 'needs' and 'hidden'")
    if not value:
        raise ValueError(f"{place}: '.. test: {name}' needs a reason, kinds of devices, or packages")
    if name == "skip":
        return {"skip": value}
    return {"kinds" if name == "devices" else "packages": tuple(value.split())}


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def run(blocks: list[Block], kind: str) -> dict[str, Any]:
    """Runs the blocks of one page with ``--devices=kind``, one after the other, and returns their names.

    Blocks are left out that are marked so, that show a file, or whose packages are not installed.
    """
    module = ModuleType("__documents__")  # a real module: dataclasses and pickle look for the classes of a page there
    sys.modules[module.__name__] = module
    try:
        for block in blocks:
            is_wanted = not block.skip and block.file is None and (not block.kinds or kind in block.kinds)
            if is_wanted and all(importlib.util.find_spec(package) for package in block.packages):
                exec(block.compiled(), vars(module))
        return vars(module)
    finally:
        del sys.modules[module.__name__]


def run_page(page: Path, config: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`run` for a test: in an empty folder, with a seed, on the devices that the options name.

    Code for simulated devices is about eight of them, as tests are: with fewer, none of it runs.
    """
    kind = config.getoption("--devices")
    if kind == "sim" and config.getoption("--sim-devices") < 8:
        kind = "fewer"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return run(blocks_of(page), kind)
