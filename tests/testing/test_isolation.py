"""Isolated slots share nothing but their device, and compute what one device computes."""

import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel, comm
from dataparallel.comm.settings import are_slots_isolated
from dataparallel.comm.transport import Transport
from dataparallel.testing import isolated_slots
from like_the_cpu import launches_of

SLOTS = 4


@pytest.fixture
def slots(root: torch.device) -> list[torch.device]:
    return [root] * SLOTS


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    with isolated_slots():
        yield


def build(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double().to(root)


def batch(root: torch.device) -> Tensor:
    return torch.randn(13, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)


class Looks(nn.Module):
    """Keeps the tensors that each replica has."""

    def __init__(self, root: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=root))
        self.frozen = nn.Parameter(torch.ones(3, device=root), requires_grad=False)
        self.register_buffer("count", torch.zeros(3, device=root))
        self.seen: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append([self.weight, self.frozen, self.count, x])
        return x * self.weight


def addresses(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


# The switch


def test_it_holds_inside_and_is_taken_back() -> None:
    with comm.settings.held(comm.settings.Settings()):
        with isolated_slots():
            with isolated_slots():
                assert are_slots_isolated()
            assert are_slots_isolated()
        with pytest.raises(KeyError), isolated_slots():
            raise KeyError
        assert not are_slots_isolated()


def test_other_settings_stay_what_they_are() -> None:
    with comm.using(route="chain"), isolated_slots():
        assert comm.settings.current() == comm.settings.Settings(route="chain", isolated=True)
        with comm.using(route="tree"):
            assert comm.settings.current() == comm.settings.Settings(route="tree", isolated=True)


def test_threads_see_it_where_the_context_goes() -> None:
    seen = []

    def look() -> None:
        seen.append(are_slots_isolated())

    for context in (contextvars.Context(), contextvars.copy_context()):
        thread = threading.Thread(target=context.run, args=(look,))
        thread.start()
        thread.join()
    assert seen == [False, True]


# Storage


@pytest.mark.smoke
@pytest.mark.parametrize("recorded", [True, False])
def test_every_slot_has_storage_of_its_own(recorded: bool, slots: list, root: torch.device) -> None:
    net, x = Looks(root), torch.ones(SLOTS * 2, 3, device=root)
    with torch.set_grad_enabled(recorded):
        DataParallel(net, slots, workers=1)(x)
    assert len(net.seen) == SLOTS
    for of_slots in zip(*net.seen, strict=True):
        assert len(addresses(list(of_slots))) == SLOTS
    ours = [net.weight, net.frozen, net.count, x]
    for k, theirs in enumerate(zip(*net.seen, strict=True)):
        assert ours[k].untyped_storage().data_ptr() in addresses(list(theirs))


@pytest.mark.parametrize("recorded", [True, False])
def test_no_slot_sees_what_another_changes_in_place(recorded: bool, slots: list, root: torch.device) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, device=root))
            self.register_buffer("count", torch.zeros(1, device=root))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.add_(1)
            self.count.add_(1)
            x.add_(self.weight.detach() + self.count)
            return x * 1

    x = torch.zeros(SLOTS, 1, device=root)
    with torch.set_grad_enabled(recorded):
        output = DataParallel(Changes(), slots)(x)
    assert output.flatten().tolist() == [2.0] * SLOTS
    assert x.flatten().tolist() == [2.0, 0.0, 0.0, 0.0]  # the first chunk may be a view, as everywhere


def test_a_whole_tensor_goes_to_each_slot(slots: list, root: torch.device) -> None:
    net, mask = Looks(root), torch.ones(3, device=root)
    DataParallel(net, slots, workers=1)(dataparallel.whole(mask))
    assert len(addresses([on_slot[-1] for on_slot in net.seen])) == SLOTS


