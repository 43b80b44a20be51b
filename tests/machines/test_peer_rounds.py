"""The nodes of collectives across machines run in one order in backward, and are told apart. Here with one machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.machines.peer_rounds import Message, PeerCall

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough


class Rounds:
    """In the place of `PeerRounds`: two machines, of which the other one brings the same."""

    def __init__(self) -> None:
        self.machines = SimpleNamespace(rank=0, size=2)
        self.texts: list[str] = []

    def exchange(self, kind: str, text: str, parts: Sequence[Message], epoch: int) -> list[Tensor]:
        self.texts.append(text.replace(" [torch.float32]", ""))
        return [part.flat.clone() for part in parts]

    def expect_in_backward(self) -> int:
        return 0


def exchanged(call: PeerCall, text: str, tensor: Tensor) -> Tensor:
    ((_, other),) = call.exchange(text, [[tensor, tensor]], [[len(tensor)] * 2], in_graph=True)
    return other


def in_a_new_thread(function: Any) -> Any:
    """torch numbers the nodes of each thread from 0 on, and a backward begins with the largest number."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


class TestOrderOfBackwards:
    def test_is_the_reverse_of_forward_whatever_is_ready_first(self, rounds):
        call, x = PeerCall(rounds, 0), torch.ones(3, requires_grad=True)
        for _ in range(100):  # the first node has a larger number than the second one
            x = x + 0
        first = exchanged(call, "first", x)
        second = in_a_new_thread(lambda: exchanged(call, "second", x.detach().requires_grad_()))
        (first.sum() + second.sum()).backward()
        assert rounds.texts == [
            "first, exchange 1",
            "second, exchange 2",
            "of second, exchange 2",
            "of first, exchange 1",
        ]

    def test_what_a_backward_does_not_reach_is_not_waited_for(self, rounds):
        call, x = PeerCall(rounds, 0), torch.ones(3, requires_grad=True)
        first, _ = exchanged(call, "first", x), exchanged(call, "second", x)
        first.sum().backward()
        assert rounds.texts[2:] == ["of first, exchange 1"]
