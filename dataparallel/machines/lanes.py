"""`Machines`: ranks that send together. `Lane`: collectives and words, which all of them issue in one order.

Backends pair collectives by the order in which each rank issues them. A lane issues its items in the order in which
they were added, which is that of buckets and units: rank 0 sends it after the first step (``gradients.machine_sums``,
``sharded.units.over_machines``). Lanes have connections of their own, so none waits for another. Only NCCL, and hooks,
which send over a group of the user, need one order over all lanes: the order in which rank 0 launches.

A *word* is a small value of each rank, gathered over gloo. A pair of items that have not followed each other before is
compared by a word, once: after the first step nothing more is sent for that.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed
from torch.futures import Future

from dataparallel import _torch
from dataparallel.autograd.pass_of_backward import running_pass
from dataparallel.devices import CPU
from dataparallel.machines.collectives import SLICE, Link, Transfer, stage
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed, differences
from dataparallel.machines.group import GroupState, Result, issuer, states
from dataparallel.threads.pool import Outcome

GRACE = 2.0
"""Seconds that a communication hook has to end here after another rank has failed."""

LEAVES = 1.0
"""Seconds that what follows waits for the engine's threads to leave a backward that has failed."""

_FRAME, _LENGTH = 1024, 8  # bytes of a word's first message, and of the length at its beginning

_Pauses: TypeAlias = Iterator[bool]
"""A generator that yields where it has to wait: true if nobody wakes the thread then. The thread runs other lanes."""

_given: dict[int, tuple[Any, Machines]] = {}
"""Users' groups by their ids, with their `Machines`. They are held until they are destroyed, on all ranks alike."""


launching = threading.Lock()
"""Held by the thread that launches NCCL. NCCL forbids launches from several threads at once, on any communicators: two
launches that wait for each other's kernels hang. The lock does not cover launches that the user makes."""


class End(NamedTuple):
    """The end of a pass. No rank may use a sum before `wait` returns: then all ranks have sent all of theirs."""

    said: Result

    def wait(self) -> tuple[list[bool], Any]:
        """The bit mask, of which an entry is true if it is on any rank; and what rank 0 has said besides."""
        said = self.said.wait()
        for key in {key for _, sent, _ in said for key in sent}:
            if len({sent[key] for _, sent, _ in said if key in sent}) > 1:
                error = MachinesDiffer(
                    "the ranks have not sent the same things in one order before the end of this pass, so no gradient "
                    "is used: they have run other forwards or backwards, or other parts of the model. All ranks have "
                    "to run the same calls on the same model"
                )
                self.said.state.leave(self.said.epoch, error)
                raise error
        return [any(of_ranks) for of_ranks in zip(*(mask for mask, _, _ in said), strict=True)], said[0][2]


class _Item(NamedTuple):
    """``issue(results)`` sends. ``text`` has to be equal on all ranks; a word compares its own text."""

    results: Sequence[Result]
    text: str | None
    issue: Callable[[Sequence[Result]], _Pauses]