@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("samples", [SLOTS, SLOTS - 1])
def test_what_is_sent_ahead_goes_to_each_slot_too(samples: int, slots: list, root: torch.device) -> None:
    class Masks(Looks):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(mask)[None] * x

    net = Masks(root)
    model = DataParallel(net, slots, workers=1)
    loader = [(torch.ones(samples, 3), dataparallel.whole(torch.arange(3.0)))]
    for x, mask in dataparallel.prefetch(loader, model):
        assert torch.equal(model(x, mask).cpu(), x * mask)
    assert len(addresses([on_slot[-1] for on_slot in net.seen])) == samples


def test_functions_of_comm_make_real_copies(slots: list, root: torch.device) -> None:
    tensors = [torch.arange(5.0, device=root), torch.eye(2, device=root).to_sparse(), torch.ones(0, device=root)]
    for copies in (
        comm.broadcast_coalesced(tensors[:1], slots),
        [[copy] for copy in comm.broadcast(tensors[0], slots)],
    ):
        assert copies[0][0] is tensors[0]
        assert len(addresses([copy for (copy,) in copies])) == SLOTS
        assert all(torch.equal(copy, tensors[0]) for (copy,) in copies)
    sent = comm.broadcast_coalesced(tensors, slots)
    assert len({id(on_slot[1]) for on_slot in sent}) == SLOTS
    assert all(on_slot[1].to_dense().sum() == 2 for on_slot in sent)
    chunks = comm.scatter(torch.arange(8.0, device=root), slots)
    assert len(addresses(list(chunks))) == SLOTS
    assert torch.equal(comm.gather(chunks), torch.arange(8.0, device=root))


@pytest.mark.parametrize("route", comm.settings.ROUTES)
@pytest.mark.parametrize("transport", ["copy", "host"])
def test_every_route_and_transport_brings_the_data(route: str, transport: str, slots: list, root: torch.device) -> None:
    tensors = [torch.randn(1000, device=root), torch.randn(3, 2, device=root).t()]
    with comm.using(route=route, transport=transport):
        sent = comm.broadcast_coalesced(tensors, slots)
    for on_slot in sent:
        assert all(map(torch.equal, on_slot, tensors))
    assert len(addresses([on_slot[0] for on_slot in sent])) == SLOTS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("route", ["star", "chain", "shards"])
def test_sums_have_the_bits_of_other_sums(route: str, dtype: torch.dtype, slots: list, root: torch.device) -> None:
    inputs = [[(torch.randn(40) * 10**k).to(root, dtype), torch.eye(3, device=root).to_sparse()] for k in range(SLOTS)]
    before = [tensor.clone() for (tensor, _) in inputs]
    with comm.using(route=route):
        found = comm.reduce_add_coalesced(inputs)
        alone = comm.reduce_add([tensor for tensor, _ in inputs])
    with comm.settings.held(comm.settings.Settings()):
        expected = comm.reduce_add_coalesced(inputs)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(alone, expected[0])
    assert torch.equal(found[1].to_dense(), expected[1].to_dense())
    assert all(torch.equal(tensor, old) for (tensor, _), old in zip(inputs, before, strict=True))


@pytest.mark.devices("sim")
def test_copies_are_counted(slots: list, root: torch.device) -> None:
    tensors = [torch.ones(100, device=root), torch.ones(28, device=root)]
    others = SLOTS - 1

    def launches(function: Callable, *arguments: object) -> int:
        return launches_of(function, *arguments).get(root.index, 0)

    assert launches(comm.broadcast_coalesced, tensors, slots) == 1 + others  # flattened once
    assert launches(comm.reduce_add_coalesced, [tensors] * SLOTS) == SLOTS + 2 * others  # flatten; copy and add
    assert launches(comm.scatter, tensors[0], slots) == others
    singly = torch.ones(8, device=root)
    singly.tag = "it travels singly"
    assert launches(comm.reduce_add_coalesced, [[singly]] * SLOTS) == 2 * others
    with comm.using(route="chain"):
        large = torch.ones(1000, device=root)
        # Nothing can overlap on one device, so the buffer stays in one piece.
        assert launches(comm.broadcast_coalesced, [large], slots) == 1 + others
    with comm.settings.held(comm.settings.Settings()):
        assert launches(comm.broadcast_coalesced, tensors, slots) == 0
        assert launches(comm.reduce_add_coalesced, [tensors] * SLOTS) == others
        assert launches(comm.scatter, tensors[0], slots) == 0


