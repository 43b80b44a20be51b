"""The manual has every public name, environment variable and setting, all committed results, and the house as it is."""

import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import dataparallel
import dataparallel.composable
import dataparallel.sharded
import dataparallel.testing
import nogpu
from dataparallel.threads import settings
from front_page import with_figures
from test_floors import ROOMS

pytestmark = pytest.mark.devices("cpu")  # they read files: once is enough

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = (dataparallel, dataparallel.composable, dataparallel.sharded, dataparallel.testing, nogpu)

reference = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*/*.rst")))


def documented() -> set[str]:
    return set(re.findall(r"^\.\. (?:auto\w+|class):: ([\w.]+)", reference, re.M))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_are_in_the_reference(package):
    named = [name for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)]
    public = {f"{package.__name__}.{name}" for name in named if not name.startswith("_")}
    assert public - documented() - {"dataparallel.testing.simulate"} == set(), "that one is nogpu.simulate"


def test_what_replaces_torchs_comm_is_in_the_reference():
    names = ("broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter")
    assert {f"dataparallel.comm.{name}" for name in names} <= documented()


def test_environment_variables_are_in_the_reference():
    folders = (Path(dataparallel.__file__).parent, Path(nogpu.__file__).parent)
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    used = {name for source in sources for name in re.findall(r"(?<!-D)(?:DATAPARALLEL|NOGPU)_[A-Z_]+", source)}
    assert used == set(re.findall(r"^\.\. envvar:: (\w+)$", reference, re.M))


def test_settings_that_reach_replicas_are_in_the_reference():
    carried = [setting.name for setting in (*settings.CARRIED, *settings.TRANSLATED)]
    others = [name for name, *_ in settings.REFUSED]
    _, _, section = reference.partition(".. _settings-that-reach-the-replicas:")
    listed = {" ".join(item.split()) for item in re.split(r"[,;]|\* - | - |\n\n", section)}
    assert {*carried, *others} - listed == set()


@pytest.mark.parametrize(("directive", "suffix"), [("include", "rst"), ("image", "png")])
def test_the_committed_results_are_in_the_manual(directive, suffix):
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.rst"))
    shown = re.findall(rf"^\.\. {directive}:: (?:\.\./)+bench/results/(.+)$", pages, re.M)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "bench" / "results").glob(f"*.{suffix}"))


def test_the_figures_of_the_readme_are_those_of_the_committed_results():
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    assert text == with_figures(text), "run: python bench/front_page.py"


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^(.+)\n-+$", (ROOT / "CHANGELOG.rst").read_text(encoding="utf-8"), re.M)
    assert dataparallel.__version__ in headings[0].split()


def test_every_page_is_reached_from_the_index():
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.glob("*.rst")} - {"index"}
    assert pages <= set(re.findall(r"^   (\S+)$", (DOCS / "index.rst").read_text(encoding="utf-8"), re.M))


def literals(text: str) -> list[str]:
    """What stands between double backticks."""
    return re.findall(r"``([^`]+)``", text)


def exists(path: str) -> bool:
    """``comm/routes.py``, ``comm/routes`` and ``tests/comm`` are in the repository or in a package."""
    bases = (ROOT, ROOT / "dataparallel", ROOT / "nogpu")
    return any((base / f"{path}{suffix}").exists() for base in bases for suffix in ("", ".py"))


class TestTheHouse:
    """What ``docs/design.rst`` draws and ``docs/contributing.rst`` names is there."""

    design = (DOCS / "design.rst").read_text(encoding="utf-8")

    def test_it_is_drawn_from_the_tree(self):
        """If this fails: python docs/house.py"""
        house = runpy.run_path(str(DOCS / "house.py"))
        assert house["on_page"]() == house["drawn"]()

    def test_the_promises_are_those_of_rooms(self):
        _, _, promises = self.design.partition("What each room promises\n")
        rooms = re.findall(r"^``([\w.]+)``$", promises, re.M)
        assert "comm" in rooms
        assert [room for room in rooms if room not in ROOMS and not exists(room.replace(".", "/"))] == []

    @pytest.mark.parametrize("page", ["design", "contributing"])
    def test_every_path_on_the_page_exists(self, page):
        found = literals((DOCS / f"{page}.rst").read_text(encoding="utf-8"))
        paths = [text for text in found if "/" in text and re.fullmatch(r"[\w./]+", text) and "NAME" not in text]
        assert len(paths) > 5
        assert [path for path in paths if not exists(path)] == []
