"""A caller who works on streams of his own gets what he would get on the default ones, and no race.

Simulated devices show a missing order whatever the timing; CUDA devices only show wrong numbers, now and then.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, functions
from dataparallel.thread_state import TRANSLATED

pytestmark = pytest.mark.devices("sim", "cuda")


@pytest.fixture
def side_streams(slots: list) -> Iterator[dict[torch.device, torch.Stream]]:
    """On every device a stream of the caller's is current. Afterwards all are done."""
    devices = [torch.device(slot) for slot in dict.fromkeys(slots)]
    here = torch.accelerator.current_device_index()
    before = {device: torch.accelerator.current_stream(device) for device in devices}
    streams = {device: torch.Stream(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(before[device])
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(here)
    yield streams
    for device, stream in before.items():
        torch.accelerator.synchronize(device)
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(here)


def build(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double().to(root)


def numbers(root: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(13, 6, dtype=torch.float64, generator=generator).to(root).requires_grad_()


def gradients(loss: Tensor, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


@pytest.mark.slots(2, 3, 8)
def test_a_step_on_the_callers_streams(slots: list, root: torch.device, side_streams: dict) -> None:
    model, x = build(root), numbers(root)
    expected = gradients(model(x).square().sum(), model, x)
    for _ in range(3):
        found = gradients(DataParallel(model, slots)(x).square().sum(), model, x)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_training_on_the_callers_streams(slots: list, root: torch.device, side_streams: dict) -> None:
    model, twin = build(root), build(root)
    parallel = DataParallel(model, slots)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    for _ in range(5):
        x = numbers(root)
        for each, call, optimizer in ((model, parallel, optimizers[0]), (twin, twin, optimizers[1])):
            each.zero_grad()
            call(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_double_backward_on_the_callers_streams(slots: list, root: torch.device, side_streams: dict) -> None:
    model, x = build(root), numbers(root)

    def penalty(output: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return gradient.square().sum()

    expected = gradients(penalty(model(x)), model, x)
    for ours, theirs in zip(gradients(penalty(DataParallel(model, slots)(x)), model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.not_isolated("replicas on one device and the caller's stream")
def test_a_replica_runs_on_the_callers_stream_of_its_device(
    slots: list, root: torch.device, side_streams: dict
) -> None:
    seen = {}

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen[x.device] = (torch.accelerator.current_stream(x.device), torch.accelerator.current_device_index())
            return x * 1

    DataParallel(Looks(), slots)(torch.ones(len(slots), 2, device=root))
    assert seen == {device: (stream, device.index) for device, stream in side_streams.items()}
    for device, stream in side_streams.items():
        assert torch.accelerator.current_stream(device) == stream


def test_a_worker_is_left_on_the_stream_that_it_was_on(slots: list, side_streams: dict) -> None:
    (row,) = (setting for setting in TRANSLATED if setting.name == "current stream")
    devices = [torch.device(slot) for slot in slots]
    value = row.read(devices)
    elsewhere = torch.Stream(devices[1])
    torch.accelerator.set_stream(elsewhere)
    end = row.hold(value, devices, devices[1])
    assert torch.accelerator.current_stream(devices[1]) == side_streams[devices[1]]
    end()
    assert torch.accelerator.current_stream(devices[1]) == elsewhere


@pytest.mark.devices("sim")
def test_what_the_caller_has_waited_for_the_replicas_know_on_any_stream(slots: list, root: torch.device) -> None:
    """And what a replica has waited for its caller knows."""
    devices = [torch.device(slot) for slot in slots]
    x = torch.ones(len(slots), 2, device=root)
    DataParallel(nn.Identity(), slots)(x)  # its threads know what they know from before
    tables = {}
    for device in devices:
        with (side := torch.Stream(device)):
            tables[device] = torch.full((2,), 3.0, device=device)
        side.synchronize()
    made = {}

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with (fresh := torch.Stream(x.device)):  # nothing orders it but what the host knows
                made[x.device] = tables[x.device] * 2
            fresh.synchronize()
            return x * 1

    DataParallel(Uses(), slots)(x)
    assert {*made} == {*devices}
    for device, tensor in made.items():
        with torch.Stream(device):
            tensor.add_(1)
        torch.accelerator.synchronize(device)
        assert tensor.tolist() == [7, 7]


def test_sparse_gradients_and_gradients_of_gradients(slots: list, root: torch.device, side_streams: dict) -> None:
    """Their sums are on the caller's streams."""
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=True).double().to(root)
    rows = torch.arange(13).remainder(5).to(root)
    wrapped = DataParallel(table, slots)
    (expected,) = torch.autograd.grad(table(rows).square().sum(), [table.weight])
    for times in (1, 2, 3):
        wrapped(rows).square().sum().backward()
        torch.testing.assert_close(table.weight.grad.to_dense(), times * expected.to_dense(), rtol=0, atol=1e-9)
    layer = nn.Linear(3, 2).double().to(root)
    x = torch.randn(13, 3, dtype=torch.float64).to(root)

    def second(call: nn.Module) -> list[Tensor]:
        first = torch.autograd.grad(call(x).pow(3).sum(), [*layer.parameters()], create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in first), [*layer.parameters()]))

    for ours, theirs in zip(second(DataParallel(layer, slots)), second(layer), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.devices("sim")
def test_gradients_that_are_summed_elsewhere_are_kept_until_then(slots: list, root: torch.device) -> None:
    """They belong to the caller's streams, and are read on the default ones of the thread that sums."""
    recorded = []
    grads = [torch.ones(2, device=slot) for slot in slots]
    streams = {torch.device(slot): torch.Stream(torch.device(slot)) for slot in slots}
    for stream in streams.values():
        stream.wait_stream(torch.accelerator.current_stream(stream.device))

    class Recording(Tensor):
        def record_stream(self, stream: torch.Stream) -> None:
            recorded.append((self.device, stream))

    functions.wait_for_streams(streams, [grad.as_subclass(Recording) for grad in grads])
    assert {*recorded} == {(grad.device, torch.accelerator.current_stream(grad.device)) for grad in grads}
