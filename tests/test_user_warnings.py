"""A warning comes at the line of the user's code, and one of a kind once."""

import warnings

import pytest

from dataparallel.user_warnings import warn_once, warn_user

pytestmark = pytest.mark.devices("cpu")


def test_a_warning_comes_at_the_line_of_the_caller():
    with pytest.warns(UserWarning, match="slow") as caught:
        warn_user("slow")
    assert (caught[0].filename, caught[0].category) == (__file__, UserWarning)


def test_the_library_and_torch_are_no_users():
    code = compile("def call(function): function()", "inside.py", "exec")
    inner, outer = {"__name__": "dataparallel.inside"}, {"__name__": "torch"}
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


@pytest.mark.usefixtures("nothing_said")
def test_each_kind_comes_once_whatever_the_message():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for message in ("first", "second"):
            warn_once("a kind", message)
            warn_once("another", message)
    assert [str(each.message) for each in caught] == ["first"] * 2
