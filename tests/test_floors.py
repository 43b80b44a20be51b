"""The house: a room imports only from rooms below it, and no files import each other in a circle.

Imports in functions and for types count in circles. A room may import types from rooms above it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dataparallel
import nogpu

ROOT = Path(dataparallel.__file__).parent
NOGPU = Path(nogpu.__file__).parent

FLOORS = """
    __main__           python -m dataparallel
    testing            helpers for tests: models, comparisons, ranks, sharded operators
    __init__           the public names
    ─── public paths, which have names and no code
    composable         the forms without a wrapper
    compiled           counts of compiled functions
    data_parallel      the wrapper
    scatter_gather     stages
    replicate          a stage
    parallel_apply     a stage
    batch_types        how users register types
    ─── what users call
    integrations       trainers of other libraries on slots, and what the machine has
    forms              DataParallel, replicate, fully_shard, and what each keeps between calls
    call               the four stages of a call, in a row
    nn                 modules whose replicas talk to each other
    peers              collectives between the replicas of a call
    ─── models that are divided, gradients that are summed, and what crosses the network
    sharded            tensors whose parts lie on several devices; units, which are gathered and freed
    gradients          sums of the gradients of kept replicas, and communication hooks
    machines           what crosses the network, over a process group of torch.distributed
    ─── copies of a module, and who runs them
    threads            the threads that run replicas, and the settings that replicas see
    replicas           a module tree, read once and copied, and what later calls use again
    batches            nested structures, split and joined
    ─── tensors between devices
    autograd           functions and nodes of the graph
    comm               tensors between devices, and the streams that they travel on
    ─── the ground
    samples            the mark of a list with one entry for each sample
    replica_parameter  the class of a replica's parameters
    optimizer_steps    what runs before the steps of all optimizers
    profiling          named ranges, which a profiler of torch shows
    user_warnings      warnings at the line of the user's code
    devices            which devices a caller may pass
    forks              what begins anew in a forked child
    weak_members       sets of objects that somebody else keeps alive, for several threads
    arguments          the test of a value that a user passes
    environment        switches in the environment
    _torch             every private name of torch
    _on_demand         packages whose names are imported when they are first asked for
    _version           the version
"""

ROOMS = [line.split()[0] for line in FLOORS.strip().splitlines() if "───" not in line]
"""``docs/house.py`` draws them in the design page."""


def files(root: Path = ROOT) -> dict[str, Path]:
    """Every Python file by its name below the package: ``comm.routes``, ``comm.__init__``."""
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, except what only a checker of types sees."""
    is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    for child in node.orelse if is_for_types else ast.iter_child_nodes(node):
        yield child
        yield from nodes_that_run(child)


def imported_by(
    path: Path,
    names: dict[str, Path],
    package: str = "dataparallel",
    nodes: Callable[[ast.AST], Iterator[ast.AST]] = nodes_that_run,
) -> Iterator[str]:
    """The files of the package that a file imports in these nodes, at its top or in a function."""
    for node in nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name.split(".")[0] == package:
                yield file_of(name.split(".")[1:], names)


def file_of(parts: list[str], names: dict[str, Path]) -> str:
    """The file that an imported name is in: ``comm.routes.hops`` is in ``comm.routes``."""
    while parts:
        for name in (".".join(parts), ".".join([*parts, "__init__"])):
            if name in names:
                return name
        parts = parts[:-1]
    return "__init__"


def floor_of(name: str) -> int:
    rooms = [room for room in ROOMS if name == room or name.startswith(f"{room}.")]
    assert rooms, f"dataparallel.{name} is in no room; give it a line in FLOORS"
    return ROOMS.index(max(rooms, key=len))


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    names = files()
    return {name: {*imported_by(path, names)} - {name} for name, path in names.items()}


def in_circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of the graph when files that import none of the rest are taken away, again and again."""
    left = dict(graph)
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    return left


def test_every_room_is_there() -> None:
    names = files()
    assert [room for room in ROOMS if room not in names and f"{room}.__init__" not in names] == []


def test_nothing_is_imported_from_above(graph: dict[str, set[str]]) -> None:
    upward = [(a, b) for a, found in graph.items() for b in sorted(found) if floor_of(a) > floor_of(b)]
    assert upward == []


@pytest.mark.parametrize("root", [ROOT, NOGPU], ids=lambda root: root.name)
def test_no_files_import_each_other(root: Path) -> None:
    """Not by way of others, in functions or for types either."""
    names = files(root)
    graph = {name: {*imported_by(path, names, root.name, ast.walk)} - {name} for name, path in names.items()}
    assert in_circles(graph) == {}


def test_devices_without_hardware_know_nothing_of_the_library() -> None:
    imports = [
        (path.name, line)
        for path in sorted(NOGPU.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(("import dataparallel", "from dataparallel"))
    ]
    assert imports == []
