"""What the README tells its readers to type is what `.ci/run` runs, and packages come from where the machine says."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.devices("cpu")

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = re.compile(r"pip install .*-e ['\"]\.\[([\w,-]+)\]['\"]")


def typed() -> list[str]:
    """The commands in the README's shell blocks, without comments."""
    blocks = re.findall(
        r"^\.\. code-block:: (?:bash|sh|shell|console)\n\n((?:[ \t]+.*\n|\n)+)", (ROOT / "README.rst").read_text(), re.M
    )
    lines = [
        re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ") for block in blocks for line in block.splitlines()
    ]
    return [command.strip() for line in lines for command in line.split("&&") if command.strip()]


def run() -> list[str]:
    return [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]


@pytest.mark.parametrize("command", ["pytest", "pytest bench"])
def test_both_commands_are_run_as_they_stand(command):
    assert command in typed()
    assert command in run()


def test_whatever_else_it_installs_is_installed():
    wanted, installed = (
        {extra for line in lines if (found := EXTRAS.search(line)) for extra in found[1].split(",")}
        for lines in (typed(), run())
    )
    assert {"test", "bench"} <= wanted
    assert wanted <= installed


@pytest.mark.parametrize("script", ["run", "long", "free-threaded"])
def test_the_tests_that_a_script_names_exist(script):
    named = re.findall(r"(?<=[ =])tests/[\w/{},.]+", (ROOT / ".ci" / script).read_text())
    shown = subprocess.run(["bash", "-c", f"echo {' '.join(named)}"], capture_output=True, text=True, check=True).stdout
    assert [path for path in shown.split() if not (ROOT / path).exists()] == []


INDEX_HOSTS = (
    r"pypi\.[a-z]|files\.pythonhosted|(deb|ftp|snapshot)\.debian|(archive|ports)\.ubuntu|security\.(debian|ubuntu)"
    r"|download\.pytorch|(repo|conda)\.anaconda"
)


def test_no_file_names_the_host_of_a_package_index():
    """A machine has indexes of its own: it has configured pip, apt and conda."""
    found = subprocess.run(["git", "grep", "-inIE", INDEX_HOSTS], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode > 1:
        pytest.skip("this is no checkout")
    assert found.stdout == ""
