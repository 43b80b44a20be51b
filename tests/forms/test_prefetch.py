"""`prefetch` gives the loader's own batches, in order, and the wrapper finds them on its slots.

Streams: ``comm/streams/test_ahead``.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel, prefetch
from dataparallel.autograd.functions import comm
from dataparallel.comm.streams import ahead
from dataparallel.comm.transport import Transport
from echo import Echo, batches, left_behind, waiting

on_accelerators = pytest.mark.devices("sim", "cuda")


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that calls have to scatter themselves.

    Both ways into a scatter are watched. One is private: nothing but time would show on which way a chunk came.
    """
    found: list[Tensor] = []
    real, send = Transport.scatter, ahead.send

    def noted(tensors: list, slots: list, dim: int) -> ahead.SentBatch:
        found.extend(tensor for tensor, _ in tensors)
        return send(tensors, slots, dim)

    monkeypatch.setattr(ahead, "send", noted)

    def scatter(self: Transport, tensor: Tensor, *args: Any) -> list[Tensor]:
        found.append(tensor)
        return real(self, tensor, *args)

    monkeypatch.setattr(Transport, "scatter", scatter)
    return found


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    yield
    assert not left_behind()


@on_accelerators
@pytest.mark.slots(1, 3, 8)
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_call_copies_nothing(slots: list, pinned: bool, scattered: list) -> None:
    model = DataParallel(Echo(), slots)
    loader = [tuple(t.pin_memory() if pinned else t for t in batch) for batch in batches()]
    for x, _ in prefetch(loader, model):
        assert torch.equal(model(x).cpu(), x * 2)
    assert not scattered


class Losses(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.device == y.device
        return x.sum() * y.sum()


@dataclass
class Sample:
    x: Tensor
    y: Tensor


def test_a_whole_batch_is_an_argument(slots: list, scattered: list) -> None:
    model = DataParallel(Losses(), slots)
    pairs = batches()
    expected = [model(*pair).cpu() for pair in pairs]
    scattered.clear()
    forms = {
        "tuple": [model(*batch) for batch in prefetch(pairs, model)],
        "dict": [model(**batch) for batch in prefetch([OrderedDict(x=x, y=y) for x, y in pairs], model)],
        "dataclass": [model(batch.x, batch.y) for batch in prefetch([Sample(x, y) for x, y in pairs], model)],
        "nested": [model(*batch["a"][0]) for batch in prefetch([{"a": [pair], "b": 3} for pair in pairs], model)],
    }
    for form, found in forms.items():
        assert [output.tolist() for output in found] == [output.tolist() for output in expected], form
    assert torch.device(slots[0]).type == "cpu" or not scattered


@hypothesis.given(
    sizes=st.lists(st.integers(0, 9), max_size=5),
    slot_count=st.integers(1, 4),
    dim=st.sampled_from([0, 1, -1]),
    depth=st.integers(1, 6),
    pinned=st.booleans(),
    layout=st.sampled_from(["dense", "every second", "expanded", "transposed", "conjugated"]),
)
def test_any_batch_arrives_as_it_would_without(
    make_slots, sizes: list[int], slot_count: int, dim: int, depth: int, pinned: bool, layout: str
) -> None:
    def batch(size: int) -> Tensor:
        shape = [3, 5]
        shape[dim] = size
        x = torch.randn(shape[0], shape[1] * 2, dtype=torch.complex64)
        x = x.pin_memory() if pinned and torch.accelerator.is_available() else x
        return {
            "dense": lambda: x[:, : shape[1]].clone(),
            "every second": lambda: x[:, ::2],
            "expanded": lambda: x[:, :1].expand(shape),
            "transposed": lambda: x[:, : shape[1]].t().contiguous().t(),
            "conjugated": lambda: x[:, : shape[1]].conj(),
        }[layout]()

    slots = make_slots(slot_count)
    model, without = (DataParallel(Echo(), slots, dim=dim, serial=True) for _ in range(2))
    loader = [batch(size) for size in sizes]
    for index, x in enumerate(prefetch(loader, model, depth=depth)):
        assert x is loader[index]
        assert torch.equal(model(x), without(x.clone()))
        ours, theirs = model.module.seen, without.module.seen
        assert [chunk.device for chunk in ours] == [chunk.device for chunk in theirs]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        ours.clear(), theirs.clear()


def test_chunk_sizes_are_honoured_and_may_change(slots: list, scattered: list) -> None:
    model = DataParallel(Echo(), slots, chunk_sizes=[1, 4, 2])
    for index, (x, _) in enumerate(prefetch(batches(), model)):
        if index == 2:
            model.options.chunk_sizes = [3, 3, 1]
        model.module.seen.clear()
        assert torch.equal(model(x).cpu(), x * 2)
        sizes = sorted(len(chunk) for chunk in model.module.seen)
        assert sizes == sorted(model.options.chunk_sizes)
    # Those read before the change are cut anew: the one of the turn, and the next.
    assert len(scattered) == (4 if torch.device(slots[0]).type == "cpu" else 2)


def test_tensors_for_every_slot(slots: list, scattered: list) -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, table: Tensor, factor: Tensor) -> Tensor:
            table += 1  # slots on one device share it, as without
            return (x + 0 * table) * factor

    model = DataParallel(Adds(), slots, serial=True)
    loader = [(x, dataparallel.whole(torch.ones(6).double()), torch.tensor(2.0)) for x, _ in batches(samples=2)]
    for batch in prefetch(loader, model):
        assert torch.equal(model(*batch).cpu(), batch[0] * 2)
    assert torch.device(slots[0]).type == "cpu" or not scattered


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])  # in inference mode torch counts no writes
def test_a_tensor_that_was_changed_in_place_arrives_changed(mode: Any, slots: list) -> None:
    model = DataParallel(Echo(), slots)
    with mode():
        for x in prefetch((torch.zeros(7, 3) for _ in range(2)), model):
            x.add_(1)
            assert torch.equal(model(x).cpu(), x * 2)
            x[0].zero_()
            assert torch.equal(model(x).cpu(), x * 2)


