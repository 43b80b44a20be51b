"""How `prefetch` reads its loader: how far ahead, what its exceptions do, and what is left when a loop stops early."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, prefetch
from echo import Echo, batches, left_behind, waiting

on_accelerators = pytest.mark.devices("sim", "cuda")


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    yield
    assert not left_behind()


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


@pytest.mark.parametrize("how", ["break", "raise", "close", "drop", "never begun"])
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
    elif how == "raise":
        try:
            for _ in iterator:
                raise KeyError
        except KeyError:
            pass
        else:
            pytest.fail("there was no other batch")
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


def test_a_torch_loader_with_processes(slots: list) -> None:
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches(), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=5, num_workers=1)
    model = DataParallel(Echo(), slots)
    for _ in range(2):
        found = [model(x).cpu() for x, _ in prefetch(loader, model)]
        assert torch.equal(torch.cat(found), data.tensors[0] * 2)
    assert len(prefetch(loader, model)) == len(loader)


def test_without_devices_batches_pass_through() -> None:
    model = DataParallel(Echo(), ["cpu"])
    model.device_ids = []
    loader = batches()
    for x, _ in prefetch(loader, model):
        assert torch.equal(model(x), x * 2)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), nn.DataParallel(nn.Linear(1, 1)), None], ids=str)
def test_only_for_the_wrapper(model: object) -> None:
    with pytest.raises(TypeError, match=r"a dataparallel\.DataParallel or a module after.*got (torch\.nn|builtins)"):
        prefetch([], model)


def test_arguments_that_make_no_sense(slots: list) -> None:
    model = DataParallel(Echo(), slots)
    with pytest.raises(ValueError, match="depth=0: at least 1 batch"):
        prefetch([], model, depth=0)
    with pytest.raises(TypeError, match="float"):
        prefetch([], model, depth=1.5)
    with pytest.raises(TypeError, match="iterable; got int"):
        prefetch(3, model)
