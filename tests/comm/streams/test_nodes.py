"""Nodes of the graph are ordered against all streams that make or use their tensors.

Clocks show a missing order whatever the timing; GPUs only show wrong numbers, now and then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.autograd import functions
from dataparallel.comm.streams.current import current_streams, memory_of, streams_set
from nogpu.pytest import settle
from spare_streams import spare_stream

pytestmark = pytest.mark.devices("sim", "cuda")


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("callers", ["default", "side"])
def test_gradients_that_replicas_make_on_streams_of_their_own(
    callers: str, sparse: bool, slots: list, root: torch.device, request: pytest.FixtureRequest
) -> None:
    """They are read on the caller's streams, after they are made and before their memory is used again."""
    if callers == "side":
        request.getfixturevalue("side_streams")

    class Aside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            here, side = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
            side.wait_stream(here)
            x.record_stream(side)
            torch.accelerator.set_stream(side)
            out = torch.nn.functional.embedding(torch.tensor([0, 2, 0], device=x.device), x, sparse=sparse) * 2
            torch.accelerator.set_stream(here)
            here.wait_stream(side)
            out.record_stream(here)
            return out

    x = torch.randn(3 * len(slots), 6, dtype=torch.float64).to(root).requires_grad_()
    for _ in range(2):
        out = DataParallel(Aside(), slots)(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        of_chunk = torch.tensor([16.0, 0, 8], dtype=torch.float64, device=root).repeat(len(slots))[:, None]
        torch.testing.assert_close(gradient.to_dense(), x.detach() * of_chunk, rtol=0, atol=1e-12)


NODES = {
    "broadcast": lambda slots, tensors: functions.Broadcast.apply(slots, *tensors[:2]),
    "reduce": lambda slots, tensors: functions.ReduceAddCoalesced.apply(slots[0], 2, *tensors),
    "scatter": lambda slots, tensors: functions.Scatter.apply(slots, None, 0, tensors[0]),
    "gather": lambda slots, tensors: [functions.Gather.apply(slots[0], 0, *tensors)],
    "gather on the host": lambda slots, tensors: [functions.Gather.apply("cpu", 0, *tensors)],
}


@pytest.mark.parametrize("way", ["star", "chain", "host"], indirect=True)
@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("callers", ["default", "side"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_inputs_and_outputs_of_a_node_that_belong_to_other_streams(
    dtype: torch.dtype,
    callers: str,
    name: str,
    way: str,
    slots: list,
    root: torch.device,
    request: pytest.FixtureRequest,
) -> None:
    """The engine orders them against the one stream that it knows of a node, and the node orders the others.

    Complex gradients are conjugated lazily, so after a copy the receiving stream has work of its own.
    """
    if callers == "side":
        request.getfixturevalue("side_streams")
    others = {device: torch.Stream(device) for device in map(torch.device, slots)}
    here = current_streams(others)

    @contextmanager
    def elsewhere(tensors: list[Tensor]) -> Iterator[None]:
        for device, other in others.items():
            other.wait_stream(here[device])
        for tensor in tensors:
            if tensor.device in others:
                tensor.record_stream(others[tensor.device])
        with streams_set(others):
            yield
        for device, other in others.items():
            here[device].wait_stream(other)

    def gradients_of(place: Callable) -> tuple[Tensor | None, ...]:
        leaves = [torch.ones(6, 4, dtype=dtype, device=slot).requires_grad_() for slot in slots for _ in range(2)]
        with place(leaves):
            tensors = [leaf * 2 for leaf in leaves]
        for tensor in tensors:
            tensor.record_stream(here[tensor.device])
        outputs = NODES[name](slots, tensors)
        with place(outputs):
            loss = sum((output.conj() * weight).sum().real.to(root) for weight, output in enumerate(outputs, start=1))
        loss.record_stream(here[root])
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    expected, found = gradients_of(lambda _: nullcontext()), gradients_of(elsewhere)
    settle()  # before a comparison waits for everything
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


class Around(Tensor):
    """A tensor without memory of its own, around another one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Around":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: object, args: tuple, kwargs: dict) -> object:
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda t: t,
    "sparse": lambda t: torch.sparse_coo_tensor(
        torch.zeros(1, 8, dtype=torch.int64, device=t.device), t, (1,), check_invariants=False
    ),
    "subclass": Around,
    "conjugated": lambda t: t.to(torch.complex64).conj(),
}


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("kind", MEMORY)
def test_memory_that_another_stream_reads_is_not_used_again_before(kind: str, root: torch.device) -> None:
    values = torch.ones(8, device=root)
    tensor = MEMORY[kind](values)
    side = spare_stream(root)
    side.wait_stream(torch.accelerator.current_stream(root))
    memory = memory_of(tensor)
    assert any(part.untyped_storage().nbytes() >= 8 * 4 for part in memory)
    with streams_set({root: side}):
        for part in memory:
            part.record_stream(side)
            part * 2
    del values, tensor, memory, part
    torch.ones(8, device=root)
    settle()
