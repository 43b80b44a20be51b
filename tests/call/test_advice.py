"""Each performance warning comes where a line of the user's code makes calls slow, and not where all is well."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dataparallel import DataParallel, PerformanceWarning, prefetch, whole
from dataparallel.call import advice
from each_form import Form

pytestmark = [pytest.mark.devices("sim", "stand-in"), pytest.mark.usefixtures("performance_warnings")]

LARGE = 12 * 2**20 // 4  # elements of a batch that is large, of 12 samples


class Mean(nn.Module):
    """Of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.weight * x.to(self.weight.dtype).flatten(1).mean(1)


@pytest.fixture
def net(root: torch.device) -> nn.Module:
    return Mean().to(root)


@pytest.fixture
def well(performance_warnings_are_errors: None) -> None:
    """All is well: no warning comes."""


def small(samples: int, **options: Any) -> Tensor:
    return torch.ones(samples, 4, **options)


def large(**options: Any) -> Tensor:
    return torch.ones(12, LARGE // 12, **options)


def coming(text: str) -> Any:
    return pytest.warns(PerformanceWarning, match=text)


class TestChunksOfOneSample:
    @pytest.mark.apart
    @pytest.mark.parametrize("samples", [2, 3])
    def test_a_first_training_batch_with_no_more_samples_than_slots(
        self, form: Form, net: nn.Module, slots: list, samples: int
    ) -> None:
        model = form(net, slots)
        with coming(rf"batch of {samples} samples on 3 slots .* batch_size=3 \*") as caught:
            model(small(samples))
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error", PerformanceWarning)
            form(Mean().to(slots[0]), slots)(small(samples))  # once for a process

    @pytest.mark.usefixtures("well")
    def test_others(self, net: nn.Module, slots: list) -> None:
        """Of more samples, or large ones; of the user's sizes; without a graph; where nothing is split."""
        for batch in (
            small(4),
            torch.ones(3, 2**18),
            torch.ones(3, 2**10, dtype=torch.long),
            whole(small(3)),
            small(0),
        ):
            DataParallel(net, slots)(batch)
        DataParallel(net, slots, chunk_sizes=[1, 1, 1])(small(3))
        with torch.no_grad():
            DataParallel(net, slots)(small(1))
        model = DataParallel(net, slots)
        for samples in (9, 1):  # what is left of the data
            model(small(samples))
        DataParallel(net.eval(), slots)(small(1))


class TestInputsOnAnAccelerator:
    @pytest.mark.apart
    def test_large_ones(self, form: Form, net: nn.Module, slots: list, root: torch.device) -> None:
        with coming(rf"inputs of 12 MiB are on {root}, .* Leave out .to\('{root}'\)") as caught:
            form(net, slots)(large(device=root))
        assert caught[0].filename == __file__

    @pytest.mark.usefixtures("well")
    def test_others(self, net: nn.Module, slots: list, root: torch.device) -> None:
        """Small ones, those that were computed there, and those that every slot needs."""
        DataParallel(net, slots)(small(12, device=root))
        DataParallel(net, slots)(large(device=root, requires_grad=True) * 2)
        DataParallel(net, slots)(small(12), whole(large(device=root)))


class TestMemoryThatIsNotPinned:
    @pytest.mark.apart
    def test_large_inputs(self, form: Form, net: nn.Module, slots: list) -> None:
        with coming(r"inputs of 12 MiB .* not pinned, .* pin_memory=True") as caught:
            form(net, slots)(large())
        assert caught[0].filename == __file__

    @pytest.mark.usefixtures("well")
    def test_a_loader_that_pins(self, net: nn.Module, slots: list) -> None:
        model = DataParallel(net, slots)
        loader = DataLoader(large(), batch_size=12, pin_memory=True)
        for batches in (loader, prefetch(loader, model)):
            for batch in batches:
                assert batch.is_pinned()
                model(batch)


class TestFirstDeviceThatHoldsMost:
    @pytest.fixture(autouse=True)
    def total(self, slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
        """Devices with 40 MiB more than they hold, in a process that has held no more before."""
        monkeypatch.setattr(advice, "CALLS", 3)
        for device in {*slots}:
            torch.accelerator.reset_peak_memory_stats(device)
        held = torch.accelerator.max_memory_allocated(slots[0])
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (0, held + 40 * 2**20))

    def run(self, model: nn.Module) -> None:
        for _ in range(advice.CALLS):
            model(small(12)).sum().backward()

    @pytest.mark.apart
    def test_it_is_nearly_full(self, form: Form, net: nn.Module, slots: list, root: torch.device) -> None:
        model = form(net, slots)
        state = torch.empty(36 * 2**20, dtype=torch.uint8, device=root)
        with coming(f"{root} has held .* in forward, .*output_device='{slots[-1]}'.*fully_shard") as caught:
            self.run(model)
        assert caught[0].filename == __file__
        del state

    @pytest.mark.usefixtures("well")
    def test_there_is_memory_left_or_all_devices_are_nearly_full(self, form: Form, net: nn.Module, slots: list) -> None:
        model = form(net, slots)
        for mebibytes, devices in ((8, slots[:1]), (36, {*slots})):
            state = [torch.empty(mebibytes * 2**20, dtype=torch.uint8, device=device) for device in devices]
            self.run(model)
            del state


class TestAllOfThem:
    """Every model here would give three warnings: it gets a large batch with one sample for each slot."""

    @pytest.fixture
    def batches(self, root: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        monkeypatch.setattr(advice, "LARGE_BATCH", 1)
        return [small(3, device=root), small(3)]

    def run(self, model: Any, batches: list[Tensor]) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in batches:
                model(batch)
        return sum(each.category is PerformanceWarning for each in caught)

    @pytest.mark.apart
    def test_they_come(self, net: nn.Module, slots: list, batches: list[Tensor]) -> None:
        assert self.run(DataParallel(net, slots), batches) == 3

    def test_slots_on_one_device_and_stages_of_the_user_have_none(
        self, net: nn.Module, root: torch.device, slots: list, batches: list[Tensor]
    ) -> None:
        class Splits(DataParallel):
            def scatter(self, *args: Any) -> Any:
                return super().scatter(*args)

        for model in (DataParallel(net, [root] * 3), Splits(net, slots)):
            assert self.run(model, batches) == 0

    def test_one_setting_switches_them_off(
        self, net: nn.Module, slots: list, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DATAPARALLEL_PERFORMANCE_WARNINGS", "0")
        model = DataParallel(net, slots)
        assert self.run(model, batches) == 0
        assert not model.options.checks.are_open  # private: a closed one costs nothing


@pytest.mark.devices("cpu")
def test_slots_on_the_cpu_are_to_try_things_out(form: Form, slots: list, well: None) -> None:
    model = form(Mean(), slots)
    for _ in range(advice.CALLS):
        model(small(3))
        model(large())