def test_a_second_call_sees_nothing_of_what_the_first_wrote(slots: list) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    model = DataParallel(Writes(), slots)
    for x, _ in prefetch(repeat(batches()[0], 3), model):
        before = x.clone()
        outputs = [model(x).cpu() for _ in range(3)]
        # Chunks of CPU slots are views of the batch, in which the module writes as it does without a wrapper.
        written = [1, 2, 3] if torch.device(slots[0]).type == "cpu" else [1, 1, 1]
        for output, more in zip(outputs, written, strict=True):
            torch.testing.assert_close(output, before + more)


@on_accelerators
def test_threads_may_call_with_one_batch(slots: list, root: torch.device) -> None:
    """What one has sent another may take."""
    wrapped = DataParallel(nn.Identity().to(root), slots)
    batch = [torch.full((7, 3), float(k)) for k in range(40)]
    errors: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(10):
                assert [each.unique().tolist() for each in wrapped(batch)] == [[k] for k in range(40)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_what_was_read_in_inference_mode_serves_training(slots: list, root: torch.device) -> None:
    model = DataParallel(nn.Linear(6, 2).double().to(root), slots)
    iterator = iter(prefetch(batches(), model))
    with torch.inference_mode():
        next(iterator)
        x, _ = next(iterator)
        with torch.no_grad():
            model(x)
    total = torch.zeros(6, dtype=torch.float64)
    for x, _ in iterator:
        model(x).sum().backward()
        total += x.sum(0)
    assert total.any()
    torch.testing.assert_close(model.module.weight.grad.cpu(), total.expand(2, 6))


@on_accelerators
def test_another_wrapper_is_not_confused(slots: list) -> None:
    model = DataParallel(Echo(), slots)
    others = [DataParallel(Echo(), few) for few in (slots[::-1], slots[:2], slots[:1])]
    for x, _ in prefetch(batches(), model):
        for other in others:
            other.module.seen.clear()
            assert torch.equal(other(x).cpu(), x * 2)
            found = [(chunk.device.index, len(chunk)) for chunk in other.module.seen]
            sizes = comm.near_equal_sizes(7, len(other.device_ids))
            assert sorted(found) == sorted(zip(other.device_ids, sizes, strict=True))
        assert torch.equal(model(x).cpu(), x * 2)


def failing(good: list) -> Iterator:
    yield from good
    raise OSError("the disk is gone")


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_an_exception_comes_where_its_batch_would_have(slots: list, depth: int) -> None:
    good, found = batches(), []
    iterator = iter(prefetch(failing(good), DataParallel(Echo(), slots), depth=depth))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        found.extend(iterator)
    assert len(found) == len(good)
    assert "failing" in [entry.name for entry in caught.traceback]
    assert next(iterator, "over") == "over"


@on_accelerators
@pytest.mark.parametrize("depth", [1, 3])
def test_depth_is_how_many_batches_are_read_ahead(slots: list, depth: int) -> None:
    read = []

    def loader() -> Iterator[Tensor]:
        for k in range(9):
            read.append(k)
            yield torch.ones(4)

    for k, _ in enumerate(prefetch(loader(), DataParallel(Echo(), slots), depth=depth)):
        assert len(read) == min(9, k + 1 + depth)


@pytest.mark.parametrize("how", ["break", "close", "drop", "never begun"])
def test_a_loop_that_stops_early_keeps_nothing(slots: list, how: str) -> None:
    read = []

    def loader() -> Iterator[Tensor]:
        for _ in range(9):
            x = torch.ones(7, 6)
            read.append(weakref.ref(x))
            yield x
            del x

    left = loader()
    model = DataParallel(Echo(), slots)
    iterator = iter(prefetch(left, model))
    if how != "never begun":
        model(next(iterator))
        model.module.seen.clear()
    if how == "break":
        for _ in iterator:
            break
    elif how == "close":
        iterator.close()
    _ = None
    del iterator
    assert waiting() == 0
    # The loader's own generator still has the batch that it gave last.
    assert all(alive() is None for alive in read[:-1])
    count = len(read)
    assert len([*left]) == 9 - count  # and goes on, as without


def test_its_length_is_the_loaders(slots: list) -> None:
    model = DataParallel(Echo(), slots)
    assert len(prefetch(batches(5), model)) == 5
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(prefetch(iter([]), model))
    assert list(prefetch([], model)) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], nn.Linear(1, 1)), r"a dataparallel\.DataParallel or a module after.*got torch\.nn"),
        ((3, DataParallel(Echo(), ["cpu"] * 2)), "iterable; got int"),
    ],
)
def test_arguments_that_make_no_sense(arguments: tuple, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        prefetch(*arguments)
