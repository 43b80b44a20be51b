"""The example of ``docs/guide/tracing.rst`` runs, and the page shows what it has written."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from documents import DOCS

PAGE = DOCS / "guide" / "tracing.rst"
SHOWN = ("trace_before.png", "trace_before.txt", "trace_after.png", "trace_after.txt")


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", DOCS / "guide" / "trace_before_and_after.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.devices("sim")
@pytest.mark.usefixtures("one_intra_op_thread")
def test_it_runs_and_both_models_have_the_same_loss(
    example: ModuleType, make_slots: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "SETTLING", 2)
    monkeypatch.setattr(example, "TRACED", 1)
    with torch.random.fork_rng(devices=[]):
        example.main(tmp_path, make_slots(4))
    assert {path.name for path in tmp_path.iterdir()} == {*SHOWN}
    before, after = ((tmp_path / f"trace_{when}.txt").read_text() for when in ("before", "after"))
    assert "calls: 1 of Model, by replicate" in before
    assert "calls: 1 of ModelWithLoss, by replicate" in after
    gathered = [re.search(r"^gather +direct +3\.0 +([\d,]+) ", text, re.M) for text in (before, after)]
    assert [found and found[1] for found in gathered] == ["6,291,456", "12"]


@pytest.mark.devices("cpu")
def test_the_page_shows_what_it_writes() -> None:
    shown = re.findall(r"^\.\. (?:image|literalinclude):: (.+)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert [*shown] == [*SHOWN]
    assert all((PAGE.parent / name).stat().st_size > 500 for name in SHOWN)


@pytest.mark.devices("cpu")
def test_the_last_line_of_the_first_table_says_what_the_change_is() -> None:
    """What the page tells follows from what was measured."""
    last = (PAGE.parent / "trace_before.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert "compute the loss in the module's forward" in last
