"""`Machines`: ranks that send together. `Lane`: collectives and words, which all of them issue in one order.

Backends pair collectives by the order in which each rank issues them. A lane issues its items in the order in which
they were added, which is that of buckets and units: rank 0 sends it after the first step (``gradients.machine_sums``,
``sharded.units.over_machines``). Lanes have connections of their own, so none waits for another. Only NCCL, and hooks,
which send over a group of the user, need one order over all lanes: see `machines.group.Turns`.

A *word* is a small value of each rank, gathered over gloo. A pair of items that have not followed each other before is
compared by a word, once: after the first step nothing more is sent for that.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.futures import Future

from dataparallel import _torch
from dataparallel.comm import nccl
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child
from dataparallel.machines.collectives import (
    SLICE,
    Link,
    Staged,
    Transfer,
    all_gather,
    all_reduce,
    reduce_scatter,
    send_sums,
    stage,
)
from dataparallel.machines.descriptions import differences, of_ranks
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed
from dataparallel.machines.group import GroupState, Item, Queue, Result, issuer, states
from dataparallel.threads.pool import Outcome

GRACE = 2.0
"""Seconds that a communication hook has to end here after another rank has failed."""

_FRAME, _LENGTH = 1024, 8  # bytes of a word's first message, and of the length at its beginning

_Pauses = Iterator[None]
"""A generator that yields where it has to wait. The thread then runs other lanes, and resumes it later."""

_given: dict[int, tuple[Any, Machines]] = {}
"""Users' groups by their ids, with their `Machines`. They are held until they are destroyed, on all ranks alike."""
_products: dict[tuple[int, ...], int] = {}
"""How many products of the same ranks were made."""
_lock = threading.Lock()


def masks_of(end: Result) -> tuple[list[bool], list[Any]]:
    """Waits for `Lane.end`. An entry of the mask is true if it is on any rank. Returns what each rank has said besides.

    No rank may use a sum before this returns: then all ranks have sent all of theirs.
    """
    said = end.wait()
    for key in {key for _, sent, _ in said for key in sent}:
        if len({sent[key] for _, sent, _ in said if key in sent}) > 1:
            error = MachinesDiffer(
                "the ranks have not sent the same things in one order before the end of this pass, so no gradient is "
                "used: they have run other forwards or backwards, or other parts of the model. All ranks have to run "
                "the same calls on the same model"
            )
            end.lane.state.leave(end.epoch, error)
            raise error
    return [any(of_ranks) for of_ranks in zip(*(mask for mask, _, _ in said), strict=True)], [e for _, _, e in said]


