"""Parameters, buffers and modules of every kind keep their kind in replicas, which have their own weights.

Tests of replicas of plain modules are in test_replicate.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize

from dataparallel import DataParallel, replicate
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.parity import Perturbation, assert_same_step, perturb

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]
PERTURBATION = Perturbation(seed=4, scale=0.5)


def perturbed_replicas(source: nn.Module, slots: list) -> list[nn.Module]:
    replicas = replicate(source, slots)
    perturb(replicas, PERTURBATION)
    return replicas


@pytest.fixture(params=["recorded", "detached"])
def copied(request: pytest.FixtureRequest, slots: list) -> Callable[[nn.Module], list[nn.Module]]:
    """A function from a module to its replicas."""
    return lambda module: replicate(module, slots, detach=request.param == "detached")


class Marked(Tensor):
    """A tensor subclass whose results keep the class."""


def holding(**tensors: Tensor | None) -> nn.Module:
    """A module with these parameters; a name that starts with "buffer" is that of a buffer."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if name.startswith("buffer"):
            module.register_buffer(name, tensor)
        else:
            module.register_parameter(name, tensor)
    return module


def test_tensor_subclasses_are_kept(copied: Callable, root: torch.device) -> None:
    source = holding(
        trained=nn.Parameter(torch.ones(2).as_subclass(Marked)),
        constant=nn.Parameter(torch.ones(2).as_subclass(Marked), requires_grad=False),
        buffer=torch.ones(2).as_subclass(Marked),
    ).to(root)
    for replica in copied(source):
        assert [type(tensor) for tensor in (replica.trained, replica.constant, replica.buffer)] == [Marked] * 3
        assert isinstance(replica.trained, nn.Parameter)
        assert isinstance(replica.constant, nn.Parameter)
        assert replica.trained is not source.trained


def test_python_attributes_are_kept(copied: Callable, root: torch.device) -> None:
    source = holding(trained=nn.Parameter(torch.ones(2)), constant=nn.Parameter(torch.ones(2), requires_grad=False))
    source.to(root).buffer = nn.Buffer(torch.ones(2, device=root))  # torch's own `to` forgets the class of buffers
    for name in ("trained", "constant", "buffer"):
        getattr(source, name).note = name
    for replica in copied(source):
        for name in ("trained", "constant", "buffer"):
            assert getattr(replica, name).note == name
        assert isinstance(replica.buffer, nn.Buffer)
        replica.trained.note = "changed"
    assert source.trained.note == "trained"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float16, torch.bfloat16])
def test_every_dtype_is_kept(dtype: torch.dtype, slots: list, root: torch.device) -> None:
    source = holding(weight=nn.Parameter(torch.ones(2, dtype=dtype)), buffer=torch.ones(3, dtype=dtype)).to(root)
    for slot, replica in enumerate(perturbed_replicas(source, slots)):
        assert torch.equal(replica.weight.to(root), source.weight + PERTURBATION.noise(source.weight, slot, 0))
        assert (replica.weight.dtype, replica.buffer.dtype) == (dtype, dtype)
        (replica.weight * 2).sum().abs().backward()
    assert source.weight.grad.dtype == dtype


def test_strides_are_kept(copied: Callable, root: torch.device) -> None:
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    source = holding(weight=nn.Parameter(image), buffer=image.clone(), buffer_t=image.mT.clone()).to(root)
    for replica in copied(source):
        assert replica.weight.stride() == source.weight.stride()
        assert [b.stride() for b in replica.buffers()] == [b.stride() for b in source.buffers()]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_buffers_are_copied(copied: Callable, root: torch.device) -> None:
    source = holding(buffer=torch.eye(3).to_sparse(), buffer_csr=torch.eye(3).to_sparse_csr()).to(root)
    for slot, replica in enumerate(copied(source)):
        assert replica.buffer.is_sparse
        assert replica.buffer_csr.layout == torch.sparse_csr
        assert torch.equal(replica.buffer.to_dense().to(root), source.buffer.to_dense())
        shared = replica.buffer._values().data_ptr() == source.buffer._values().data_ptr()
        assert shared == (slot == 0)


def test_buffers_that_need_gradients(slots: list, root: torch.device) -> None:
    source = holding(buffer=torch.ones(2, requires_grad=True, device=root))
    for slot, replica in enumerate(perturbed_replicas(source, slots)):
        assert torch.equal(replica.buffer.to(root), source.buffer + PERTURBATION.noise(source.buffer, slot, 0))
        (replica.buffer * 10**slot).sum().backward(retain_graph=True)
    assert source.buffer.grad.tolist() == [111, 111]
    first, second, _ = replicate(source, slots)
    with torch.no_grad():
        second.buffer.fill_(5)
        assert source.buffer.tolist() == [1, 1], "in-place changes on other slots are dropped"
        first.buffer.fill_(7)
    assert source.buffer.tolist() == [7, 7], "and on slot 0 they stay"


def test_buffers_that_are_not_saved_stay_so(copied: Callable, root: torch.device) -> None:
    source = nn.Sequential(nn.BatchNorm1d(2))
    source[0].register_buffer("cache", torch.ones(2), persistent=False)
    for replica in copied(source.to(root)):
        assert torch.equal(replica[0].cache.to(root), source[0].cache)
        assert list(replica.state_dict()) == list(source.state_dict())


