"""Switches in the environment: what means no, what means yes, and that nothing else is taken."""

import pytest

from dataparallel.environment import says_no

pytestmark = pytest.mark.devices("cpu")


@pytest.mark.parametrize("value", ["0", "false", "No", "OFF"])
def test_what_means_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPARALLEL_A_SWITCH", value)
    assert says_no("DATAPARALLEL_A_SWITCH")


@pytest.mark.parametrize("value", [None, "", "1", "yes", "True", "ON"])
def test_what_does_not(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPARALLEL_A_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("DATAPARALLEL_A_SWITCH", value)
    assert not says_no("DATAPARALLEL_A_SWITCH")


def test_another_word_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPARALLEL_A_SWITCH", "fasle")
    with pytest.raises(ValueError, match=r"DATAPARALLEL_A_SWITCH='fasle': expected 0, false, .* on, or nothing"):
        says_no("DATAPARALLEL_A_SWITCH")