class Lane(Queue):
    """A sequence of items of the ranks of ``machines``. All of them make their lanes in one order."""

    def __init__(self, machines: Machines, purpose: str) -> None:
        self.machines, self.number = machines, machines.state.lane_count
        super().__init__(machines.state, f"{purpose} {self.number}", machines.places)
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
        """
        return self._add(kind, what, epoch, text=text, calls=calls, over=(over or self.machines).places, after=after)

    def add_sums(
        self, kind: str, what: Sequence[str], staged: Sequence[Staged | Result], device: torch.device, **options: Any
    ) -> list[Result]:
        """Adds sums over ``over``, of what is staged or of what earlier results have received. See `launch`.

        With gloo they are added in rank order, so equal inputs give equal bits in every run, in buckets of any size:
        gloo's own sum begins at a rank that depends on the position in the tensor.
        """
        over = options.get("over") or self.machines
        is_one = over.size <= 2 or over.is_nccl(device)
        issue = all_reduce if is_one else reduce_scatter
        calls = [lambda link, each=each: issue(_staged(each), link) for each in staged]
        first = self.launch(kind, what, calls, **options)
        if is_one:
            return first
        sums = [lambda link, each=each: send_sums(each.transfer(), link) for each in first]
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
        return self._add(kind, [what], epoch, text=text, calls=[begin, check], is_hook=True)[0]

    def gather(self, kind: str, text: str, value: Any, *, epoch: int, what: str = "what the ranks say") -> Result:
        """Adds a word. The result is the list of all ranks' values, or `MachinesDiffer` if the texts differ."""
        return self._add(kind, [what], epoch, text=f"{kind}\n{text}", value=value)[0]

    def end(
        self, kind: str, mask: Sequence[bool], *, epoch: int, others: Sequence[Lane] = (), extra: Any = None
    ) -> Result:
        """Adds the word at the end of a pass: a bit mask, and what the pass has sent. See `masks_of`."""
        sent = {f"{lane.name} of {lane.machines.ranks}": lane.history for lane in (self, *others)}
        text, said = f"{len(mask)} gradients", (bytes(mask), sent, extra)
        return self.gather(f"the end of {kind!r}", text, said, epoch=epoch, what="the end")

    def _add(self, kind: str, what: Sequence[str], epoch: int, **options: Any) -> list[Result]:
        self.state.check_process()
        with issuer.changed:
            results = [Result(self, f"{name} of {kind!r}", epoch, self._count) for name in what]
            error = self.state.why_not(epoch)
            if error is None and results:
                self._count += 1
                item = Item(results, **options)
                if item.calls and item.text is not None:
                    self.history = zlib.crc32(item.text.encode(), self.history)
                self.items.append(item)
                issuer.run(self, self.advance)
        if error is not None:
            for result in results:
                result.fail(error)
        return results

    # ---- the issuing thread

    def advance(self) -> None:
        """Issues items until one of them has to wait, or none is left."""
        with issuer.changed:
            if self._steps is None:
                self._steps = self._issue_all(self.items)
            steps = self._steps
        for _ in steps:  # to the next pause
            return
        with issuer.changed:
            if self._steps is steps:
                self._steps = None

    def _issue_all(self, items: deque[Item]) -> _Pauses:
        while items and items is self.items:
            item = items[0]
            result = item.results[0]
            try:
                yield from self._issue(item)
            except GeneratorExit:
                raise
            except BaseException as error:
                self._fail(item, error)
                del error
            with issuer.changed:
                if items is self.items and items and items[0] is item:
                    items.popleft()
                    self._issued += 1
            del item, result  # while the generator waits it holds neither

    def _issue(self, item: Item) -> _Pauses:
        result = item.results[0]
        if item.text is not None and (item.calls or item.is_hook):
            pair = self._before, hash(item.text)
            if pair not in self._seen:
                yield from self._gather(result, f"what comes next\n{item.text}", None)
                self._seen.add(pair)
            self._before = pair[1]
        if not item.calls:
            result.succeed((yield from self._gather(result, item.text or "", item.value)))
            return
        yield from self._until(result, lambda: all(each.has_arrived() for each in item.after))
        if item.is_hook:
            # All ranks have come to this hook, so none has failed before it, or in the one before.
            yield from self._gather(result, "a hook", None)
            yield from self._take_turn(result)
            self._run_hook(item, *item.calls)
            result.succeed(None)
            return
        state, over = self.state, item.over
        gloo = yield from self.connect(result, over)
        if state.has_nccl:
            yield from self._take_turn(result)
        communicators = state.communicators(over) if state.has_nccl else None
        link = Link(over.index(state.rank), len(over), gloo, communicators, state)
        # Held for all devices of the item, so that other launches on them come before it or after it on each.
        with nccl.launching if state.has_nccl else nullcontext():
            for each, call in zip(item.results, item.calls, strict=True):
                each.succeed(call(link))

    def _take_turn(self, result: Result) -> _Pauses:
        """Returns when the lane may launch. The caller then does so, without another pause."""
        turns = self.state.turns
        if self.state.size == 1:
            return
        gloo = yield from self.connect(result, "turns")
        if self.state.rank == 0:
            gloo.broadcast([torch.tensor([self.number])], distributed.BroadcastOptions())
        else:
            yield from self._until(result, lambda: turns.is_of(self.number, gloo))

    def _run_hook(self, item: Item, begin: Callable[[], Any], check_result: Callable[[], object]) -> None:
        """Runs a communication hook, which sends messages over a group of the user.

        If the hook fails on one rank, it may wait on others for messages that never come. If it still waits `GRACE`
        seconds after its rank knows of that, its messages would be paired with later ones: the group is lost.
        """
        (result,), done = item.results, threading.Event()
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

    def _gather(self, result: Result, text: str, value: Any) -> Any:
        """Gathers a word. A second message is sent if one of them is long."""
        gloo = yield from self.connect(result, "words")
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
        kinds = [text.removeprefix("what comes next\n").partition("\n")[0] for text in texts]
        names = self.machines.names
        if len({*kinds}) > 1:
            by_kind = {kind: [rank for rank, other in enumerate(kinds) if other == kind] for kind in kinds}
            parts = [f"{kind!r} begins on {names(ranks)}" for kind, ranks in by_kind.items()]
        else:
            parts = differences(texts, self.machines.ranks)
        return (
            f"the ranks differ in what they do next ({kinds[0]!r}), so nothing of it is used: {'; '.join(parts)}. All "
            "ranks have to run the same calls on the same model"
        )

    def connect(self, result: Result, key: tuple[int, ...] | str) -> Any:
        """Connects ranks by gloo, once in an epoch, in a thread of its own: that blocks until all of them have come.

        ``key``: places of ranks in the group, "words" for those of the lane, or "turns" for all.
        """
        connections = self.state.turns.connections if key == "turns" else self.connections
        if key not in connections:
            outcome = Outcome()

            def connect() -> None:
                outcome.fill(partial(self.state.connect, self, key, result.epoch))
                issuer.wake()

            threading.Thread(target=connect, daemon=True).start()
            yield from self._until(result, lambda: (outcome.value or outcome.error) is not None)
            if outcome.error is not None:
                raise outcome.error
            connections[key] = outcome.value
        return connections[key]

    def _until(self, result: Result, is_over: Callable[[], bool]) -> _Pauses:
        check = self.state.wait_check(result)
        while not is_over():
            check()
            yield

    def _fail(self, item: Item, error: BaseException) -> None:
        """An item cannot be issued, or a collective or a hook has raised here: the epoch is over."""
        result = item.results[0]
        if isinstance(error, MachinesError):
            self._issued += isinstance(error, MachinesDiffer)  # what tells the others was sent
            self.state.leave(result.epoch, error)
        elif is_of_network(error):
            error = self.state.error_of(result, error)
        else:
            if not isinstance(error, Exception):  # would end the thread that waits
                other = RuntimeError(f"{type(error).__name__}: {error}")
                other.__cause__, error = error, other
            for each in item.results:
                each.fail(error)
            self.state.leave(result.epoch, error, result.what)
        for each in item.results:
            each.fail(error)


