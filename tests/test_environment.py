"""Switches in the environment: what means no, what means yes, and that nothing else is taken."""

import pytest

from dataparallel.environment import says_no

pytestmark = pytest.mark.devices("cpu")


@pytest.mark.parametrize(
    ("value", "means_no"),
    [(value, True) for value in ("0", "false", "No", "OFF")]
    + [(value, False) for value in ("", "1", "yes", "True", "ON")],
)
def test_what_means_no(value: str, means_no: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPARALLEL_A_SWITCH", raising=False)
    assert not says_no("DATAPARALLEL_A_SWITCH")
    monkeypatch.setenv("DATAPARALLEL_A_SWITCH", value)
    assert says_no("DATAPARALLEL_A_SWITCH") == means_no


def test_another_word_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPARALLEL_A_SWITCH", "fasle")
    with pytest.raises(ValueError, match=r"DATAPARALLEL_A_SWITCH='fasle': expected 0, false, .* on, or nothing"):
        says_no("DATAPARALLEL_A_SWITCH")