class Lane:
    """A sequence of items of the ranks of ``machines``. All of them make their lanes in one order.

    Attributes:
        history: a checksum of the texts of all collectives in this epoch. Ranks that have added the same have the same.
    """

    history: int
    _count: int
    _issued: int

    def __init__(self, machines: Machines, purpose: str) -> None:
        self.machines, self.state, self.number = machines, machines.state, machines.state.lane_count
        self.name = f"{purpose} {self.number}"
        self._begin_epoch()
        self.state.lane_count += 1
        self.state.lanes.add(self)

    # ---- what forms call

    def launch(
        self,
        kind: str,
        what: Sequence[str],
        calls: Sequence[Callable[[Link], Transfer]],
        text: str | None = None,
        *,
        epoch: int,
        over: Machines | None = None,
        after: Sequence[Result] = (),
    ) -> list[Result]:
        """Adds one collective on each of several devices. On none of them another launch comes between.

        The thread calls ``calls`` in the order in which items were added. If one raises, no rank can go on in the
        epoch. ``text`` says whatever decides sizes and dtypes. ``epoch``: that in which the step has begun here.
        ``after``: results that have to arrive before.
        """
        places = (over or self.machines).places
        return self._add(kind, what, epoch, text, partial(self._launch, calls, places, after))

    def add_sums(
        self, kind: str, what: Sequence[str], staged: Sequence[Transfer | Result], device: torch.device, **options: Any
    ) -> list[Result]:
        """Adds sums over ``over``, of what is staged or of what earlier results have received. See `launch`.

        With gloo they are added in rank order, so equal inputs give equal bits in every run, in buckets of any size:
        gloo's own sum begins at a rank that depends on the position in the tensor.
        """
        over = options.get("over") or self.machines
        is_one = over.size <= 2 or over.is_nccl(device)
        issue = Transfer.all_reduce if is_one else Transfer.reduce_scatter
        first = self.launch(kind, what, [partial(_on, issue, each) for each in staged], **options)
        if is_one:
            return first
        sums = [partial(_on, Transfer.send_sums, each) for each in first]
        return self.launch(kind, what, sums, **{**options, "text": None, "after": first})

    def call(
        self,
        kind: str,
        what: str,
        begin: Callable[[], Future[Any]],
        check: Callable[[], object],
        *,
        epoch: int,
        text: str,
    ) -> Result:
        """Adds a communication hook: ``begin`` calls the hook, which may send anything itself, and returns its future.

        The thread calls ``begin``, waits for the future, calls ``check``, and issues nothing else meanwhile. If either
        raises on a rank, no rank calls the next hook, and all ranks leave the epoch.
        """
        return self._add(kind, [what], epoch, text, partial(self._run_hook, begin, check))[0]

    def gather(self, kind: str, text: str, value: Any, *, epoch: int, what: str = "what the ranks say") -> Result:
        """Adds a word. The result is the list of all ranks' values, or `MachinesDiffer` if the texts differ."""
        return self._add(kind, [what], epoch, None, partial(self._say, f"{kind}\n{text}", value))[0]

    def end(
        self, kind: str, mask: Sequence[bool], *, epoch: int, others: Sequence[Lane] = (), extra: Any = None
    ) -> End:
        """Adds the word at the end of a pass: a bit mask, and what the pass has sent."""
        sent = {f"{lane.name} of {lane.machines.ranks}": lane.history for lane in (self, *others)}
        text, said = f"{len(mask)} gradients", (bytes(mask), sent, extra)
        return End(self.gather(f"the end of {kind!r}", text, said, epoch=epoch, what="the end"))

    def _add(
        self,
        kind: str,
        what: Sequence[str],
        epoch: int,
        text: str | None,
        issue: Callable[[Sequence[Result]], _Pauses],
    ) -> list[Result]:
        state, number = self.state, self._count
        state.check_process()
        with issuer.changed:
            number, error = self._count, state.why_not(epoch)
            places = self.machines.places
            results = [Result(state, self.name, places, f"{name} of {kind!r}", epoch, number) for name in what]
            if error is None and results:
                self._count += 1
                if text is not None:
                    self.history = zlib.crc32(text.encode(), self.history)
                self.items.append(_Item(results, text, issue))
                issuer.run(self)
        if error is not None:
            for result in results:
                result.fail(error)
        return results

    # ---- called with ``issuer.changed`` held

    def _begin_epoch(self) -> None:
        self.items: deque[_Item] = deque()
        self._steps: _Pauses | None = None
        self._count = self._issued = self._before = self.history = 0
        self._seen: set[tuple[int, int]] = set()  # pairs of items, by hashes of their texts

    def drop(self, error: BaseException) -> int:
        """Drops all items for a new epoch, and makes their waits raise. Returns how many items had been issued."""
        items, issued = self.items, self._issued
        self._begin_epoch()
        for item in items:
            for result in item.results:
                result.fail(error)
        return issued

    # ---- the issuing thread

    def advance(self) -> bool:
        """Issues items until one has to wait. Returns true if nobody wakes the thread when the lane can go on."""
        with issuer.changed:
            steps = self._steps = self._steps or self._issue_all(self.items)
        polls = next(steps, None)  # goes on to the next pause
        if polls is not None:
            return polls
        with issuer.changed:
            if self._steps is steps:
                self._steps = None
        return False

    def _issue_all(self, items: deque[_Item]) -> _Pauses:
        while items and items is self.items:
            item = items[0]
            try:
                yield from self._compare(item)
                yield from item.issue(item.results)
            except GeneratorExit:
                raise
            except BaseException as error:
                self._fail(item.results, error)
                del error
            with issuer.changed:
                if items is self.items:
                    items.popleft()
                    self._issued += 1
            del item  # while the generator waits it holds no item that was issued

    def _compare(self, item: _Item) -> _Pauses:
        """Compares the texts of ranks, if this item has not followed the one before it in this epoch."""
        if item.text is not None:
            pair = self._before, hash(item.text)
            if pair not in self._seen:
                yield from self._gather(item.results[0], item.text, None)
                self._seen.add(pair)
            self._before = pair[1]

    def _launch(
        self,
        calls: Sequence[Callable[[Link], Transfer]],
        over: tuple[int, ...],
        after: Sequence[Result],
        results: Sequence[Result],
    ) -> _Pauses:
        state, result = self.state, results[0]
        # gloo tells only of some collectives when they have ended.
        yield from self._until(result, lambda: all(each.has_arrived() for each in after), polls=True)
        gloo = yield from self._connect(result, self.name, over)
        if state.has_nccl:
            yield from self._take_turn(result)
        link = Link(over.index(state.rank), len(over), gloo, state.communicators(over) if state.has_nccl else None)
        # Held for all devices of the item, so that other launches on them come before it or after it on each.
        with launching if state.has_nccl else nullcontext():
            for each, call in zip(results, calls, strict=True):
                each.succeed(call(link))

    def _take_turn(self, result: Result) -> _Pauses:
        """Returns when the lane may launch. The caller then does so, without another pause.

        NCCL hangs if ranks launch in different orders. Rank 0 launches what is ready there, and tells the others, one
        small broadcast for each launch, which lane it was. They launch the next item of that lane.
        """
        state, turns = self.state, self.state.turns
        gloo = yield from self._connect(result, "turns", range(state.size))
        if state.rank == 0:
            gloo.broadcast([torch.tensor([self.number])], distributed.BroadcastOptions())
            return

        def is_of_this_lane() -> bool:
            if not turns:
                told = torch.empty(1, dtype=torch.int64)
                turns.append((told, gloo.broadcast([told], distributed.BroadcastOptions()).get_future()))
                turns[0][1].add_done_callback(issuer.wake)
            told, future = turns[0]
            if not future.done():
                return False
            future.wait()
            return int(told) == self.number

        yield from self._until(result, is_of_this_lane)
        turns.clear()
        issuer.wake()  # another lane may wait for the next turn

    def _run_hook(
        self, begin: Callable[[], Any], check_result: Callable[[], object], results: Sequence[Result]
    ) -> _Pauses:
        """Runs a communication hook, which sends messages over a group of the user.

        If the hook fails on one rank, it may wait on others for messages that never come. If it still waits `GRACE`
        seconds after its rank knows of that, its messages would be paired with later ones: the group is lost.
        """
        (result,), done = results, threading.Event()
        # All ranks come to this hook, so none has failed before it, or in the one before.
        yield from self._gather(result, "a hook", None)
        yield from self._take_turn(result)
        future, check = begin(), self.state.wait_check(result)
        future.add_done_callback(lambda _: done.set())
        try:
            while not done.wait(SLICE):
                check()
        except (PeerFailed, MachinesDiffer) as failed:
            if not done.wait(GRACE):
                text = f"what it has sent here gets no answer, because it has failed on another rank: {failed}"
                raise self.state.lose(RuntimeError(text), result) from failed
            raise
        check_result()
        result.succeed(None)

    def _say(self, text: str, value: Any, results: Sequence[Result]) -> _Pauses:
        results[0].succeed((yield from self._gather(results[0], text, value)))

    def _gather(self, result: Result, text: str, value: Any) -> Any:
        """Gathers a word. A second message is sent if one of them is long."""
        gloo = yield from self._connect(result, f"words of {self.name}", self.machines.places)
        pickled = pickle.dumps((text, value))
        data = len(pickled).to_bytes(_LENGTH, "little") + pickled
        rows = yield from self._gather_bytes(result, gloo, data[:_FRAME], _FRAME)
        lengths = [_LENGTH + int.from_bytes(row[:_LENGTH], "little") for row in rows]
        if max(lengths) > _FRAME:
            rests = yield from self._gather_bytes(result, gloo, data[_FRAME:], max(lengths) - _FRAME)
            rows = [row + rest for row, rest in zip(rows, rests, strict=True)]
        said = [pickle.loads(row[_LENGTH:length]) for row, length in zip(rows, lengths, strict=True)]
        if self.machines.size == self.state.size:  # all ranks are in this epoch
            self.state.forget_old()
        if len({text for text, _ in said}) > 1:
            raise MachinesDiffer(self._differences([text for text, _ in said]))
        return [value for _, value in said]

    def _gather_bytes(self, result: Result, gloo: Any, data: bytes, size: int) -> Any:
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.machines.size)]
        work = gloo.allgather([rows], [own])
        future = work.get_future()  # it is done before the work says that it is completed
        future.add_done_callback(issuer.wake)
        yield from self._until(result, future.done)
        work.wait()  # raises its error
        return [row.numpy().tobytes() for row in rows]

    def _differences(self, texts: Sequence[str]) -> str:
        """The message of `MachinesDiffer`. The first line of a text is its kind."""
        kind, parts = texts[0].partition("\n")[0], differences(texts, self.machines.ranks)
        return (
            f"the ranks differ in what they do next ({kind!r}), so nothing of it is used: {'; '.join(parts)}. All "
            "ranks have to run the same calls on the same model"
        )

    def _connect(self, result: Result, purpose: str, places: Sequence[int]) -> Any:
        """Connects ranks by gloo, once in an epoch, in a thread of its own: that blocks until all of them have come."""
        state, name = self.state, f"{result.epoch}/{purpose}/{tuple(places)}"
        outcome = state.connections.get(name)
        if outcome is None:
            outcome = state.connections[name] = Outcome()

            def connect(outcome: Outcome = outcome) -> None:
                outcome.fill(partial(state.connect, name, places))
                issuer.wake()

            threading.Thread(target=connect, daemon=True).start()
        yield from self._until(result, lambda: (outcome.value or outcome.error) is not None)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _until(self, result: Result, is_over: Callable[[], bool], polls: bool = False) -> _Pauses:
        check = self.state.wait_check(result)
        while not is_over():
            check()
            yield polls

    def _fail(self, results: Sequence[Result], error: BaseException) -> None:
        """An item cannot be issued, or a collective or a hook has raised here: the epoch is over."""
        result = results[0]
        if isinstance(error, MachinesError):
            self._issued += isinstance(error, MachinesDiffer)  # what tells the others was sent
            self.state.leave(result.epoch, error)
        elif is_of_network(error):
            error = self.state.error_of(result, error)
        else:
            if not isinstance(error, Exception):
                error = _as_exception(error)
            for each in results:  # before `leave`, which fails all that is queued with an error of its own
                each.fail(error)
            self.state.leave(result.epoch, error, result.what)
        for each in results:
            each.fail(error)


