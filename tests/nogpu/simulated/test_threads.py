"""The clocks carry what a host thread has waited for to threads that it starts or that join it, and to no others."""

import threading

import pytest
import torch

from like_the_cpu import DEVICE as ONE
from orders import finish, race

pytestmark = pytest.mark.devices("sim")


def test_what_a_thread_has_waited_for_is_known_to_the_threads_that_it_starts(stream):
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    stream.synchronize()
    errors = []

    def read():
        try:
            written + 1
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    finish()
    assert not errors


def test_what_a_thread_has_waited_for_is_known_to_the_one_that_joins_it(stream):
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    thread.join()
    written.add_(1)
    finish()


def test_what_another_thread_has_waited_for_is_not_known(stream):
    """The wait came first only by luck."""
    started, done = threading.Event(), threading.Event()

    def wait():
        started.wait()
        stream.synchronize()
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    started.set()
    done.wait()
    with race():
        written.add_(1)
    thread.join()
    written.add_(1)
    finish()


def test_what_the_caller_of_backward_has_waited_for_is_known_to_its_threads(stream):
    with torch.sim.stream(stream):
        factor = torch.full((3,), 2.0, device=ONE)
    stream.synchronize()
    leaf = torch.ones(3, device=ONE, requires_grad=True)
    out = leaf * 1
    out.register_hook(lambda grad: grad * factor)
    out.sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


def test_who_sees_that_a_thread_has_ended_knows_what_it_has_waited_for(stream):
    with torch.sim.stream(stream):
        written = torch.ones(3, device=ONE)
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    while thread.is_alive():
        pass
    written.add_(1)
    finish()
