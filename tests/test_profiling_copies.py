"""A trace hears of every copy between devices: those that the devices have seen, with the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from clocked import timeline
from dataparallel import DataParallel, comm, profiling
from dataparallel.comm.settings import ROUTES
from dataparallel.composable import CPUOffloadPolicy, fully_shard, replicate
from dataparallel.profiling import bytes_of, note_copied_bytes, note_copy
from dataparallel.tracing.recorder import Recorder, start, stop

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

simulated = pytest.mark.devices("sim", "stand-in")
Bytes = Counter[tuple[str, str]]


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    start(recorder)
    try:
        yield recorder
    finally:
        stop(recorder)


def told(recorder: Recorder) -> Bytes:
    found: Bytes = Counter()
    for copy in recorder.copies:
        found[str(copy.source), str(copy.target)] += copy.number_of_bytes
    return found


def seen_by_devices(task: Callable[[], object]) -> tuple[Bytes, Recorder]:
    """What the devices have copied from place to place while the task ran, and what was told of it."""
    with timeline() as recorded, recording() as recorder:
        task()
        torch.accelerator.synchronize()
    names = {-1: "cpu", **{at: str(torch.device(at)) for at in range(torch.accelerator.device_count())}}
    found: Bytes = Counter()
    for launch in recorded.recording.launches:
        if launch.copy is not None:
            found[names[launch.copy[0]], names[launch.copy[1]]] += launch.bytes_written
    return found, recorder


@simulated
@pytest.mark.slots(2, 3, 5)
@pytest.mark.parametrize("route", ROUTES)
def test_each_route_tells_what_it_copies(route: str, slots: list, root: torch.device) -> None:
    tensors = [torch.randn(5, 40, device=root), torch.randn(2000, device=root)]
    grads = [[torch.randn(500, 3, device=slot), torch.randn(7, device=slot)] for slot in slots]

    def task() -> None:
        with comm.using(route=route):
            comm.broadcast_coalesced(tensors, slots)
            for destination in {slots[0], slots[-1]}:
                comm.reduce_add_coalesced(grads, destination)

    task()  # checks peers
    seen, recorder = seen_by_devices(task)
    assert told(recorder) == seen
    broadcast = "chain" if route == "shards" else route
    assert {copy.route for copy in recorder.copies} <= {route, broadcast, "star", "direct"}
    assert len(slots) == 2 or route in {copy.route for copy in recorder.copies} or route in ("star", "tree")


@simulated
@pytest.mark.parametrize("transport", ["copy", "host"])
def test_so_do_transports(transport: str, slots: list, root: torch.device) -> None:
    x, chunks = torch.randn(9, 4, device=root), [torch.randn(3, 4, device=slot) for slot in slots]

    def task() -> None:
        with comm.using(transport=transport):
            comm.broadcast(x, slots)
            comm.scatter(x, slots)
            comm.gather(chunks, destination=root)
            comm.gather(chunks, destination="cpu")
            comm.reduce_add(chunks, root)

    task()
    seen, recorder = seen_by_devices(task)
    assert told(recorder) == seen
    if transport == "host":
        assert all("cpu" in pair for pair in told(recorder))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.norm = nn.BatchNorm1d(20)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(x)


def wrapper(net: Net, slots: list) -> nn.Module:
    return DataParallel(net, slots)


def replicated(net: Net, slots: list) -> nn.Module:
    return replicate(net, devices=slots)


def sharded(net: Net, slots: list) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer, devices=slots)
    return fully_shard(net, devices=slots)


def offloaded(net: Net, slots: list) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer, devices=slots, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return fully_shard(net, devices=slots, offload_policy=CPUOffloadPolicy(pin_memory=False))


@simulated
@pytest.mark.slots(2, 3)
@pytest.mark.parametrize("form", [wrapper, replicated, sharded, offloaded])
def test_all_copies_of_a_training_step_are_told(form: Callable[..., nn.Module], slots: list) -> None:
    """The batch comes from the host. Its pinned copy stays there, so devices see the whole way."""
    net = Net() if form is offloaded else Net().to(slots[0])
    model, x = form(net, slots), torch.randn(12, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).square().mean().backward()

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    seen, recorder = seen_by_devices(step)
    assert told(recorder) == seen


def test_nothing_travels_within_a_device(root: torch.device) -> None:
    with recording() as recorder:
        note_copy("direct", torch.ones(3, device=root), root)
        note_copied_bytes("direct", 12, root, root)
    assert recorder.copies == []


def test_without_a_trace_nobody_is_told(root: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything asked of the tensor."""
    assert profiling.recorder is None
    note_copy("direct", object(), root)  # type: ignore[arg-type]


def test_sparse_tensors_bring_indices_and_values() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (5,))
    assert bytes_of(sparse) == 2 * 8 + 2 * 4
    assert bytes_of(torch.ones(3, 2, dtype=torch.float16)) == 12
    assert bytes_of(torch.ones(3, 1).expand(3, 4)) == 48