def _staged(each: Staged | Result) -> Staged:
    return each.transfer().received() if isinstance(each, Result) else each


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
        self._names: dict[torch.device, str] = {}  # of the devices that have a communicator of NCCL
        self._made: dict[Any, Any] = {}
        self.words, self._tensors = self.lane("words"), self.lane("tensors")  # outside of steps

    @staticmethod
    def of(group: distributed.ProcessGroup) -> Machines:
        """The machines of the group: the same object each time, until the group is destroyed."""
        with _lock:
            for key, (known, _) in [*_given.items()]:
                if not _exists(known):
                    del _given[key]
            if id(group) not in _given:
                rank = distributed.get_rank(group)
                if rank < 0:
                    raise ValueError(
                        "this process is no rank of the process group: give a group to each of its ranks only"
                    )
                ranks = distributed.get_process_group_ranks(group)
                backends = _backends(group)
                timeout = _torch.group_timeout(group, torch.device(next(iter(backends)))).total_seconds()
                state = GroupState("given", ranks, rank, backends, timeout, group.get_group_store())
                _given[id(group)] = group, Machines(state, range(len(ranks)))
            return _given[id(group)][1]

    @property
    def epoch(self) -> int:
        """A step has that in which it begins."""
        return self.state.epoch

    def names(self, ranks: Iterable[int]) -> str:
        """Ranks of these machines in words, by their global numbers."""
        return of_ranks(self.ranks[rank] for rank in ranks)

    def describe(self) -> str:
        """The number of this machine, for messages."""
        return f"machine {self.rank} of {self.size}"

    # ---- lanes, and machines with other ranks: all ranks ask for them in one order

    def lane(self, purpose: str) -> Lane:
        """Makes a lane."""
        return Lane(self, purpose)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def product(self, other: Machines) -> Machines:
        """All ranks of a mesh of which ``self`` is a row and ``other`` a column; the same object each time."""

        def make() -> Machines:
            rows = other.all_gather_object(self.ranks)
            ranks = sorted({rank for row in rows for rank in row})
            world: Any = distributed.group.WORLD
            place, store = ranks.index(distributed.get_rank()), world.get_group_store()
            with _lock:
                number = _products[tuple(ranks)] = _products.get(tuple(ranks), 0) + 1
            mine = self.state
            state = GroupState(f"product {number} {ranks}", ranks, place, mine.backends, mine.timeout, store)
            return Machines(state, range(len(ranks)))

        made: Machines = self._once(("product", *other.ranks), make)
        return made

    def part(self, ranks: Sequence[int]) -> Machines:
        """Some of the ranks, among them this one; the same object each time."""
        places = tuple(self.state.ranks.index(rank) for rank in ranks)
        made: Machines = self if places == self.places else self._once(places, lambda: Machines(self.state, places))
        return made

    # ---- devices

    def can_send(self, device: torch.device) -> bool:
        """True if tensors on the device are sent directly. Otherwise they go through host memory.

        gloo could take tensors of accelerators too, but no event of ours orders its copies.
        """
        return device == CPU or self.is_nccl(device)

    def is_nccl(self, device: torch.device) -> bool:
        """True if tensors on the device go through NCCL, whose collectives run on streams."""
        return self.state.is_nccl(device)

    def make_communicators(self, devices: Iterable[torch.device]) -> None:
        """Makes NCCL's communicators for these devices now. Otherwise the first collective on a device would block.

        All ranks call it, in one order, with as many devices. It does nothing for other backends.
        """
        new = [each for each in dict.fromkeys(devices) if self._is_new(each)]
        if new:
            staged = [stage(self, torch.zeros(1, device=device)) for device in new]
            what = [f"the communicator of {device}" for device in new]
            calls = [partial(all_reduce, each) for each in staged]
            text = f"communicators for {len(new)} devices"
            for result in self.words.launch("communicators", what, calls, text, epoch=self.epoch):
                result.wait().item()
            self.note_communicators(new)

    def names_of(self, devices: Iterable[torch.device]) -> list[str]:
        """For each device a name such as ``cuda 0``. Ranks that send from devices of one name have one communicator.

        Names follow from the order in which devices come, and indices need not agree on the ranks. With NCCL, ranks
        that send from devices of different names would wait for each other for ever.
        """
        names = {**self._names}
        for device in devices:
            if device not in names:
                names[device] = f"{device.type} {sum(known.type == device.type for known in names)}"
        return [names[device] for device in devices]

    def note_communicators(self, devices: Sequence[torch.device]) -> None:
        """Notes the communicators that NCCL has for these devices, whose names all ranks have compared."""
        named = zip(devices, self.names_of(devices), strict=True)
        self._names |= {device: name for device, name in named if self._is_new(device)}

    def _is_new(self, device: torch.device) -> bool:
        return self.is_nccl(device) and device not in self._names

    # ---- what is sent outside of steps

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gathers a small object that can be pickled from each rank, in rank order. The calling thread waits."""
        found: list[Any] = self.words.gather("a word of each rank", "", value, epoch=self.epoch).wait()
        return found

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[size, *shape]``: the tensors of all machines, which have one shape and dtype. All ranks call it."""
        flat = tensor.detach().contiguous().view(-1)
        staged = stage(self, flat, self.size * flat.numel())  # here, where the current stream has computed it
        text = f"all_gather: {flat.numel()} x {flat.dtype} on {self.names_of([flat.device])[0]}"
        kind, calls = "an operator on sharded tensors", [partial(all_gather, staged)]
        (result,) = self._tensors.launch(kind, ["all_gather"], calls, f"{kind}\n{text}", epoch=self.epoch)
        gathered: Tensor = result.wait()
        self.note_communicators([flat.device])
        return gathered.view(self.size, *tensor.shape)


def _exists(group: Any) -> bool:
    try:
        return bool(distributed.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _backends(group: distributed.ProcessGroup) -> dict[str, str]:
    """The backend for each type of device, from torch's configuration, such as ``cpu:gloo,cuda:nccl``."""
    found = {}
    for part in distributed.get_backend_config(group).split(","):
        device, _, name = part.partition(":")
        # gloo and NCCL are also configured for devices that they do not take.
        if name != "nccl" or device == "cuda":
            found[device] = name
    return found


@atexit.register
def _close_at_exit() -> None:
    issuer.close()
    own = [state for state in states if state.is_of_this_process]
    for state in own:
        state.close()
    if own:
        _given.clear()  # torch ends the threads of a group when nobody holds it


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
