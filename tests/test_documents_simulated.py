"""Files that a page shows pass as they are printed, and the tests in the guide fail where the guide says so.

A block whose first line is ``# name.py`` is a file. All such blocks of a page are written into a folder. pytest runs
there, in a process of its own, where simulated accelerators can be made.
"""

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from documents import DOCS, README, blocks_of, pages
from processes import Ahead, Job, run_pytest, skip_without_tools

# Their processes are their own: once is enough.
pytestmark = pytest.mark.devices("cpu")

TESTING = DOCS / "nogpu" / "simulated.rst"


@pytest.fixture(scope="module")
def available() -> None:
    skip_without_tools()


def files(page: Path) -> dict[str, str]:
    """The blocks of a page that show a file, by its name."""
    return {block.file: block.text for block in blocks_of(page) if block.file is not None}


def failures(report: Path) -> dict[str, str]:
    """What each test that failed says at its end, by the names of its file and its function."""
    return {
        f"{case.attrib['classname']}.{case.attrib['name']}": failure.attrib["message"]
        for case in xml.etree.ElementTree.parse(report).iter("testcase")
        for failure in case.iter("failure")
    }


def mistaken() -> dict[str, str]:
    """Files with the guide's tests, each of which makes one of the mistakes that the guide tells of."""
    shown = files(TESTING)
    one_file = shown["pipeline.py"] + shown["test_training.py"].replace("from pipeline import Pipeline\n", "")

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
    def project(page: Path, change=dict) -> Job:
        folder = tmp_path_factory.mktemp("project")
        for name, text in {**files(page), **change()}.items():
            (folder / name).write_text(text)
        return run_pytest(folder, "--junitxml=report.xml", *change(), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    with Ahead(request, tmp_path_factory.mktemp("ahead"), project) as ahead:
        yield ahead


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.ahead(page), id=page.relative_to(README.parent).as_posix())
        for page in pages()
        if any(block.file is not None for block in blocks_of(page))
    ],
)
def test_the_files_of_a_page_pass(page, result, done):
    shown = {name for text in files(page).values() for name in re.findall(r"def (test_\w+)", text)}
    assert shown != set()
    assert set(result.parseoutcomes()) == {"passed"}
    report = xml.etree.ElementTree.parse(done.args.folder / "report.xml")
    # A parametrised test is several.
    assert {case.attrib["name"].partition("[")[0] for case in report.iter("testcase")} == shown


@pytest.mark.long
@pytest.mark.ahead(TESTING, change=mistaken)
def test_each_mistake_that_the_guide_tells_of_fails(result, done):
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
