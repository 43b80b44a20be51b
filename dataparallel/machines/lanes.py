"""`Machines`: ranks that send together. `Lane`: collectives and words, which all of them issue in one order.

Backends pair collectives by the order in which each rank issues them. A lane issues its items in the order in which
they were added, which is that of buckets and units: rank 0 sends it after the first step (``gradients.machine_sums``,
``sharded.units.backward``). Lanes have connections of their own, so none waits for another. Only NCCL, and hooks,
which send over a group of the user, need one order over all lanes: the order in which rank 0 launches.

A *word* is a small value of each rank, gathered over gloo. A pair of items that have not followed each other before is
compared by a word, once: after the first step nothing more is sent for that.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.machines.collectives import SLICE, Link, Transfer, launching, stage
from dataparallel.machines.errors import MachinesDiffer, MachinesError, differences
from dataparallel.machines.group import GroupState, Result, in_a_thread, issuer, states

_FRAME, _LENGTH = 1024, 8  # bytes of a word's first message, and of the length at its beginning

_Pauses: TypeAlias = Generator[bool, None, Any]
"""A generator that yields where it has to wait: true if nobody wakes the thread then. The thread runs other lanes."""

_Item: TypeAlias = tuple[list[Result], str | None, Callable[[str], Any]]
"""The results, a text that has to be equal on all ranks, and what sends: a word compares a text of its own."""

_given: dict[int, tuple[Any, Machines]] = {}
"""Users' groups by their ids, with their `Machines`. They are held until they are destroyed, on all ranks alike."""


class End(NamedTuple):
    """The end of a pass. No rank may use a sum before `wait` returns: then all ranks have sent all of theirs."""

    said: Result

    def wait(self) -> tuple[list[bool], Any]:
        """The bit mask, of which an entry is true if it is on any rank; and what rank 0 has said besides."""
        said = self.said.wait()
        for key in {key for _, sent, _ in said for key in sent}:
            if len({sent[key] for _, sent, _ in said if key in sent}) > 1:
                raise self.said.state.end(
                    MachinesDiffer,
                    "the ranks have not sent the same things in one order before the end of this pass, so no gradient "
                    "is used: they have run other forwards or backwards, or other parts of the model. All ranks have "
                    "to run the same calls on the same model",
                )
        return [any(of_ranks) for of_ranks in zip(*(mask for mask, _, _ in said), strict=True)], said[0][2]


