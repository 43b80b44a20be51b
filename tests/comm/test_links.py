"""What is known of the links between devices, without a context on any of them."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from dataparallel.comm import links
from dataparallel.comm.links import ALL_TO_ALL, MAYBE_SHARED, links_between, nvlink_joins_all

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

CUDA = [torch.device("cuda", index) for index in range(4)]


class Nvml:
    """pynvml with ``count`` GPUs, of which each pair but those of ``apart`` is joined by NVLink."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int, apart: set = frozenset(), fails_in: str = "") -> None:
        self.count, self.apart = count, apart
        self.users = self.answers = 0
        if fails_in:
            setattr(self, fails_in, self.fail)

    def fail(self, *_: object) -> None:
        raise self.NVMLError("GPU is lost")

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        self.answers += 1
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:
        assert one != other
        assert index == 2
        return 1 if (one, other) in self.apart else 0


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    links.forget()
    yield
    links.forget()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml], None]:
    def install(nvml: Nvml) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
        monkeypatch.setattr(importlib, "import_module", lambda name: nvml)

    return install


def test_gpus_that_nvlink_joins_are_linked_all_to_all(install: Callable) -> None:
    nvml = Nvml(8)
    install(nvml)
    for _ in range(3):
        assert links_between(CUDA) == ALL_TO_ALL
    assert (nvml.answers, nvml.users) == (1, 0)
    assert links_between([torch.device("cpu"), *CUDA[:2]]) == ALL_TO_ALL
    assert nvml.answers == 1


@pytest.mark.parametrize("pair", list(permutations(["GPU-0", "GPU-1", "GPU-3"], 2)))
def test_one_pair_without_nvlink_is_enough_to_doubt(pair: tuple, install: Callable) -> None:
    install(Nvml(4, {pair}))
    assert links_between(CUDA) == MAYBE_SHARED


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetP2PStatus"])
def test_if_nvml_fails_links_are_unknown(function: str) -> None:
    nvml = Nvml(4, fails_in=function)
    assert not nvlink_joins_all(nvml)
    assert nvml.users == 0


def test_without_nvml_links_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert links_between(CUDA) == MAYBE_SHARED


def test_a_device_module_may_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    here = [torch.device("xpu", index) for index in range(2)]
    assert links_between(here) == MAYBE_SHARED
    links.forget()
    module.links_are_all_to_all = True
    assert links_between(here) == ALL_TO_ALL
    assert links_between([*here, *CUDA]) == MAYBE_SHARED, "of two types nothing is known"
    assert links_between([torch.device("cpu")]) == MAYBE_SHARED


@pytest.mark.devices("sim")
def test_simulated_devices_are_linked_all_to_all(root: torch.device) -> None:
    assert links_between([root]) == ALL_TO_ALL
