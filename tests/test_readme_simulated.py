"""The README's example of tests on simulated devices passes as it is printed, and fails where it says so."""

import re
import textwrap
import xml.etree.ElementTree
from pathlib import Path

import pytest

from processes import Ahead, run_pytest, skip_without_tools

# Their processes are their own: once is enough.
pytestmark = pytest.mark.devices("cpu")

README = Path(__file__).parents[1] / "README.rst"


@pytest.fixture(scope="module")
def available() -> None:
    skip_without_tools()


def files() -> dict[str, str]:
    """The blocks that begin with a file's name, by that name."""
    blocks = re.findall(
        r"\.\. code-block:: python\n\n(    # (\w+\.py)\n(?:    .*\n|\n)+)", README.read_text(encoding="utf-8")
    )
    return {name: textwrap.dedent(block) for block, name in blocks}


def failures(report: Path) -> dict[str, str]:
    """What each test that failed says at its end, by the names of its file and its function."""
    return {
        f"{case.attrib['classname']}.{case.attrib['name']}": failure.attrib["message"]
        for case in xml.etree.ElementTree.parse(report).iter("testcase")
        for failure in case.iter("failure")
    }


def mistaken() -> dict[str, str]:
    """Files with the example's tests, each of which makes one of the mistakes that the README tells of."""
    one_file = files()["pipeline.py"] + files()["test_training.py"].replace("from pipeline import Pipeline\n", "")

    def with_(mistake: str, instead: str = "") -> str:
        assert one_file.count(mistake) == 1
        return one_file.replace(mistake, instead)

    return {
        "test_short.py": with_("+ 20_000", "+ 10_000"),
        "test_devices.py": with_(".to(output.device)"),
        "test_order.py": with_("        stream.wait_stream(self.copies)\n"),
        "test_growth.py": with_("return loss.item()", "kept.append(loss)\n\n\nkept = []"),
    }


@pytest.fixture(scope="module")
def processes(request, available, tmp_path_factory):
    def project(change=dict):
        folder = tmp_path_factory.mktemp("project")
        for name, text in {**files(), **change()}.items():
            (folder / name).write_text(text)
        return run_pytest(folder, "--junitxml=report.xml", *change(), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    with Ahead(request, tmp_path_factory.mktemp("ahead"), project) as ahead:
        yield ahead


@pytest.mark.ahead
def test_the_example_passes(result):
    assert sorted(files()) == ["conftest.py", "pipeline.py", "test_training.py"]
    result.assert_outcomes(passed=2)


@pytest.mark.long
@pytest.mark.ahead(change=mistaken)
def test_each_mistake_that_it_tells_of_fails(result, done):
    result.assert_outcomes(passed=4, failed=4)
    found = failures(done.args.folder / "report.xml")
    told = {
        "test_devices.test_pipeline_": "Expected all tensors to be on the same device",
        "test_order.test_pipeline_": "RuntimeError: race: ",
        "test_growth.test_pipeline_": "assert",
        "test_short.test_replicas_": "OutOfMemoryError",
    }
    for (test, message), (beginning, words) in zip(sorted(found.items()), sorted(told.items()), strict=True):
        assert test.startswith(beginning)
        assert words in message
