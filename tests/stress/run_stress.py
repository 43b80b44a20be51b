"""The stress test: several threads use models of all forms at once, and each result is checked. ::

    python tests/stress/run_stress.py --seconds=3600 --kind=cpu

It prints its seed, and what has been done every ten seconds. The first wrong result or error ends it with exit code 1
and the number of the round, whose random numbers follow from the seed. If the process crashes, it leaves the stacks of
all threads. If no round ends for two minutes, it ends too. `test_stress` runs it as a process.

``--kind``: ``cpu`` for CPU slots, ``sim`` for simulated devices.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
from stress_rounds import ROUNDS, World  # noqa: E402

HANGS_AFTER = 120.0
RENEWED_EVERY = 20.0
SHOWN_EVERY = 10.0


class Stress:
    """The threads of one process. Round ``n`` of thread ``t`` draws from ``seed/t/n``."""

    def __init__(self, seed: int, threads: int, seconds: float, slots: Sequence[torch.device], only: str) -> None:
        self.seed, self.count, self.seconds = seed, threads, seconds
        self.world = World(slots)
        names = [name for name in ROUNDS if not only or name in only.split(",")]
        self.names, self.weights = names, [ROUNDS[name][1] for name in names]
        self.until = 0.0
        self.errors: list[str] = []
        self.done: list[Counter[str]] = [Counter() for _ in range(threads)]  # each thread writes its own

    def run(self) -> int:
        """Runs all threads. Returns how many errors came."""
        self.world.renew(self.seed)
        began = time.monotonic()
        self.until = began + self.seconds
        threads = [threading.Thread(target=self._rounds, args=(each,), daemon=True) for each in range(self.count)]
        for thread in threads:
            thread.start()
        renewed = shown = began
        before = -1
        while (now := time.monotonic()) < self.until and not self.errors:
            time.sleep(0.2)
            total = sum(counts.total() for counts in self.done)
            if total != before:
                before = total
                faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            if now - renewed > RENEWED_EVERY:
                renewed = now
                self.world.renew(self.seed + int(now - began))
            if now - shown > SHOWN_EVERY:
                shown = now
                self._show(now - began)
        for thread in threads:
            thread.join(HANGS_AFTER)
        faulthandler.cancel_dump_traceback_later()
        self._show(time.monotonic() - began)
        for error in self.errors:
            print(error, file=sys.stderr, flush=True)
        return len(self.errors)

    def _rounds(self, number: int) -> None:
        place = 0
        while time.monotonic() < self.until and not self.errors:
            choose = random.Random(f"{self.seed}/{number}/{place}")
            (name,) = choose.choices(self.names, self.weights)
            try:
                ROUNDS[name][0](self.world, choose)
            except BaseException:
                self.errors.append(f"round {self.seed}/{number}/{place}, {name}:\n{traceback.format_exc()}")
                return
            self.done[number][name] += 1
            place += 1

    def _show(self, seconds: float) -> None:
        total = sum(self.done, Counter())
        print(f"{seconds:.0f} s: {total.total()} rounds, {dict(total)}", flush=True)


def slots_of(kind: str, count: int) -> list[torch.device]:
    if kind == "sim":
        from nogpu import simulate

        return simulate(count)
    return [torch.device("cpu")] * count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kind", choices=["cpu", "sim"], default="cpu")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", default="", help="names of rounds, with commas")
    arguments = parser.parse_args()
    faulthandler.enable()
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"seed {arguments.seed}, {'with' if has_lock else 'without'} the lock, torch {torch.__version__}", flush=True)
    torch.set_num_threads(1)  # tiny operators; and a sum in another number of threads may have other bits
    sys.setswitchinterval(1e-4)
    slots = slots_of(arguments.kind, arguments.slots)
    errors = Stress(arguments.seed, arguments.threads, arguments.seconds, slots, arguments.only).run()
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
