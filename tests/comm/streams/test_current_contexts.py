"""A device that the caller does not use gets no context, though it is the current one."""

from collections.abc import Iterator

import pytest

from processes import Ahead, attempt, skip_without_tools

# Contexts stay for the process, so each test has one of its own: once is enough.
pytestmark = pytest.mark.devices("cpu")

BEGIN = """
import gc, torch
import dataparallel as dp
from dataparallel import DataParallel
from dataparallel.composable import replicate
from nogpu import simulate

FIRST, *used = simulate(3)
net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).to(used[0])
batch = torch.ones(6, 3)
slots = [1, 2]


def check():
    gc.collect()
    assert torch.accelerator.current_device_index() == FIRST.index
    assert [torch.sim.has_context(index) for index in range(3)] == [False, True, True]
"""


@pytest.fixture(scope="module")
def available() -> None:
    skip_without_tools()


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    attempt()
    with Ahead(request, tmp_path_factory.mktemp("ahead")) as ahead:
        yield ahead


@pytest.mark.ahead(
    BEGIN
    + """
from dataparallel.comm.peers import failed_pairs

torch.sim.copies_cannot_fail = False
assert failed_pairs(used) == []
check()
model = DataParallel(net, slots)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in (batch, batch.to(used[0]), batch.pin_memory(), *dp.prefetch([batch] * 4, model)):
    loss = model(x).square().sum()
    check()
    loss.backward()
    check()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model(batch)
check()
model = replicate(net, devices=slots)
for _ in range(3):
    model(batch.to(used[0])).square().sum().backward()
    check()
"""
)
def test_training(available: None, printed: str) -> None:
    assert printed == ""


@pytest.mark.ahead(
    BEGIN
    + """
from dataparallel.comm.streams.current import Event, streams_set

one, side = torch.accelerator.current_stream(used[0]), torch.Stream(used[0])
torch.ones(1, device=used[1])
with streams_set({used[0]: side, used[1]: torch.Stream(used[1])}):
    pass
event = Event(side)
event.make_wait(one)
event.make_wait(torch.accelerator.current_stream(used[1]))
event.synchronize()
del event
check()

# The same by torch alone makes a context, each time on a device that had none.
simulate(6)
for index, by_torch in enumerate([
    lambda: (torch.accelerator.set_stream(side), torch.accelerator.set_device_index(3)),
    lambda: side.record_event(),
    lambda: one.wait_stream(side),
], start=3):
    with torch.sim.device(used[0]):
        pass
    torch._C._accelerator_maybeExchangeDevice(index)
    assert torch.accelerator.current_device_index() == index
    assert not torch.sim.has_context(index)
    by_torch()
    assert torch.sim.has_context(index)
"""
)
def test_streams_and_events(available: None, printed: str) -> None:
    """Also shows that torch's own streams and events do make contexts."""
    assert printed == ""
