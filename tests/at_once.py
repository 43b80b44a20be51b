"""Runs the work of a test in several threads at once."""

import threading
from collections.abc import Callable


def in_threads(count: int, work: Callable[[int, threading.Barrier], object]) -> None:
    """Runs ``work(index, barrier)`` in ``count`` threads, which the barrier is for. Raises the first error."""
    barrier, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        try:
            work(index, barrier)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
