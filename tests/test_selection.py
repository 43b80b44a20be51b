"""What a run is for: the short tests, or all."""

import pytest

from processes import Ahead, run_pytest

# Their processes are their own: once is enough.
pytestmark = pytest.mark.devices("cpu")

CONFTEST = """
pytest_plugins = ["selection"]

def pytest_configure(config):
    config.addinivalue_line("markers", "ahead")
"""

TESTS = """
import pytest

def test_short():
    pass

@pytest.mark.long
def test_long():
    pass

@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.long)])
def test_both(count):
    pass

@pytest.mark.ahead
@pytest.mark.parametrize("what", ["whole", pytest.param("smoke", marks=pytest.mark.smoke)])
def test_process(what):
    pass

@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", "uv")
def test_product(a, b):
    pass

@pytest.mark.few(2)
@pytest.mark.parametrize("a", "xyz")
def test_few(a):
    pass
"""

# It is not imported, so its test is not counted among those that are left out.
ALL_LONG = """
import pytest

pytestmark = pytest.mark.long

def test_of_a_long_file():
    pass
"""

SHORT = {"test_short", "test_both[2]", "test_process[smoke]"}
SHORT |= {"test_product[u-x]", "test_product[v-y]", "test_product[u-z]"}  # each value once
SHORT |= {"test_few[x]", "test_few[y]"}
LONG = {"test_of_a_long_file", "test_long", "test_both[8]", "test_process[whole]"}
LONG |= {"test_product[v-x]", "test_product[u-y]", "test_product[v-z]", "test_few[z]"}


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    def run(*arguments):
        folder = tmp_path_factory.mktemp("project")
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_user.py").write_text(TESTS)
        (folder / "test_all_long.py").write_text(ALL_LONG)
        return run_pytest(folder, "-v", *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    with Ahead(request, tmp_path_factory.mktemp("ahead"), run) as ahead:
        yield ahead


def passed(result: pytest.RunResult) -> set[str]:
    return {line.split("::")[1].split()[0] for line in result.outlines if " PASSED" in line}


@pytest.mark.smoke
@pytest.mark.ahead
def test_a_run_without_options_leaves_the_long_ones_out_and_says_how_to_run_them(result):
    assert passed(result) == SHORT
    result.stdout.fnmatch_lines(["left out: at least 7 long tests, which run with --all"])


@pytest.mark.ahead("--all")
def test_all_is_both(result):
    assert passed(result) == SHORT | LONG


@pytest.mark.ahead("test_user.py::test_long", "test_user.py::test_short")
def test_a_long_test_runs_where_it_is_named(result):
    assert passed(result) == {"test_short", "test_long"}
