"""Captures while other threads use the devices, and several threads that call one model with captured graphs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from at_once import in_threads
from dataparallel.replicas.graphs.calls import WARM_UP
from dataparallel.testing.cases import numbers, seeded
from graphed_models import FORMS, Row, SmoothLayer, made
from graphed_nets import SETTLE, graphed, reasons, replays
from sharded_steps import Model

pytestmark = [
    pytest.mark.devices("cuda"),
    pytest.mark.parametrize("form", FORMS),
]

MODEL = Model(seeded(lambda: Row(SmoothLayer)), numbers(4))
ROUNDS = 10
LARGE = 20 * 2**20
"""From this size on torch asks CUDA for the memory of one tensor alone."""


def use(slot: torch.device, size: int) -> None:
    """A capture in CUDA's global mode would not survive this."""
    stream = torch.cuda.current_stream(slot)
    large = torch.empty(size, dtype=torch.uint8, device=slot)
    pageable = torch.arange(64.0)
    there = pageable.to(slot)
    pinned = pageable.pin_memory()
    there += pinned.to(slot, non_blocking=True)
    event = torch.cuda.Event()
    event.record(stream)
    event.synchronize()
    stream.synchronize()
    assert torch.equal(there.cpu(), 2 * pageable)
    del large


@contextmanager
def used_by_another_thread(slots: list) -> Iterator[list[int]]:
    """Inside the block another thread uses the devices again and again. Its errors are raised at the end."""
    rounds: list[int] = []
    is_over = threading.Event()

    def run() -> None:
        # Of another priority than those that capture: torch has 32 streams of each, and hands out the same ones again.
        streams = {slot: torch.cuda.Stream(slot, priority=-1) for slot in slots}
        while not is_over.is_set():
            rounds.append(LARGE + len(rounds) % 64 * 2**20)  # larger than what is free: CUDA is asked for memory
            for slot, stream in streams.items():
                with torch.cuda.device(slot), torch.cuda.stream(stream):
                    use(slot, rounds[-1])

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield rounds
        finally:
            is_over.set()
            torch.cuda.empty_cache()
        running.result()


def assert_all_captured(network: Any, kinds: int, slots: list) -> None:
    assert not reasons(network)
    assert [replica.captures for replica in graphed(network)] == [kinds] * len(slots)


def test_another_thread_may_use_the_devices_during_captures(form: str, slots: list) -> None:
    kinds = 4
    with used_by_another_thread(slots) as rounds:
        for _ in range(2):
            source, network = made(MODEL, FORMS[form], slots, graphs=True)
            for chunk in range(1, kinds + 1):
                (x,), _ = MODEL.batch(chunk * len(slots), chunk)
                x = x.to(slots[0])
                for _ in range(SETTLE):
                    network(x).square().mean().backward()
            assert_all_captured(network, kinds, slots)
            assert rounds
            source.zero_grad()


def test_two_threads_call_one_model_at_once(form: str, slots: list) -> None:
    """Each gets the outputs for its own inputs, by graphs or as the replicas are.

    In turn one of them calls alone until its graphs are launched, and then both call.
    """
    _, network = made(MODEL, FORMS[form], slots, graphs=True)
    network.eval()
    plain = MODEL.build().eval()
    inputs = [[MODEL.batch(2 * len(slots), 10 * thread + i)[0][0] for i in range(4)] for thread in range(2)]
    with torch.no_grad():
        expected = [[plain(x) for x in of_thread] for of_thread in inputs]

    def call(thread: int, times: int) -> None:
        for i in range(times):
            found = network(inputs[thread][i % 4].to(slots[0]))
            torch.testing.assert_close(found.cpu(), expected[thread][i % 4], rtol=1e-9, atol=1e-9)

    def calls(thread: int, meet: threading.Barrier) -> None:
        with torch.no_grad():
            for turn in range(ROUNDS):
                if turn % 2 == thread:
                    call(thread, WARM_UP + 3)
                meet.wait(60)
                call(thread, 4)
                meet.wait(60)

    with replays() as launched:
        in_threads(2, calls)
    in_each = 3 if len({*slots}) == len(slots) else 2  # slots on one device share threads, and each thread warms up
    assert len(launched) >= ROUNDS * in_each * len(slots)
    assert not reasons(network)
