"""The page of what works names what is tested: its versions, its tests and its architectures."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guide/ecosystem.rst").read_text(encoding="utf-8")
FRAMEWORKS = ROOT / "tests/frameworks"


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a title, without its head."""
    section = PAGE.split(f"\n{title}\n", 1)[1]
    table = re.split(r"\n\S[^\n]*\n-+\n", section)[0]
    found = re.split(r"\n   \* - ", table)[2:]
    return [[" ".join(cell.split()) for cell in re.split(r"\n     - ", re.split(r"\n\n\S", row)[0])] for row in found]


LIBRARIES = {name.strip("`"): rest for name, *rest in rows("Libraries")}
PINS = dict(re.findall(r"\b([\w-]+)==([\w.]+)", (ROOT / ".ci/long").read_text(encoding="utf-8")))


def test_versions_are_those_that_the_long_run_installs():
    versions = {name: version for name, (version, *_) in LIBRARIES.items() if re.match(r"\d", version)}
    assert versions == {name: version for name, version in PINS.items() if name != "torch"}
    assert f"with torch {PINS['torch']}" in PAGE


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name in PINS])
def test_versions_are_those_of_the_extra_where_it_is_installed(name):
    if not {"timm", "peft", "lightning"} <= {found.name for found in metadata.distributions()}:
        pytest.skip("needs the extra frameworks")
    if metadata.version("torch").split("+")[0] != PINS["torch"]:
        pytest.skip("other versions fit this torch")
    assert metadata.version(name).split("+")[0] == PINS[name]


def test_every_row_says_what_tests_it_what_works_and_what_does_not():
    for name, (_, tests, works, not_works) in LIBRARIES.items():
        files = re.findall(r"``([^`]+)``", tests)
        assert files, name
        assert all((FRAMEWORKS / file).exists() for file in files), name
        assert works.endswith("."), name
        assert not_works.endswith("."), name


def test_every_test_of_a_library_is_in_a_row():
    named = {file for _, tests, *_ in LIBRARIES.values() for file in re.findall(r"``([^`]+)``", tests)}
    others = ("test_documents_frameworks.py", "test_example_programs.py")
    there = {path.name for path in FRAMEWORKS.glob("test_*.py")} - {*others}
    assert there - named == set()


def test_architectures_are_those_that_are_tested():
    tree = ast.parse((FRAMEWORKS / "architectures.py").read_text(encoding="utf-8"))
    (tested,) = [
        [key.value for key in node.value.keys]
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "ARCHITECTURES"
    ]
    named = [name for _, names in rows("Architectures") for name in names.split(", ")]
    assert sorted(named) == sorted(tested)
