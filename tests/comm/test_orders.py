"""However tensors travel: every copy is ordered as torch orders one between devices, and so are steps of all forms."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clocked import check_clocks
from dataparallel import DataParallel, comm
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.composable import MixedPrecisionPolicy, fully_shard, replicate

pytestmark = [
    pytest.mark.devices("sim", "stand-in"),
    pytest.mark.parametrize("way", ["star", "chain", "host"], indirect=True),
]


OPERATIONS: dict[str, Callable[[Tensor, list[Tensor]], object]] = {
    "copies": lambda source, targets: comm.copy_each(targets[:1], [source]),
    "broadcast": lambda source, targets: comm.broadcast(source, out=targets),
    "scatter": lambda source, targets: comm.scatter(torch.cat([source] * len(targets)), out=targets),
    "gather": lambda source, targets: comm.gather([source], out=targets[0]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_copy_comes_after_what_the_receiving_streams_wait_for(
    operation: str, way: str, slots: list, root: torch.device
) -> None:
    """The source has been written on another stream. The stream on which it leaves has not waited for that."""
    source = torch.zeros(5, device=root)
    targets = [torch.zeros(5, device=device) for device in slots[1:]]
    receiving = {device: torch.Stream(device) for device in slots}
    for device, stream in receiving.items():
        stream.wait_stream(torch.accelerator.current_stream(device))
    writing = torch.Stream(root)
    writing.wait_stream(torch.accelerator.current_stream(root))
    with streams_set({root: writing}):
        source.fill_(3)
    for device in slots[1:]:
        Event(writing).make_wait(receiving[device])
    if operation == "scatter":  # it reads its source before it sends
        Event(writing).make_wait(receiving[root])
    with streams_set(receiving):
        OPERATIONS[operation](source, targets)
    for device, stream in receiving.items():  # and the source may be written after what has been received
        torch.accelerator.current_stream(device).wait_stream(stream)
    assert targets[0].tolist() == [3] * 5
    source.zero_()


@pytest.mark.parametrize("operation", ["copies", "gather", "scatter"])
def test_what_the_sending_stream_is_given_next_comes_after_a_copy(
    operation: str, way: str, slots: list, root: torch.device
) -> None:
    """Who waits for an event on it may write to what has been received."""
    source, targets = torch.ones(5, device=root), [torch.zeros(5, device=device) for device in slots[1:]]
    streams = {device: torch.Stream(device) for device in slots}
    for device, stream in streams.items():
        stream.wait_stream(torch.accelerator.current_stream(device))
    with streams_set(streams):
        OPERATIONS[operation](source, targets)
        sent = Event(streams[root])
    for device in slots[1:]:
        sent.make_wait(torch.accelerator.current_stream(device))
    for target in targets:
        target.add_(1)
    assert targets[0].tolist() == [2] * 5


class Net(nn.Module):
    """Units of a few bytes, and larger ones."""

    def __init__(self) -> None:
        super().__init__()
        widths = [24, 24, 160, 160, 24]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def sharded(net: Net, slots: list, **options: Any) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer, devices=slots, **options)
    return fully_shard(net, devices=slots, **options)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FORMS: dict[str, Callable[[Net, list], nn.Module]] = {
    "DataParallel": lambda net, slots: DataParallel(net, slots, bucket_cap_mb=0.01),
    "replicate": lambda net, slots: replicate(net, devices=slots, bucket_cap_mb=0.01, first_bucket_mb=0.01),
    "fully_shard": sharded,
    "fully_shard, cast": lambda net, slots: sharded(net, slots, mp_policy=HALF),
    "fully_shard, kept": lambda net, slots: sharded(net, slots, reshard_after_forward=False),
}


@pytest.mark.slots(2, 4, long=[3, 8])
@pytest.mark.parametrize("form", FORMS)
def test_steps_of_every_form(form: str, way: str, slots: list, root: torch.device) -> None:
    """The clocks see parameters that are read beside the optimizer, and gradients that are added too early."""
    torch.manual_seed(0)
    model = FORMS[form](Net().to(root), slots)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(2):  # the second one adds to gradients
            model(torch.randn(2 * len(slots), 24, device=root)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        check_clocks()