class Lane:
    """A sequence of items of the ranks of ``machines``. All of them make their lanes in one order.

    Attributes:
        history: a checksum of the texts of all collectives. Ranks that have added the same have the same.
    """

    def __init__(self, machines: Machines, purpose: str) -> None:
        self.machines, self.state, self.number = machines, machines.state, machines.state.lane_count
        self.state.lane_count += 1
        self.name = f"{purpose} {self.number}"
        self.items: deque[_Item] = deque()
        self.history = 0
        self.steps = self._issue_all()
        self._before = 0  # the hash of the text of the item before
        self._seen: set[tuple[int, int]] = set()  # pairs of items, by hashes of their texts

    # ---- what forms call

    def launch(
        self,
        kind: str,
        what: Sequence[str],
        calls: Sequence[Callable[[Link], Transfer]],
        text: str,
        over: Machines | None = None,
        then: Machines | None = None,
    ) -> list[Result]:
        """Adds one collective on each of several devices. On none of them another launch comes between.

        The thread calls ``calls`` in the order in which items were added. If one raises, that ends the group. ``text``
        says whatever decides sizes and dtypes. ``over``: those that send, if not all of the lane. ``then``: those that
        sum what has come.
        """
        return self._add(kind, what, text, partial(self._launch, calls, over or self.machines, then))

    def call(self, kind: str, what: str, text: str, begin: Callable[[], Any]) -> Result:
        """Adds a communication hook, which may send anything itself. ``begin`` calls it. The result is what it returns.

        That has a ``future`` and ``check()``. The thread waits for the future, calls ``check``, and issues nothing else
        meanwhile. If anything raises on a rank, that ends the group, and no rank calls the next hook.
        """
        return self._add(kind, [what], text, partial(self._run_hook, begin))[0]

    def gather(self, kind: str, text: str, value: Any, what: str = "what the ranks say") -> Result:
        """Adds a word. The result is the list of all ranks' values, or `MachinesDiffer` if the texts differ."""
        return self._add(kind, [what], None, partial(self._gather, f"{kind}\n{text}", value))[0]

    def end(self, kind: str, mask: Sequence[bool], others: Sequence[Lane] = (), extra: Any = None) -> End:
        """Adds the word at the end of a pass: a bit mask, and what the pass has sent."""
        sent = {f"{lane.name} of {lane.machines.ranks}": lane.history for lane in (self, *others)}
        return End(self.gather(f"the end of {kind!r}", f"{len(mask)} gradients", (bytes(mask), sent, extra), "the end"))

    def _add(self, kind: str, what: Sequence[str], text: str | None, issue: Callable[[str], Any]) -> list[Result]:
        self.state.check_process()
        results = [Result(self.state, f"{name} of {kind!r}") for name in what]
        if results:
            with issuer.changed:
                if text is not None:
                    self.history = zlib.crc32(text.encode(), self.history)
                self.items.append((results, text, issue))
                issuer.run(self)
        return results

    # ---- the issuing thread

    def _issue_all(self) -> _Pauses:
        while True:
            while self.items:
                yield from self._issue(*self.items[0])
                self.items.popleft()
            yield False

    def _issue(self, results: Sequence[Result], text: str | None, issue: Callable[[str], Any]) -> _Pauses:
        what = results[0].what
        try:
            self.state.refuse()
            if text is not None:
                pair = self._before, hash(text)
                if pair not in self._seen:
                    yield from self._gather(text, None, what)
                    self._seen.add(pair)
                self._before = pair[1]
            for result, value in zip(results, (yield from issue(what)), strict=True):
                result.set_result(value)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail(results, error)

    def _launch(
        self, calls: Sequence[Callable[[Link], Transfer]], over: Machines, then: Machines | None, what: str
    ) -> _Pauses:
        state, nccl = self.state, None
        gloo = yield from self._connect(what, self.name, over.places)
        if state.has_nccl:
            yield from self._take_turn(what)
            nccl = state.communicators(over.places)
        link = Link(over.rank, over.size, gloo, nccl)
        # Held for all devices of the item, so that other launches on them come before it or after it on each.
        with launching if state.has_nccl else nullcontext():
            issued = [call(link) for call in calls]
        parts = [each for each in issued if each.is_part_of_sum or then is not None]
        # gloo tells only of some collectives when they have ended.
        yield from self._until(what, lambda: all(each.has_arrived() for each in parts), polls=True)
        if then is not None:
            return (yield from self._launch([each.send_on().sum for each in issued], then, None, what))
        for each in parts:
            each.send_sum(link)
        return issued

    def _take_turn(self, what: str) -> _Pauses:
        """Returns when the lane may launch. The caller then does so, without another pause.

        NCCL hangs if ranks launch in different orders. Rank 0 launches what is ready there, and tells the others, one
        small broadcast for each launch, which lane it was. They launch the next item of that lane.
        """
        turns = self.state.turns
        gloo = yield from self._connect(what, "turns", range(self.state.size))
        if self.state.rank == 0:
            gloo.broadcast([torch.tensor([self.number], device=CPU)], distributed.BroadcastOptions())
            return

        def is_of_this_lane() -> bool:
            if not turns:
                told = torch.empty(1, dtype=torch.int64, device=CPU)
                turns.append((told, gloo.broadcast([told], distributed.BroadcastOptions()).get_future()))
                turns[0][1].add_done_callback(issuer.wake)
            told, future = turns[0]
            if not future.done():
                return False
            future.wait()
            return int(told) == self.number

        yield from self._until(what, is_of_this_lane)
        turns.clear()
        issuer.wake()  # another lane may wait for the next turn

    def _run_hook(self, begin: Callable[[], Any], what: str) -> _Pauses:
        """Runs a communication hook, which sends messages over a group of the user."""
        # All ranks come to this hook, so none has failed before it, or in the one before.
        yield from self._gather("a hook", None, what)
        yield from self._take_turn(what)
        called, check, done = begin(), self.state.wait_check(what), threading.Event()
        called.future.add_done_callback(lambda _: done.set())
        while not done.wait(SLICE):
            check()
        called.check()
        return [called]

    def _gather(self, text: str, value: Any, what: str) -> _Pauses:
        """Gathers a word. A second message is sent if one of them is long."""
        gloo = yield from self._connect(what, f"words of {self.name}", self.machines.places)
        pickled = pickle.dumps((text, value))
        data = len(pickled).to_bytes(_LENGTH, "little") + pickled
        rows = yield from self._gather_bytes(what, gloo, data[:_FRAME], _FRAME)
        lengths = [_LENGTH + int.from_bytes(row[:_LENGTH], "little") for row in rows]
        if max(lengths) > _FRAME:
            rests = yield from self._gather_bytes(what, gloo, data[_FRAME:], max(lengths) - _FRAME)
            rows = [row + rest for row, rest in zip(rows, rests, strict=True)]
        said = [pickle.loads(row[_LENGTH:length]) for row, length in zip(rows, lengths, strict=True)]
        texts = [text for text, _ in said]
        if len({*texts}) > 1:
            kind, parts = texts[0].partition("\n")[0], "; ".join(differences(texts, self.machines.ranks))
            raise MachinesDiffer(
                f"the ranks differ in what they do next ({kind!r}), so nothing of it is used: "
                f"{parts}. All ranks have to run the same calls on the same model"
            )
        return [[value for _, value in said]]

    def _gather_bytes(self, what: str, gloo: Any, data: bytes, size: int) -> _Pauses:
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.machines.size)]
        work = gloo.allgather([rows], [own])
        future = work.get_future()  # it is done before the work says that it is completed
        future.add_done_callback(issuer.wake)
        yield from self._until(what, future.done)
        work.wait()  # raises its error
        return [row.numpy().tobytes() for row in rows]

    def _connect(self, what: str, purpose: str, places: Sequence[int]) -> _Pauses:
        connection = self.state.connection(f"{purpose}/{tuple(places)}", places)
        yield from self._until(what, connection.done)
        return connection.result()

    def _until(self, what: str, is_over: Callable[[], bool], polls: bool = False) -> _Pauses:
        check = self.state.wait_check(what)
        while not is_over():
            check()
            yield polls

    def _fail(self, results: Sequence[Result], error: BaseException) -> None:
        """An item cannot be issued, or a collective or a hook has raised here. That ends the group.

        Only a difference outside of steps is an error on all ranks, and nothing else.
        """
        what = results[0].what
        if isinstance(error, MachinesDiffer) and self is not self.machines.words:
            error = self.state.end(MachinesDiffer, str(error))
        elif is_of_network(error):
            error = self.state.lose(error, what)
        raised = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        for each in results:  # before the others hear of it, so that this rank raises its own error
            each.set_exception(raised)
        if not isinstance(error, MachinesError):
            self.state.fail(error, what)


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
        self._made: dict[Any, Machines] = {self.places: self}
        self.words = Lane(self, "words")  # what is sent outside of steps

    @staticmethod
    def of(group: distributed.ProcessGroup) -> Machines:
        """The machines of the group: the same object each time, until the group is destroyed."""
        with issuer.changed:
            gone = [_given.pop(key) for key, (known, _) in [*_given.items()] if not exists(known)]
            if gone:  # the ends of connections wait for what is under way
                in_a_thread(gone.clear)
            if id(group) not in _given:
                ranks, backends = distributed.get_process_group_ranks(group), _backends(group)
                timeout = _torch.group_timeout(group, torch.device(next(iter(backends)))).total_seconds()
                rank, store = distributed.get_rank(group), group.get_group_store()
                state = GroupState("given", ranks, rank, backends, timeout, store)
                _given[id(group)] = group, Machines(state, range(len(ranks)))
            return _given[id(group)][1]

    def describe(self) -> str:
        """The number of this machine, for messages."""
        return f"machine {self.rank} of {self.size}"

    # ---- machines with other ranks: all ranks ask for them in one order

    @staticmethod
    def product(ranks: Sequence[int], row: GroupState) -> Machines:
        """All ``ranks`` of a mesh of which ``row`` is a row; the same object each time."""
        world: Any = distributed.group.WORLD
        made, key = Machines.of(world)._made, ("product", *ranks)
        if key not in made:
            place, settings = ranks.index(distributed.get_rank()), (row.backends, row.timeout, world.get_group_store())
            made[key] = Machines(GroupState(f"product {ranks}", ranks, place, *settings), range(len(ranks)))
        return made[key]

    def part(self, ranks: Sequence[int]) -> Machines:
        """Some of the ranks, among them this one; the same object each time."""
        places = tuple(self.state.ranks.index(rank) for rank in ranks)
        if places not in self._made:
            self._made[places] = Machines(self.state, places)
        return self._made[places]

    # ---- devices

    def is_nccl(self, device: torch.device) -> bool:
        """True if tensors on the device go through NCCL, whose collectives run on streams; others through host memory.

        gloo could take tensors of accelerators too, but no event of ours orders its copies.
        """
        return self.state.backends.get(device.type) == "nccl"

    def make_communicators(self, devices: Iterable[torch.device]) -> None:
        """Makes NCCL's communicators for these devices now. Otherwise the first collective on a device would block.

        All ranks call it, in one order, with devices of the same names. It does nothing for other backends.
        """
        new = [each for each in dict.fromkeys(devices) if self.is_nccl(each) and each not in self._devices]
        self._devices += new
        what = [f"the communicator of {device}" for device in new]
        calls = [stage(self, torch.zeros(1, device=device)).sum for device in new]
        for result in self.words.launch("communicators", what, calls, "communicators"):
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
        gathered: Tensor = self.words.launch(kind, ["all_gather"], calls, text)[0].wait()
        return gathered.view(self.size, *tensor.shape)


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
    for state in states:  # waits raise
        state.lost = state.lost or MachinesError("the interpreter ends: nothing can be sent any more")
    issuer.close()
    for state in states:
        state.free()
    if states:
        _given.clear()  # torch ends the threads of a group when nobody holds it