def test_nothing_stays_nothing(copied: Callable, root: torch.device) -> None:
    source = holding(weight=None, buffer=None)
    source.register_module("child", None)
    for replica in copied(source.to(root)):
        assert (replica.weight, replica.buffer, replica.child) == (None, None, None)
        assert list(replica._parameters) == ["weight"]
        assert list(replica.parameters()) == []


class Slotted(nn.Linear):
    __slots__ = ("gain", "unset")

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Demanding(nn.Linear):
    """Neither the constructor nor `__new__` works without arguments."""

    def __new__(cls, width: int, *, gain: float) -> "Demanding":
        assert width > 0
        return super().__new__(cls)

    def __init__(self, width: int, *, gain: float) -> None:
        super().__init__(width, width)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Watched(nn.Linear):
    """Its ``__setattr__`` must not be called: a copy is no assignment."""

    ready = False

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.ready = True

    def __setattr__(self, name: str, value: Any) -> None:
        assert not self.ready, name
        super().__setattr__(name, value)


class Ruled(nn.Linear):
    """Has a rule of its own for its replicas."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.cache: dict = {}

    def _replicate_for_data_parallel(self) -> "Ruled":
        replica = super()._replicate_for_data_parallel()
        replica.cache = {"own": True}
        return replica

    def forward(self, x: Tensor) -> Tensor:
        assert self.cache or not getattr(self, "_is_replica", False)
        return super().forward(x)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return nn.Sequential(layer, parametrizations.orthogonal(nn.Linear(4, 4)))


def traced_graph() -> nn.Module:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


def with_a_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: 2 * output)
    return module


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4))
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net[1].register_forward_hook(lambda module, args, output: output[0] * 3)
    net[2].register_forward_hook(lambda module, args, kwargs, output: output @ module.weight, with_kwargs=True)
    return net


def deep_script() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "class with slots": Slotted,
    "class with arguments": lambda: Demanding(4, gain=2.0),
    "class with __setattr__": Watched,
    "class with a rule of its own": Ruled,
    "parametrizations": parametrized,
    "graph module": traced_graph,
    "graph module as a child": lambda: nn.Sequential(nn.Linear(4, 4), traced_graph()),
    "graph module with a hook": lambda: with_a_hook(traced_graph()),
    "hooks": hooked,
    "script in script in Python": deep_script,
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_classes_of_every_kind_compute_with_their_own_weights(build: Callable, slots: list) -> None:
    assert_same_step(seeded(build), numbers(4)(7, 0), slots, perturbation=PERTURBATION)


def test_a_rule_of_its_own_is_asked_for_every_replica(slots: list, root: torch.device) -> None:
    replicas = replicate(nn.Sequential(Ruled()).to(root), slots)
    assert [replica[0].cache for replica in replicas] == [{"own": True}] * 3
    assert len({id(replica[0].cache) for replica in replicas}) == 3


def test_script_modules_keep_their_mode_and_have_weights_of_their_own(slots: list, root: torch.device) -> None:
    # Moved before: torch's scripted children would keep showing buffers of the old device.
    source = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).to(root)).eval()
    x = torch.randn(6, 4, device=root)
    for slot, replica in enumerate(perturbed_replicas(source, slots)):
        expected = copy.deepcopy(source)
        with torch.no_grad():
            for index, weight in enumerate(expected.parameters()):
                weight += PERTURBATION.noise(weight, slot, index)
        torch.testing.assert_close(replica(x.to(slots[slot])).to(root), expected(x))
    source.train()
    assert all(replica.training for replica in replicate(source, slots))
    DataParallel(source, slots)(x)
    assert source[2].num_batches_tracked.item() == 1, "buffers of slot 0 are the source's"


@pytest.fixture
def nested(root: torch.device) -> nn.Module:
    """A wrapper as a child, which stays on its slots wherever the outer replicas are: so all share a device."""
    return nn.Sequential(nn.Linear(4, 4), DataParallel(nn.Linear(4, 3), [root] * 2), nn.Tanh()).to(root)


def test_a_wrapper_as_a_child_replicates_the_replica(nested: nn.Module, root: torch.device) -> None:
    x = torch.randn(4, 4, device=root)
    for replica in perturbed_replicas(nested, [root] * 3):
        twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Tanh()).to(root)
        with torch.no_grad():
            for ours, theirs in zip(twin.parameters(), replica.parameters(), strict=True):
                ours.copy_(theirs)
        assert not torch.equal(twin[1].weight, nested[1].module.weight)
        torch.testing.assert_close(replica(x), twin(x))


def test_gradients_cross_both_wrappers(nested: nn.Module, root: torch.device) -> None:
    plain = nn.Sequential(nested[0], nested[1].module, nested[2])
    x = torch.randn(7, 4, device=root)
    expected = torch.autograd.grad(plain(x).pow(2).sum(), list(plain.parameters()))
    DataParallel(nested, [root] * 3)(x).pow(2).sum().backward()
    for parameter, gradient in zip(nested.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
