"""Copies through the host equal plain copies, and never go from device to device. Their order: test_orders."""

from collections.abc import Callable

import pytest
import tensor_kinds
import torch
from tensor_kinds import with_attribute
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dataparallel.comm import host
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.routes import STAR

CPU = torch.device("cpu")
HOST = ThroughHost()
on_devices = pytest.mark.devices("sim", "cuda")


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **tensor_kinds.FORMS,
    "expanded": lambda values: values[:1].expand(5, values.shape[1]),
    "empty": lambda values: values[:0],
    "complex": lambda values: torch.complex(values, -values),
    "conjugate": lambda values: torch.complex(values, -values).conj(),
}


def numbers() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["pinned", "pageable"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that has pinned memory, and one that has none."""
    if request.param == "pageable":
        monkeypatch.setattr(host, "can_pin", lambda device_type: False)
    return request.param


class Travels(TorchDispatchMode):
    """Notes the devices between which operators copy, and the tensors that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: set[tuple[str, str]] = set()
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.made.append(result)
            if func is torch.ops.aten.copy_.default:
                self.ways.add((str(args[1].device), str(result.device)))
            elif args and isinstance(args[0], Tensor) and func is torch.ops.aten._to_copy.default:
                self.ways.add((str(args[0].device), str(result.device)))
        return result


@on_devices
@pytest.mark.parametrize("form", FORMS)
def test_it_brings_what_a_plain_copy_brings(form: str, pair: tuple, memory: str) -> None:
    tensor = FORMS[form](numbers().to(pair[0]))
    with torch.no_grad():
        ours, theirs = HOST.to_device(tensor, pair[1]), STAR.to_device(tensor, pair[1])
    assert type(ours) is type(theirs)
    assert ours.__dict__ == theirs.__dict__
    assert (ours.device, ours.dtype, ours.layout) == (pair[1], theirs.dtype, theirs.layout)
    assert ours.is_conj() == theirs.is_conj()
    assert not ours.requires_grad
    if form == "sparse":
        ours, theirs = ours.to_dense(), theirs.to_dense()
    assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    assert torch.equal(ours, theirs)


@on_devices
def test_nothing_goes_from_device_to_device(pair: tuple, memory: str) -> None:
    tensor = numbers().to(pair[0])
    with Travels() as seen:
        HOST.to_device(tensor, pair[1])
    assert seen.ways == {(str(pair[0]), "cpu"), ("cpu", str(pair[1]))}
    staged = [made for made in seen.made if made.device == CPU]
    assert staged
    assert all(made.is_pinned() == (memory == "pinned") for made in staged)


def test_what_is_there_stays_unless_the_caller_needs_its_own(root: torch.device) -> None:
    tensor = numbers().to(root)
    assert HOST.to_device(tensor, root) is tensor
    own = HOST.to_device(tensor, root, own=True)
    assert torch.equal(own, tensor)
    assert own.data_ptr() != tensor.data_ptr()


def test_from_and_to_the_host_it_is_a_plain_copy(root: torch.device) -> None:
    elsewhere = torch.device("cpu", 0) if root == CPU else root
    there = HOST.to_device(with_attribute(numbers()), elsewhere)
    assert (there.device.type, there.tag) == (elsewhere.type, "mine")
    assert torch.equal(HOST.to_device(there, CPU), numbers())
