"""Which tests a run is for: the short ones, or all of them.

A test marked `long` runs with `--all`, and where the command line names it by its node id
(``pytest tests/test_x.py::test_y``). With `--all` hypothesis draws 30 examples of a property, and 8 without.

Two groups are long too, except for their tests marked `smoke`: those that start processes, by the marker `ahead` or in
a file that imports a function of `STARTS_RANKS`, and the tests of ``nogpu`` and of ``dataparallel.testing``. The latter
run where the command line names their folder or a file in it.

Of a test with several parameters the short run has as many cases as show each value once: the others are long too. With
the marker ``few(3)`` it has three of them at most, spread evenly.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

LEFT_OUT = pytest.StashKey[int]()
STARTS_RANKS = {"on_machines", "on_mortal_machines", "assert_train_as_one"}
TOOLS = [Path(__file__).parent / name for name in ("nogpu", "testing")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test, also those marked long")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: only with --all, or where it is named by its node id")
    config.addinivalue_line("markers", "smoke: short, although its process or its folder would make it long")
    config.addinivalue_line("markers", "few(count): of its cases the short run has at most so many")
    hypothesis.settings.register_profile(
        "dataparallel",
        deadline=None,
        max_examples=30 if config.getoption("--all") else 8,
        derandomize=bool(os.environ.get("CI")),
        # `slots` and its relatives are values: sharing them between examples is harmless.
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("dataparallel")
    if config.option.durations is None:
        config.option.durations = 10  # a run names its longest tests


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which no test would run need not be imported."""
    if config.getoption("--all") or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    of_tools = any(tools in collection_path.parents for tools in _unnamed(config))
    return (of_tools and "smoke" not in text) or "\npytestmark = pytest.mark.long\n" in text or None


def _unnamed(config: pytest.Config) -> list[Path]:
    """The folders of tools of which the command line names no part."""
    paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    return [tools for tools in TOOLS if not any(tools in (path, *path.parents) for path in paths)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unnamed = _unnamed(config)
    for item in items:
        of_tools = any(tools in item.path.parents for tools in unnamed)
        if (of_tools or _starts_processes(item)) and not item.get_closest_marker("smoke"):
            item.add_marker("long")
    for cases in _by_test(items):
        kept = _each_value_once(cases)
        for case in cases:
            if case not in kept:
                case.add_marker("long")
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    long = [item for item in items if item.get_closest_marker("long") is not None]
    items[:] = [item for item in items if item.get_closest_marker("long") is None]
    config.hook.pytest_deselected(items=long)
    config.stash[LEFT_OUT] = len(long)


def _by_test(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The cases of each test that has parameters, without those that are long in any case."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("long") is None:
            tests[item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
    return tests.values()


def _each_value_once(cases: list[Any]) -> list[Any]:
    """As many cases as show each value of each parameter, in this order: that which shows most others, and so on."""
    # Names of the values of each `parametrize`. pytest offers them only joined by hyphens, which names have too.
    shows = {case: {*enumerate(case.callspec._idlist)} for case in cases}
    missing = set().union(*shows.values())
    kept: list[Any] = []
    while missing:
        kept.append(max(cases, key=lambda case: len(missing & shows[case])))
        missing -= shows[kept[-1]]
    few = cases[0].get_closest_marker("few")
    count = len(kept) if few is None else min(few.args[0], len(kept))
    return [kept[number * len(kept) // count] for number in range(count)]


def _starts_processes(item: pytest.Item) -> bool:
    is_ahead, module = item.get_closest_marker("ahead") is not None, getattr(item, "module", None)
    return is_ahead or not STARTS_RANKS.isdisjoint(getattr(module, "__dict__", ()))


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    """Says that there are more, and how to run them."""
    if not config.stash.get(LEFT_OUT, 0):
        return None
    return f"left out: at least {config.stash[LEFT_OUT]} long tests, which run with --all"


def others_long(values: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """The values for `parametrize`, of which all but the short ones are marked long. A tuple is several arguments."""

    def marked(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)

    return [value if value in short else marked(value) for value in values]
