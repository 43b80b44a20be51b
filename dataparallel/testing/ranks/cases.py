"""The `unittest` bases: `SlotTest`, `ThreadTest` and `ProcessTest` run each test method on slots, threads, processes.

In a rank a test is a new instance of the class, which runs ``setUp``, the method, ``tearDown`` and the cleanups. The
instance that unittest or pytest knows only starts the ranks, and reports once how they ended.
"""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dataparallel.testing.ranks import processes, slots, threads
from dataparallel.testing.ranks.child import Found, find
from dataparallel.testing.ranks.rank import Rank
from dataparallel.testing.ranks.reports import describe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


class _RankTest(unittest.TestCase):
    """What the three bases share.

    Attributes:
        info: the `Rank`; only in a rank.
    """

    world_size: int = 2
    info: Rank

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.info.number

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors belong."""
        return self.info.device

    @property
    def devices(self) -> list[torch.device]:
        """The devices of all slots, or this rank's one."""
        return self.info.devices

    @property
    def device_type(self) -> str:
        """The type of this rank's device."""
        return self.info.device.type

    def build_device_mesh(self, shape: Sequence[int] | None = None, names: Sequence[str] | None = None) -> DeviceMesh:
        """See `Rank.mesh`."""
        return self.info.mesh(shape, names)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """See `Rank.seeded`."""
        with self.info.seeded(seed):
            yield

    def run_subtests(
        self, values: Mapping[str, Iterable[Any]], function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> None:
        """See `run_subtests`."""
        run_subtests(self, values, function, *args, **kwargs)

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Runs the test; in a rank as unittest does, elsewhere by starting the ranks."""
        if hasattr(self, "info"):
            return super().run(result)
        name = self.id().rpartition(".")[2]
        method = getattr(self, name)

        @functools.wraps(method)  # marks of unittest, as skip and expectedFailure, are attributes of the method
        def in_ranks() -> None:
            __tracebackhide__ = True
            self._in_ranks(name)

        before = dict(vars(self))
        vars(self).update({name: in_ranks, "setUp": _nothing, "tearDown": _nothing})
        try:
            return super().run(result)
        finally:
            for changed in (name, "setUp", "tearDown"):
                vars(self).pop(changed, None)
                if changed in before:
                    vars(self)[changed] = before[changed]

    def _in_ranks(self, name: str) -> None:
        raise NotImplementedError("derive the test from SlotTest, ThreadTest or ProcessTest")


class ProcessTest(_RankTest):
    """Runs each test method in ``world_size`` processes; `with_comms` gives a method a process group.

    ``setUpClass`` runs in every process too, and in the process of the test run. The fixture ``on_processes`` says what
    a rank starts with and how it ends.

    Attributes:
        world_size: how many processes.
        backend: nccl if there is a CUDA device for each rank, else gloo, if this is None.
        timeout: seconds for one test.
    """

    backend: str | None = None
    timeout: float = 60.0

    def _in_ranks(self, name: str) -> None:
        __tracebackhide__ = True
        found = find(type(self))
        processes.on_processes(
            run_method, found, name, ranks=self.world_size, backend=self.backend, timeout=self.timeout, comms=False
        )


class ThreadTest(_RankTest):
    """Runs each test method in ``world_size`` threads, with torch's threaded process group from the start.

    Attributes:
        world_size: how many threads.
        timeout: seconds for one test.
    """

    timeout: float = 60.0

    def _in_ranks(self, name: str) -> None:
        __tracebackhide__ = True
        threads.on_threads(_run_case, type(self), name, ranks=self.world_size, timeout=self.timeout)


class SlotTest(_RankTest):
    """Runs each test method once, with ``self.devices`` for ``world_size`` slots of this process.

    Attributes:
        world_size: how many slots.
        slot_device: "cpu", "cuda" or "sim"; None as with the fixture ``on_slots``.
    """

    slot_device: str | None = None

    def _in_ranks(self, name: str) -> None:
        __tracebackhide__ = True
        slots.on_slots(_run_case, type(self), name, ranks=self.world_size, device=self.slot_device)


def _nothing() -> None:
    pass


def run_method(rank: Rank, found: Found, name: str) -> None:
    """In the process of a rank: finds the class of a test, and runs one of its methods."""
    case: type[_RankTest] = found.load()
    try:
        case.setUpClass()
        _run_case(rank, case, name)
    finally:
        case.tearDownClass()
        case.doClassCleanups()


def _run_case(rank: Rank, case: type[_RankTest], name: str) -> None:
    test = case(name)
    test.info = rank
    found = _Errors()
    test.run(found)
    for error in found.errors_found[1:]:
        traceback.print_exception(error, file=sys.stderr)
    if found.errors_found:
        raise found.errors_found[0]


class _Errors(unittest.TestResult):
    """Keeps the exceptions themselves: the first one ends the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.errors_found: list[BaseException] = []

    def addError(self, test: Any, err: Any) -> None:
        self.errors_found.append(err[1])

    addFailure = addError

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.errors_found.append(err[1])  # the test run knows too that it is expected

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.errors_found.append(err[1])

    def addSkip(self, test: Any, reason: str) -> None:
        self.errors_found.append(unittest.SkipTest(reason))
