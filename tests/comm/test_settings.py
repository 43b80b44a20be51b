"""Who says how tensors travel, who wins, and what is refused."""

from collections.abc import Iterator

import pytest

from dataparallel.comm import settings
from dataparallel.comm.settings import TRANSPORT_VARIABLE, TRANSPORTS, current, using

pytestmark = pytest.mark.devices("cpu")  # no settings of devices: once is enough


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(TRANSPORT_VARIABLE, raising=False)
    with settings.held(None):  # as in a thread that is in no block
        assert current() is None
        yield


def test_nested_blocks_change_only_what_they_name_until_they_end() -> None:
    with using(transport="copy"):
        with using(transport="host"), using():
            assert current() == "host"
        with pytest.raises(KeyError), using(transport="cupy"):
            raise KeyError
        assert current() == "copy"
    assert current() is None


def test_the_environment_says_it_at_each_call_and_a_block_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT_VARIABLE, "cupy")
    assert current() == "cupy"
    with using(transport="copy"):
        assert current() == "copy"
    monkeypatch.setenv(TRANSPORT_VARIABLE, "")
    assert current() is None


def test_an_impossible_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT_VARIABLE, "nccl")
    with pytest.raises(ValueError, match="nccl") as caught:
        current()
    for word in (TRANSPORT_VARIABLE, *TRANSPORTS):
        assert word in str(caught.value)
