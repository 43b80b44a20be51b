"""Who says how tensors travel, who wins, and what is refused."""

from collections.abc import Iterator

import pytest

from dataparallel.comm import settings
from dataparallel.comm.settings import ROUTES, TRANSPORTS, CommSettings, current, using

pytestmark = pytest.mark.devices("cpu")  # no settings of devices: once is enough

NAMES = {"DATAPARALLEL_TRANSPORT": TRANSPORTS, "DATAPARALLEL_ROUTE": ROUTES}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in NAMES:
        monkeypatch.delenv(variable, raising=False)
    with settings.held(None):  # as in a thread that is in no block
        assert current() == CommSettings(transport=None, route=None, deterministic=True)
        yield


def test_nested_blocks_change_only_what_they_name_until_they_end() -> None:
    with using(transport="copy", deterministic=False):
        with using(route="chain"):
            assert current() == CommSettings("copy", "chain", False)
            with using(transport="host", deterministic=True):
                assert current() == CommSettings("host", "chain", True)
            assert current() == CommSettings("copy", "chain", False)
        with pytest.raises(KeyError), using(route="star"):
            raise KeyError
        assert current() == CommSettings("copy", None, False)
    assert current() == CommSettings()


def test_the_environment_says_it_at_each_call_and_a_block_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "nccl")
    monkeypatch.setenv("DATAPARALLEL_ROUTE", "star")
    assert current() == CommSettings("nccl", "star")
    with using(transport="copy"):
        assert current() == CommSettings("copy", "star")
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "")
    assert current() == CommSettings(None, "star")


@pytest.mark.parametrize("variable", NAMES)
def test_an_impossible_variable_is_refused_by_name(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "pigeon")
    with pytest.raises(ValueError, match="pigeon") as caught:
        current()
    for word in (variable, *NAMES[variable]):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        *((name, value, ValueError) for name in ("transport", "route") for value in ("pigeon", "")),
        *((name, 3, TypeError) for name in ("transport", "route")),
        ("deterministic", "no", TypeError),
    ],
)
def test_an_impossible_argument_is_refused(argument: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=argument), using(**{argument: value}):
        pytest.fail("the block has begun")