@pytest.mark.devices("sim")
@pytest.mark.parametrize("transport", ["cupy", "nccl"])
def test_a_transport_between_cuda_devices_is_refused_on_others(transport: str, slots: list, root: torch.device) -> None:
    with comm.using(transport=transport), pytest.raises(ValueError, match=f"{transport}.*cannot serve"):
        comm.broadcast_coalesced([torch.ones(3, device=root)], slots)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("transport", ["cupy", "nccl"])
def test_a_transport_between_cuda_devices_leaves_cpu_slots_to_plain_copies(transport: str, slots: list) -> None:
    with comm.using(transport=transport):
        sent = comm.broadcast_coalesced([torch.ones(3)], slots)
    assert [tensor.tolist() for (tensor,) in sent] == [[1, 1, 1]] * len(slots)
    assert len({tensor.data_ptr() for (tensor,) in sent}) == len(slots)


# Numbers


def step(net: nn.Module, call: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    inputs = [x, *net.parameters()]
    first = torch.autograd.grad(call(x).square().sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(call(x).sum() + sum(each.square().sum() for each in first), inputs))


def test_a_step_has_the_numbers_of_one_device(slots: list, root: torch.device) -> None:
    net, x = build(root), batch(root)
    expected = step(net, net, x)
    parallel = DataParallel(net, slots)
    for _ in range(3):
        for ours, theirs in zip(step(net, parallel, x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_every_backward_is_isolated_in_whatever_thread(
    slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noting(function: Callable) -> Callable:
        def note(*args: Any, **keywords: Any) -> Any:
            seen.append(are_slots_isolated())
            return function(*args, **keywords)

        return note

    for name in ("broadcast_coalesced", "reduce_add_coalesced", "scatter"):
        monkeypatch.setattr(Transport, name, noting(getattr(Transport, name)))
    net = build(root)
    step(net, DataParallel(net, slots), batch(root))
    assert seen
    assert all(seen)


def test_calls_without_a_graph_too(slots: list, root: torch.device) -> None:
    net, x = build(root), batch(root)
    parallel = DataParallel(net, slots)
    for _ in range(3):
        net[0].weight.data.mul_(1.5)
        with torch.no_grad():
            torch.testing.assert_close(parallel(x), net(x), rtol=0, atol=1e-9)


def test_isolated_and_other_calls_in_turn(slots: list, root: torch.device) -> None:
    """Neither uses copies that the other has kept. They are freed, except inside `frozen`."""
    net, x = Looks(root), torch.ones(SLOTS, 3, device=root)
    parallel = DataParallel(net, slots, workers=1)
    frozen = DataParallel(net, slots, workers=1)

    def parameters(model: nn.Module) -> int:
        net.seen.clear()
        with torch.no_grad():
            model(x)
        return len(addresses([of_slot[0] for of_slot in net.seen]))

    with frozen.frozen():
        for model in (parallel, frozen):
            assert parameters(model) == SLOTS
            copies = [weakref.ref(weight) for weight, *_ in net.seen]
            with comm.settings.held(comm.settings.Settings()):
                assert parameters(model) == 1
                gc.collect()
                assert model is frozen or not any(copy() is not None for copy in copies)
            assert parameters(model) == SLOTS


def test_slots_on_one_device_still_draw_in_order(slots: list, root: torch.device) -> None:
    net = nn.Dropout()
    x, found = torch.ones(64, 3, device=root), []
    for _ in range(3):
        torch.manual_seed(5)
        found.append(DataParallel(net, slots)(x))
    assert all(torch.equal(output, found[0]) for output in found)
