"""A launcher belongs to its process, keeps nothing alive, and holds up no end."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from dataparallel.machines.collectives import broadcast, stage
from dataparallel.machines.errors import MachinesError, PeerFailed
from dataparallel.machines.group import Machines
from machine_ranks import all_machines, on_machines, on_mortal_machines, summed
from processes import environment

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough

EXIT = """
import sys, time, torch
from datetime import timedelta
from torch import distributed
rank, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=100)
)
from dataparallel.machines.collectives import all_reduce, stage
from dataparallel.machines.group import Machines
machines = Machines.of(distributed.group.WORLD)
if what == "collective" or rank == 0:
    round = machines.queue.begin_round("backward", "")
if rank == 0:
    launched = round.launch("bucket 0", lambda: all_reduce(machines, stage(machines, torch.ones(3))))
    if what == "failure":
        machines.queue.signal_failure(ValueError("no such column"))
    time.sleep(0.5)
    print("rank 0 ends", flush=True)
else:
    sys.stdin.read()  # until the test has seen rank 0 end
"""


@pytest.mark.parametrize("what", ["agreement", pytest.param("collective", marks=pytest.mark.long)])
def test_the_interpreter_ends_with_work_under_way(what: str, tmp_path: Path) -> None:
    """torch alone would wait for the other rank, or for the group's timeout."""
    variables = environment(GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo")
    second, first = (
        subprocess.Popen(
            [sys.executable, "-c", EXIT, rank, str(tmp_path), what],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "10"
    )
    try:
        assert first.stdin is not None
        assert first.communicate(timeout=40)[0] == "rank 0 ends\n"
        assert first.returncode == 0
    finally:
        first.kill()
        second.kill()
        first.wait()
        second.communicate()


ENDS = """
import atexit, os, sys, torch
from pathlib import Path
from torch import distributed, nn

def count():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("pt_gloo_runloop") for name in names)

atexit.register(lambda: print("at the end", count(), flush=True))  # called last
from dataparallel.composable import replicate
rank, folder = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = replicate(nn.Linear(3, 2), devices=["cpu", "cpu"], process_group=distributed.group.WORLD)
model(torch.ones(4, 3)).sum().backward()
print("in use", count() > 0, flush=True)
distributed.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_no_thread_of_gloo_is_left_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """One that needs the interpreter's lock later would end the process by a signal."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, rank, str(tmp_path)],
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert printed == ["in use True\nat the end 0\n"] * 2
    assert [process.returncode for process in both] == [0, 0]


def forks(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    round = machines.queue.begin_round("backward", "")
    launched = round.launch("bucket 0", lambda: summed(machines, torch.ones(1)))
    with machines.queue.changed:  # as another thread may hold it at a fork
        child = os.fork()
    if child == 0:
        said = 0
        calls = [launched.wait, lambda: round.end([]), lambda: machines.queue.begin_round("backward", "")]
        for call in calls:
            try:
                call()
            except MachinesError as error:
                said += "forked" in str(error)
        os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    end = round.end([True])  # the parent goes on
    assert launched.wait().tolist() == [2]
    assert end.wait() == [True]


def test_a_forked_child_is_told_that_it_is_no_rank() -> None:
    on_machines(forks)


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("machines"))


def drops(rank: int, devices: list[torch.device]) -> None:
    class Held:
        pass

    machines = all_machines()
    assert all_machines() is machines
    held = Held()
    alive = weakref.ref(held)
    round = machines.queue.begin_round("backward", "")
    launched = round.launch("bucket 0", lambda held=held: summed(machines, torch.ones(1)))
    launched.wait()
    end = round.end([True])
    del held
    end.wait()
    deadline = time.monotonic() + 5
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() is None  # what was issued is dropped
    assert threads() == ["machines: issuing", "machines: launcher"]
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []
    # And another thread begins where there is something to do.
    assert machines.queue.begin_round("backward", "").end([True]).wait() == [True]


def test_a_launcher_that_has_nothing_to_do_ends_its_thread() -> None:
    on_machines(drops)


def destroys(rank: int, devices: list[torch.device]) -> None:
    """Whether torch goes on with a group that is held, or refuses it, is up to torch."""
    machines = all_machines()
    machines.queue.begin_round("backward", "").end([True]).wait()
    distributed.barrier()
    distributed.destroy_process_group()
    with contextlib.suppress(MachinesError):
        assert machines.queue.begin_round("backward", "").end([True]).wait() == [True]


def fails_and_forgets(rank: int, devices: list[torch.device]) -> None:
    if rank == 1:
        all_machines().queue.signal_failure(ValueError("no such thing"))
        gc.collect()
    else:
        time.sleep(0.5)
        with pytest.raises(PeerFailed, match="rank 1 failed before a round: ValueError: no such thing"):
            all_machines().queue.begin_round("a start", "").end([]).wait()
    assert all_machines().queue.begin_round("the next start", "").end([rank == 1]).wait() == [True]


def test_a_failure_is_told_even_if_nobody_holds_the_launcher() -> None:
    """As after a form that has refused its arguments. Another launcher of the group comes after it."""
    on_machines(fails_and_forgets)


def test_destroy_process_group_while_there_is_a_launcher() -> None:
    for ended in on_mortal_machines(destroys, group_timeout=30):
        assert ended.error is None
        assert ended.seconds < 5


def two_groups(rank: int, devices: list[torch.device]) -> None:
    """Each rank uses them in another order, and waits in another order."""
    machines = all_machines()
    other = machines.another()
    assert (other.ranks, other.timeout) == (machines.ranks, machines.timeout)
    assert other.group is not machines.group
    for step in range(20):
        both = [machines, other]
        flats = [torch.full((3,), float(place + step)) for place in range(2)]
        places = [0, 1] if rank == 0 else [1, 0]
        rounds = {place: both[place].queue.begin_round("backward", f"{place}") for place in places}
        sums = [partial(summed, *pair) for pair in zip(both, flats, strict=True)]
        launched = {place: rounds[place].launch("a", sums[place]) for place in places}
        assert [launched[place].wait().tolist() for place in places] == [[2.0 * (place + step)] * 3 for place in places]
        ends = [rounds[place].end([True]) for place in places]
        assert [end.wait() for end in ends] == [[True], [True]]


def test_two_groups_do_not_wait_for_each_other() -> None:
    on_machines(two_groups)


def parts(rank: int, devices: list[torch.device]) -> None:
    pairs = [distributed.new_group([0, 1]), distributed.new_group([1, 2])]
    for pair, ranks in zip(pairs, ([0, 1], [1, 2]), strict=True):
        if rank in ranks:
            machines = Machines.of(pair)
            assert (machines.rank, machines.size, machines.ranks) == (ranks.index(rank), 2, ranks)
            assert machines.names([0, 1]) == f"ranks {ranks[0]} and {ranks[1]}"
            flat = torch.ones(1) * rank
            round = machines.queue.begin_round("buffers", "")
            launched = round.launch("a", partial(broadcast, machines, stage(machines, flat)))
            round.close()
            assert launched.wait() == ranks[0]
            # Rank 1 is in more groups than the others. Some releases of torch give a new group two names then.
            with contextlib.suppress(RuntimeError):
                assert machines.another().ranks == ranks
        else:
            with pytest.raises(ValueError, match="no rank of the process group"):
                Machines.of(pair)


def test_groups_of_some_ranks() -> None:
    on_machines(parts, ranks=3)


def not_dense(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    for tensor in (torch.ones(3, 4).t(), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match="flatten it first"):
            stage(machines, tensor)


def test_what_cannot_be_sent_is_refused() -> None:
    on_machines(not_dense)
