"""Several threads use models of all forms at once, and each result is checked: for seconds, and for a long time. ::

    PYTHONPATH=.:tests/forms:tests/peers python tests/test_stress.py KIND SECONDS [SEED]

``KIND`` is ``cpu`` for CPU slots, or ``sim`` for simulated devices. The program prints its seed, and what has been done
every ten seconds. The first wrong result or error ends it with exit code 1 and the name of the round, whose random
numbers follow from the seed. If the process crashes, or if no round ends for two minutes, it leaves the stacks of all
threads. Builds of Python without the lock are what it is for: `.ci/free-threaded` runs it there for longer.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import os
import random
import subprocess
import sys
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from at_once import in_threads
from dataparallel import peers, prefetch
from dataparallel.composable import fully_shard
from each_form import FORMS, whole
from nets import build, samples
from processes import environment

THREADS, SLOTS = 3, 3
HANGS_AFTER, RENEWED_EVERY, SHOWN_EVERY = 120.0, 20.0, 10.0
LONG = 1200.0  # seconds; two kinds make 40 minutes
Random = random.Random


def same_bits(name: str, found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected), f"{name}: wrong bits:\n{found}\ninstead of\n{expected}"


def applied(form: str, net: Any, slots: Sequence[Any]) -> Any:
    """The net in a form. A sharded one has three units."""
    for unit in (net.linear, net.inner) if form == "fully_shard" else ():
        fully_shard(unit, devices=slots)
    return FORMS[form](net, slots)


class Shared:
    """A model that any thread may call at any time.

    What it returns while nobody else calls it is that of one device. These bits every later call has to have.
    ``records`` is false if calls may not record: of a fully sharded model one thread alone runs backward, and a model
    that some thread has frozen records for none.
    """

    def __init__(self, form: str, slots: Sequence[Any], *, is_served: bool = False, is_circular: bool = False) -> None:
        self.name = f"{form}, {is_served=}, {is_circular=}"
        self.records = form != "fully_shard" and not is_served
        self.x = samples(slots[0], 3 * len(slots) + 1)
        net: Any = build(slots[0]).eval()
        alone = copy.deepcopy(net)
        if is_circular:
            net.linear.above = [net]
            net.linear.forward = types.MethodType(type(net.linear).forward, net.linear)
        self.model = applied(form, net, slots)
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        expected = self.results(alone, [each for each in alone.parameters() if each.requires_grad], self.records)
        self.results_alone = self.results(self.model, self.parameters, self.records)
        torch.testing.assert_close(self.results_alone, expected, rtol=0, atol=1e-9, msg=lambda text: self.name + text)

    def results(self, call: Any, parameters: list[Any], records: bool) -> list[Tensor]:
        with torch.set_grad_enabled(records):
            output = call(self.x)
        return [output.detach(), *(torch.autograd.grad(output.square().sum(), parameters) if records else ())]

    def call(self, records: bool, inference: bool) -> None:
        with torch.inference_mode(inference):
            found = self.results(self.model, self.parameters, records and self.records and not inference)
        for number, each in enumerate(found):
            same_bits(f"result {number} of {self.name}", each, self.results_alone[number])


class Rounds:
    """What a thread does again and again. Each round checks its own results, and raises if one is wrong.

    ``models`` are those that threads call at once. `renew` replaces them while calls of the old ones may still run.
    """

    def __init__(self, slots: Sequence[Any]) -> None:
        self.slots, self.root = slots, slots[0]
        self.models: list[Shared] = []
        self.renew()

    def renew(self) -> None:
        models = [Shared(form, self.slots) for form in FORMS]
        more = [Shared("DataParallel", self.slots, **{kind: True}) for kind in ("is_circular", "is_served")]
        self.models = [*models, *more]

    def call(self, choose: Random) -> None:
        """Calls of one model from several threads at once, with and without gradients."""
        shared = choose.choice(self.models)
        for _ in range(choose.randint(1, 4)):
            shared.call(choose.random() < 0.5, choose.random() < 0.3)

    def serve_frozen(self, choose: Random) -> None:
        """Blocks of several threads overlap, so that the model is frozen for all or for none."""
        shared = self.models[-1]
        with shared.model.options.frozen():
            for _ in range(choose.randint(1, 5)):
                shared.call(False, choose.random() < 0.5)

    def prefetched(self, choose: Random) -> None:
        """A loader's batches are sent ahead, beside those of other threads."""
        shared = choose.choice(self.models)
        batches = [shared.x.cpu().clone() for _ in range(choose.randint(1, 4))]
        with torch.no_grad():
            for batch in prefetch(batches, shared.model, depth=choose.randint(1, 2)):
                same_bits(f"prefetched output of {shared.name}", shared.model(batch), shared.results_alone[0])

    def first_calls_together(self, choose: Random) -> None:
        """The first calls of a model come from several threads at once, so that all of them find nothing made yet."""
        net = build(self.root).eval()
        alone, x = copy.deepcopy(net), samples(self.root)
        model = applied(choose.choice([*FORMS]), net, self.slots)
        expected = alone(x)

        def call(index: int, barrier: threading.Barrier) -> None:
            barrier.wait()
            for _ in range(2):
                with torch.no_grad():
                    torch.testing.assert_close(model(x), expected.detach(), rtol=0, atol=1e-9)

        in_threads(choose.randint(2, 3), call)
        model(x).square().sum().backward()
        expected.square().sum().backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=0, atol=1e-7)

    def train(self, choose: Random) -> None:
        """A model that no other thread knows, in steps of the state machine: it is changed, fails, and goes on."""
        from test_state_machine import CHOSEN, WRITES, How, steps_of

        program = steps_of(choose.choice([*FORMS]), lambda count: self.slots[:count])()
        tree = tuple(How(choose.random() < 0.7, recomputed=choose.choice([None, False])) for _ in range(2))
        on_few_devices = dict.fromkeys(["is_on_one_device", "is_on_two_devices"], False)
        chosen = {name: choose.random() < 0.3 for name in CHOSEN} | on_few_devices
        program.make(tree, False, SLOTS, choose.choice([None, True, False]), chosen, True)
        program.load_state_dict(1.0)  # other threads set the seed too
        changes: list[Callable[[], None]] = [
            lambda: program.train_or_eval(choose.random() < 0.5, False),
            lambda: program.load_state_dict(choose.choice([0.5, -0.9])),
            lambda: program.write(choose.choice([*WRITES]), 0.9, choose.randrange(20)),
            lambda: program.freeze(choose.randrange(9), choose.random() < 0.5),
            lambda: program.options_of_calls(choose.choice([None, True]), choose.choice([None, 1, 2]), True),
            lambda: program.a_layer_fails(choose.choice(["forward", "hook", "backward"]), 1, 6, 3, False, False, None),
            lambda: program.evaluate(choose.randint(1, 9), 1, torch.no_grad),
        ]
        for _ in range(choose.randint(3, 8)):
            batches = [(choose.randint(1, 9), choose.randrange(512), choose.random() < 0.5) for _ in range(2)]
            program.micro_batches(batches, True)
            program.optimizer_step(False)
            choose.choice(changes)()
            program.zero_grad(True)
        program.look()

    def replicas_meet(self, choose: Random) -> None:
        """Collectives in forward, in a checkpoint or not. One replica may fail while others wait for it."""
        from test_random_sequences import STEPS, Sequence, check

        class InACheckpoint(Sequence):
            def run(self, x: Tensor, weight: Tensor) -> Tensor:
                return peers.checkpoint(super().run, x, weight)

        names = tuple(choose.choices([*STEPS], k=choose.randint(1, 5)))
        fails = (choose.randrange(SLOTS), choose.randint(0, len(names))) if choose.random() < 0.3 else None
        kind = choose.choice([Sequence, InACheckpoint])
        check(kind(choose.choice([*FORMS]), names, fails, False, {"chunk_sizes": [2] * SLOTS}), self.slots)


