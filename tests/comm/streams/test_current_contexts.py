"""A device that the caller does not use gets no context, though it is the current one."""

import pytest

from processes import run_script, skip_without_tools

SCRIPT = """
import gc, torch
import dataparallel as dp
from dataparallel import DataParallel
from dataparallel.comm.peers import failed_pairs
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


@pytest.mark.long
@pytest.mark.devices("cpu")  # contexts stay for the process, so it has one of its own: once is enough
def test_training_makes_none() -> None:
    skip_without_tools()
    run_script(SCRIPT)
