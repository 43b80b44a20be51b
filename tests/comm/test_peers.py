"""A pair of devices passes its check if random data goes from one to the other; a broken pair is noticed.

A copy that brings garbage, or nothing, plays a broken pair. It replaces `peers._copy`, because machines that run
these tests have no broken pair.
"""

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.comm import peers
from dataparallel.comm.peers import failed_pairs, passes_check

CPU = torch.device("cpu")
on_devices = pytest.mark.devices("sim", "cuda")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DATAPARALLEL_PEER_CHECK", raising=False)
    monkeypatch.setattr(torch.get_device_module(), "copies_cannot_fail", False, raising=False)
    peers.forget()
    yield
    peers.forget()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list:
    """The pairs between which a checked copy has been made."""
    made, copy = [], peers._copy

    def noted(source: Tensor, target: Tensor) -> None:
        made.append((source.device, target.device))
        copy(source, target)

    monkeypatch.setattr(peers, "_copy", noted)
    return made


def nothing(source: Tensor, target: Tensor) -> None:
    """A copy that does not arrive."""


def zeros(source: Tensor, target: Tensor) -> None:
    target.zero_()


def one_bit_wrong(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
    target[-1].bitwise_xor_(1)


def all_but_one_number(source: Tensor, target: Tensor) -> None:
    target[1:].copy_(source[1:])


def shifted(source: Tensor, target: Tensor) -> None:
    target.copy_(source.roll(4096))


def broken_at(pair: tuple, copy: Callable[[Tensor, Tensor], None] = nothing) -> Callable[[Tensor, Tensor], None]:
    """A copy that is broken from the one to the other only."""

    def copied(source: Tensor, target: Tensor) -> None:
        if (source.device, target.device) == pair:
            copy(source, target)
        else:
            target.copy_(source)

    return copied


@on_devices
def test_every_ordered_pair_is_checked_once(slots: list, copies: list) -> None:
    expected = list(itertools.permutations(dict.fromkeys(slots), 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert failed_pairs([*dict.fromkeys(slots), CPU]) == []
            assert all(passes_check(*pair) for pair in expected)
    assert copies == expected


@on_devices
@pytest.mark.parametrize("copy", [nothing, zeros, one_bit_wrong, all_but_one_number, shifted])
def test_a_broken_pair_is_noticed_in_the_direction_that_is_broken(
    pair: tuple, copy: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_copy", broken_at(pair, copy))
    with pytest.warns(RuntimeWarning, match=f"from {pair[0]} to {pair[1]} .* through the host"):
        assert failed_pairs(pair) == [pair]


@on_devices
def test_it_warns_once_and_keeps_the_answer(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the warning is an error."""
    monkeypatch.setattr(peers, "_copy", broken_at(pair))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"did not arrive(?s:.*)DATAPARALLEL_PEER_CHECK=0"):
            passes_check(*pair)
        assert not passes_check(*pair)
        assert failed_pairs(pair) == [pair]


@on_devices
def test_who_shows_the_warning_may_ask(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(peers, "_copy", broken_at(pair))
    monkeypatch.setattr(warnings, "showwarning", lambda *_: asked.append(passes_check(*pair[::-1])))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert not passes_check(*pair)
    assert asked == [True]


@on_devices
def test_a_check_that_could_not_be_made_is_made_again(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Tensor, target: Tensor) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(peers, "_copy", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            passes_check(*pair)
    assert passes_check(*pair)


@on_devices
@pytest.mark.parametrize("value", ["0", "no", "False", "off"])
def test_it_can_be_turned_off(
    pair: tuple, value: str, copies: list, forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPARALLEL_PEER_CHECK", value)
    assert comm.broadcast(torch.ones(3, device=pair[0]), pair)[1].tolist() == [1.0] * 3
    assert copies == []


@on_devices
@pytest.mark.parametrize("is_healthy", [True, False])
def test_threads_that_ask_at_once_wait_for_one_answer(
    is_healthy: bool, pair: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, all_asking = threading.Semaphore(0), threading.Event()
    checks, answers, said = [], [], []

    def slow(source: Tensor, target: Tensor) -> None:
        checks.append(threading.get_ident())
        assert all_asking.wait(20)
        if is_healthy:
            target.copy_(source)

    def ask() -> None:
        asking.release()
        answers.append(passes_check(*pair))

    monkeypatch.setattr(peers, "_copy", slow)
    monkeypatch.setattr(warnings, "warn", lambda *args, **_: said.append(args))
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        asking.acquire()
    assert answers == [], "nobody has an answer before the copy has arrived"
    all_asking.set()
    for thread in threads:
        thread.join()
    assert answers == [is_healthy] * 8
    assert len(checks) == 1
    assert len(said) == (0 if is_healthy else 1)


@on_devices
def test_random_states_and_what_is_current_stay(pair: tuple) -> None:
    def states() -> list[Tensor]:
        module = torch.get_device_module(pair[0].type)
        return [torch.get_rng_state(), *(module.get_rng_state(device) for device in pair)]

    def now() -> list:
        streams = [torch.accelerator.current_stream(device) for device in pair]
        return [torch.accelerator.current_device_index(), *streams]

    before, random = now(), states()
    assert passes_check(*pair)
    assert now() == before
    assert all(map(torch.equal, random, states()))
