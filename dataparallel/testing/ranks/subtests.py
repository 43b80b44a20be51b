"""`run_subtests`: calls a function for each combination of arguments, and reports all that fail in one error."""

from __future__ import annotations

import itertools
import sys
import unittest
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dataparallel.testing.ranks.reports import describe

__all__ = ["run_subtests"]


def run_subtests(
    case: Any, values: Mapping[str, Iterable[Any]], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> None:
    """Calls ``function(*args, name=value, ..., **kwargs)`` for every combination, each with ``torch.manual_seed(0)``.

    So one start of processes and one process group serve many combinations. All ranks take them in the same order.

    Args:
        case: the test case or the `Rank`. It is not used: calls read like those of torch's own tests.
        values: for each keyword argument its values. Their product is taken, the last name changing fastest.
        function: called without ``case``.
        *args: passed on.
        **kwargs: passed on.

    Raises:
        AssertionError: if any combination has failed, with all of them and their tracebacks.
        unittest.SkipTest: if all were skipped.
        ValueError: if there is no combination, so that nothing would be tested.
    """
    names = list(values)
    combinations = list(itertools.product(*(list(each) for each in values.values())))
    if not combinations:
        raise ValueError(f"run_subtests takes one value or more for each name; got {dict(values)!r}")
    failed, skipped = [], []
    for combination in combinations:
        chosen = dict(zip(names, combination, strict=True))
        text = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        torch.manual_seed(0)
        try:
            function(*args, **chosen, **kwargs)
        except (KeyboardInterrupt, GeneratorExit, SystemExit):
            raise
        except BaseException as error:  # pytest's outcomes are no `Exception`
            ended = describe(0, error, 0.0)
            if ended.how == "raised":
                # Where the other ranks still wait in this combination, it is the output that tells of it.
                print(f"{text}: {ended.what}", file=sys.stderr, flush=True)
                failed.append(f"{text}: {ended.what}\n{ended.trace}")
            else:
                skipped.append(f"{text}: {ended.what}")
    if failed:
        raise AssertionError(f"{len(failed)} of {len(combinations)} combinations failed\n\n" + "\n".join(failed))
    if len(skipped) == len(combinations):
        raise unittest.SkipTest("; ".join(skipped))
