"""The end of a pass of backward is noticed, whether it succeeds or fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataparallel.autograd.end_of_pass import at_end_of_pass


class Fails(Exception):
    """What a hook raises."""


def watched(heard: list[Any], then: Any = lambda error: None) -> torch.Tensor:
    """A tensor whose backward notes its end in ``heard``."""
    x = torch.ones(2, requires_grad=True) * 1

    def finish(error: BaseException | None) -> None:
        heard.append(error)
        then(error)

    x.register_hook(lambda grad: at_end_of_pass(finish))
    return x


def test_of_a_pass_that_succeeds():
    heard: list[Any] = []
    x = watched(heard)
    x.sum().backward(retain_graph=True)
    assert heard == [None]
    x.sum().backward()
    assert heard == [None, None]


def test_of_a_pass_that_fails():
    heard: list[Any] = []
    x = watched(heard)

    def fail(grad: torch.Tensor) -> None:
        raise Fails

    x.register_hook(fail)
    with pytest.raises(Fails):
        x.sum().backward()
    (error,) = heard
    assert isinstance(error, RuntimeError)


def test_what_it_raises_at_the_end_fails_the_pass():
    def fail(error: BaseException | None) -> None:
        raise Fails

    heard: list[Any] = []
    with pytest.raises(Fails):
        watched(heard, fail).sum().backward()
    assert heard == [None]