# How often each comes beside the others.
OFTEN = {"call": 50, "serve_frozen": 10, "prefetched": 5, "first_calls_together": 6, "train": 6, "replicas_meet": 10}


class Stress:
    """The threads of one process. Round ``n`` of thread ``t`` draws from ``seed/t/n``."""

    def __init__(self, seed: int, seconds: float, slots: Sequence[Any]) -> None:
        self.seed, self.rounds = seed, Rounds(slots)
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.errors: list[str] = []
        self.done: list[Counter[str]] = [Counter() for _ in range(THREADS)]  # each thread writes its own

    def run(self) -> int:
        """Runs all threads. Returns how many errors came."""
        threads = [threading.Thread(target=self.run_rounds, args=(each,), daemon=True) for each in range(THREADS)]
        for thread in threads:
            thread.start()
        renewed = shown = self.began
        before = -1
        while (now := time.monotonic()) < self.until and not self.errors:
            time.sleep(0.2)
            total = sum(counts.total() for counts in self.done)
            if total != before:
                before = total
                faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            if now - renewed > RENEWED_EVERY:
                renewed = now
                self.rounds.renew()
            if now - shown > SHOWN_EVERY:
                shown = now
                self.show()
        for thread in threads:
            thread.join(HANGS_AFTER)
        faulthandler.cancel_dump_traceback_later()
        self.show()
        for error in self.errors:
            print(error, file=sys.stderr, flush=True)
        return len(self.errors)

    def run_rounds(self, number: int) -> None:
        place = 0
        while time.monotonic() < self.until and not self.errors:
            choose = Random(f"{self.seed}/{number}/{place}")
            (name,) = choose.choices([*OFTEN], [*OFTEN.values()])
            try:
                getattr(self.rounds, name)(choose)
            except BaseException:
                self.errors.append(f"round {self.seed}/{number}/{place}, {name}:\n{traceback.format_exc()}")
                return
            self.done[number][name] += 1
            place += 1

    def show(self) -> None:
        total = sum(self.done, Counter[str]())
        print(f"{time.monotonic() - self.began:.0f} s: {total.total()} rounds, {dict(total)}", flush=True)


def main(kind: str, seconds: str, *seed: str) -> int:
    from nogpu import simulate

    number = int(*seed) if seed else random.SystemRandom().randrange(10**6)
    faulthandler.enable()
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"seed {number}, {'with' if has_lock else 'without'} the lock, torch {torch.__version__}", flush=True)
    torch.set_num_threads(1)  # tiny operators; and a sum in another number of threads may have other bits
    sys.setswitchinterval(1e-4)
    gc.freeze()  # a collection need not walk through all of torch
    slots = simulate(SLOTS) if kind == "sim" else [torch.device("cpu")] * SLOTS
    return min(Stress(number, float(seconds), slots).run(), 1)


@pytest.mark.devices("cpu")  # each process makes its own devices
@pytest.mark.long
@pytest.mark.watchdog(3 * LONG)
@pytest.mark.parametrize("kind", ["cpu", "sim"])
@pytest.mark.parametrize("seconds", [5.0, LONG])
def test_nothing_is_wrong(kind: str, seconds: float) -> None:
    here = Path(__file__).parent
    paths = environment(PYTHONPATH=os.pathsep.join(map(str, [here.parent, here / "forms", here / "peers"])))
    command, limit = [sys.executable, __file__, kind, str(seconds)], 2 * seconds + 100
    ended = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=limit)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-12000:]}"
    assert "rounds" in ended.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
