"""The programs in ``examples/`` run as their docstrings say, and show what they promise.

``test_example_machines`` has the one that torchrun starts, ``tests/frameworks`` the notebook and the one that needs
transformers.
"""

import ast
import json
import re

import pytest

from documents import DOCS
from example_programs import EXAMPLES, NAMES, numbers, printed_by, where_devices_are_seen


@pytest.mark.long
@where_devices_are_seen
def test_digits_are_read_as_well_as_on_one_device(tmp_path):
    pytest.importorskip("sklearn")
    *_, last, accuracies = printed_by("digits.py", tmp_path)
    _, one, several = numbers(last)
    assert several == pytest.approx(one, rel=0.05)
    one, several = numbers(accuracies)
    assert one > 95
    assert abs(one - several) < 0.5  # one image or two


@pytest.mark.long
@where_devices_are_seen
def test_a_detector_finds_objects(tmp_path):
    *losses, last = printed_by("detector.py", tmp_path)
    assert numbers(losses[-1])[0] < numbers(losses[0])[0] / 4
    found, images, *_ = numbers(last)
    assert found > 0.8 * images


@where_devices_are_seen
def test_a_server_answers_what_the_plain_model_answers(tmp_path):
    answered, _, difference = printed_by("serve.py", tmp_path)
    requests, _, calls, _ = numbers(answered)
    assert requests == 800
    assert calls < requests
    assert numbers(difference)[0] < 1e-5


@where_devices_are_seen
@pytest.mark.long
def test_a_sharded_gpt_learns_and_its_checkpoint_loads_on_other_slots(tmp_path):
    parameters, *losses, last = printed_by("shard_gpt.py", tmp_path)
    whole, _, owned = numbers(parameters)
    assert owned < 0.6 * whole  # two slots or more
    before, after = numbers(last)
    assert after == pytest.approx(before, abs=2e-4)
    assert before < 0.6 * numbers(losses[0])[0]


@pytest.mark.devices("cpu")
class TestAllOfThem:
    @pytest.mark.parametrize("name", NAMES)
    def test_each_says_how_it_is_run_and_is_short(self, name):
        source = (EXAMPLES / name).read_text(encoding="utf-8")
        assert f" examples/{name}\n" in (ast.get_docstring(ast.parse(source)) or "")
        assert len(source.splitlines()) <= 90

    def test_the_notebook_is_kept_without_outputs(self):
        cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
        assert len(cells) > 10
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)

    def test_the_page_of_examples_lists_all(self):
        page = (DOCS / "guide" / "examples.rst").read_text(encoding="utf-8")
        assert sorted(re.findall(r"^``(\w+\.\w+)``  ", page, re.M)) == sorted(
            path.name for path in EXAMPLES.glob("*.*")
        )
