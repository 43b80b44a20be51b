"""A warning comes at the line of the user's code, and a performance warning once."""

import subprocess
import sys
import warnings

import pytest

from dataparallel import PerformanceWarning
from dataparallel.user_warnings import VARIABLE, warn_once, warn_user
from processes import environment

pytestmark = pytest.mark.devices("cpu")


def test_a_warning_comes_at_the_line_of_the_caller():
    with pytest.warns(UserWarning, match="slow") as caught:
        warn_user("slow")
    assert (caught[0].filename, caught[0].category) == (__file__, UserWarning)


def test_the_library_and_torch_are_no_users():
    code = compile("def call(function): function()", "inside.py", "exec")
    inner, outer = {"__name__": "dataparallel.inside"}, {"__name__": "torch.nn.inside"}
    exec(code, inner)
    exec(code, outer)
    with pytest.warns(UserWarning, match="slow") as caught:
        outer["call"](lambda: inner["call"](Warns("slow")))
    assert caught[0].filename == __file__


class Warns:
    def __init__(self, message):
        # Its frame is no function of this file: what is warned of is called by the library only.
        space = {"__name__": "dataparallel.inside", "warn_user": warn_user, "message": message}
        exec(compile("def warn(): warn_user(message)", "inside.py", "exec"), space)
        self.warn = space["warn"]

    def __call__(self):
        self.warn()


@pytest.mark.usefixtures("performance_warnings")
def test_each_kind_comes_once_whatever_the_message():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for message in ("first", "second"):
            warn_once("a kind", message)
            warn_once("another", message)
    assert [(str(each.message), each.category) for each in caught] == [("first", PerformanceWarning)] * 2


def test_the_command_line_makes_them_errors():
    """Python reads ``-W`` before it knows installed packages: PYTHONPATH names this one, and torch is not there."""
    program = "from dataparallel.user_warnings import warn_once; import sys; assert 'torch' not in sys.modules; "
    program += "warn_once('a', 'b')"
    command = [sys.executable, "-W", "error::dataparallel.PerformanceWarning", "-c", program]
    done = subprocess.run(command, env=environment(**{VARIABLE: "1"}), capture_output=True, text=True, check=False)
    assert "PerformanceWarning: b" in done.stderr
    assert done.returncode == 1