def _as_exception(error: BaseException) -> RuntimeError:
    """An error that does not end the thread that waits, as ``SystemExit`` would."""
    other = RuntimeError(f"{type(error).__name__}: {error}")
    other.__cause__ = error
    return other


def _on(issue: Callable[[Transfer, Link], Transfer], given: Transfer | Result, link: Link) -> Transfer:
    """Issues a collective of what is staged, or of what another one has received."""
    if isinstance(given, Transfer):
        return issue(given, link)
    return issue(given.issued() if issue is Transfer.send_sums else given.issued().send_on(), link)


def is_of_network(error: BaseException) -> bool:
    """True if torch or gloo has raised the error because a peer is gone or late."""
    text = str(error)
    return isinstance(error, distributed.DistError) or "/gloo/" in text or "caused pair closure" in text


class Machines:
    """Ranks that send together: all of a group, or some. They have ``places`` in the group, and ``ranks`` of all."""

    def __init__(self, state: GroupState, places: Sequence[int]) -> None:
        self.state, self.places = state, tuple(places)
        self.ranks = [state.ranks[place] for place in places]
        self.rank, self.size = self.places.index(state.rank), len(self.places)
        self._devices: list[torch.device] = []  # those that have a communicator of NCCL
        self._made: dict[Any, Machines] = {}
        self.words = self.lane("words")  # what is sent outside of steps

    @staticmethod
    def of(group: distributed.ProcessGroup) -> Machines:
        """The machines of the group: the same object each time, until the group is destroyed."""
        with issuer.changed:
            for key, (known, _) in [*_given.items()]:
                if not exists(known):
                    del _given[key]
            if id(group) not in _given:
                ranks, backends = distributed.get_process_group_ranks(group), _backends(group)
                timeout = _torch.group_timeout(group, torch.device(next(iter(backends)))).total_seconds()
                rank, store = distributed.get_rank(group), group.get_group_store()
                state = GroupState("given", ranks, rank, backends, timeout, store)
                _given[id(group)] = group, Machines(state, range(len(ranks)))
            return _given[id(group)][1]

    @property
    def epoch(self) -> int:
        """A step has that in which it begins."""
        return self.state.epoch

    def begin_call(self) -> int:
        """The epoch of what begins outside of a pass of backward: a forward, or what is sent outside of steps.

        A backward that has raised tells the others when the engine's threads have left it, so this waits for it.
        """
        until = time.monotonic() + LEAVES
        while not _torch.is_in_backward() and any(each.contents for each in self.state.passes):
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        return self.epoch

    def begin_pass(self) -> int:
        """The epoch of a pass of backward that begins here."""
        running = running_pass()
        running.contents.setdefault(self.state, True)  # it has contents until it is over
        self.state.passes.add(running)
        return self.epoch

    def describe(self) -> str:
        """The number of this machine, for messages."""
        return f"machine {self.rank} of {self.size}"

    # ---- lanes, and machines with other ranks: all ranks ask for them in one order

    def lane(self, purpose: str) -> Lane:
        """Makes a lane."""
        return Lane(self, purpose)

    def product(self, ranks: Sequence[int]) -> Machines:
        """All ``ranks`` of a mesh of which ``self`` is a row; the same object each time."""
        key = ("product", *ranks)
        if key not in self._made:
            world: Any = distributed.group.WORLD
            with issuer.changed:
                number = _products[key] = _products.get(key, 0) + 1
            name, place = f"product {number} {ranks}", ranks.index(distributed.get_rank())
            state = GroupState(name, ranks, place, self.state.backends, self.state.timeout, world.get_group_store())
            self._made[key] = Machines(state, range(len(ranks)))
        return self._made[key]

    def part(self, ranks: Sequence[int]) -> Machines:
        """Some of the ranks, among them this one; the same object each time."""
        places = tuple(self.state.ranks.index(rank) for rank in ranks)
        if places == self.places:
            return self
        if places not in self._made:
            self._made[places] = Machines(self.state, places)
        return self._made[places]

    # ---- devices

    def is_nccl(self, device: torch.device) -> bool:
        """True if tensors on the device go through NCCL, whose collectives run on streams."""
        return self.state.is_nccl(device)

    def can_send(self, device: torch.device) -> bool:
        """True if tensors on the device are sent directly. Otherwise they go through host memory.

        gloo could take tensors of accelerators too, but no event of ours orders its copies.
        """
        return device == CPU or self.is_nccl(device)

    def make_communicators(self, devices: Iterable[torch.device]) -> None:
        """Makes NCCL's communicators for these devices now. Otherwise the first collective on a device would block.

        All ranks call it, in one order, with devices of the same names. It does nothing for other backends.
        """
        new = [each for each in dict.fromkeys(devices) if self.is_nccl(each) and each not in self._devices]
        self._devices += new
        what = [f"the communicator of {device}" for device in new]
        calls = [stage(self, torch.zeros(1, device=device)).all_reduce for device in new]
        for result in self.words.launch("communicators", what, calls, "communicators", epoch=self.epoch):
            result.wait().item()

    def names_of(self, devices: Sequence[torch.device]) -> list[str]:
        """For each device a name such as ``cuda 0``. Ranks that send from devices of one name have one communicator.

        Names follow from the order in which devices come, and indices need not agree on the ranks. With NCCL, ranks
        that send from devices of different names would wait for ever, or sum what does not belong together.
        """
        known = [*dict.fromkeys([*self._devices, *devices])]
        return [f"{each.type} {known.index(each)}" for each in devices]

    # ---- what is sent outside of steps

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[size, *shape]``: the tensors of all machines, which have one shape and dtype. All ranks call it."""
        flat = tensor.detach().contiguous().view(-1)
        staged = stage(self, flat, self.size * flat.numel())  # here, where the current stream has computed it
        kind, calls = "an operator on sharded tensors", [staged.all_gather]
        text = f"{kind}\nall_gather: {flat.numel()} x {flat.dtype} on {flat.device.type}"
        gathered: Tensor = self.words.launch(kind, ["all_gather"], calls, text, epoch=self.begin_call())[0].wait()
        return gathered.view(self.size, *tensor.shape)


_products: dict[Any, int] = {}
"""How many products of the same ranks were made."""


def exists(group: Any) -> bool:
    """True if the group has not been destroyed."""
    try:
        return bool(distributed.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _backends(group: distributed.ProcessGroup) -> dict[str, str]:
    """The backend for each type of device, from torch's configuration, such as ``cpu:gloo,cuda:nccl``."""
    parts = [part.partition(":") for part in distributed.get_backend_config(group).split(",")]
    # gloo and NCCL are also configured for devices that they do not take.
    return {device: name for device, _, name in parts if name != "nccl" or device == "cuda"}


@atexit.register
def _close_at_exit() -> None:
    for state in states:
        state.close()
    issuer.close()
    for state in states:
        state.free()
    if states:
        _given.clear()  # torch ends the threads of a group when nobody holds it
