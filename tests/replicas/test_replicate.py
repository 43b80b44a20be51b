"""A replica is a copy of the source as it is now, and assignments in its forward do not reach the source.

Tests of kinds of tensors and modules are in test_replicate_kinds, of attributes of instances in
test_replicate_references. On slots that share a device a replica that uses the source's weights by mistake computes the
right numbers, so the weights of each slot are perturbed first.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, replicate
from dataparallel.testing.cases import Case
from dataparallel.testing.models import CASES
from dataparallel.testing.parity import Perturbation, perturb

PERTURBATION = Perturbation(seed=2, scale=0.5)


def perturbed_replicas(source: nn.Module, slots: list) -> list[nn.Module]:
    replicas = replicate(source, slots)
    perturb(replicas, PERTURBATION)
    return replicas


def names_and_sharing(named: Any) -> list[tuple[str, int]]:
    """The names in order, each with the position at which the same tensor was first listed."""
    pairs = list(named)
    ids = [id(tensor) for _, tensor in pairs]
    return [(name, ids.index(id(tensor))) for name, tensor in pairs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_replica_lists_its_own_tensors(case: Case, slots: list, root: torch.device) -> None:
    source = case.build().to(root)
    replicas = perturbed_replicas(source, slots)
    for slot, replica in enumerate(replicas):
        for listing in ("named_parameters", "named_buffers", "named_modules"):
            ours = getattr(replica, listing)(remove_duplicate=False)
            theirs = getattr(source, listing)(remove_duplicate=False)
            assert names_and_sharing(ours) == names_and_sharing(theirs), listing
        assert len(list(replica.parameters())) == len(list(source.parameters()))
        state, expected = replica.state_dict(), source.state_dict()
        assert list(state) == list(expected)
        for index, (ours, theirs) in enumerate(zip(replica.parameters(), source.parameters(), strict=True)):
            assert ours is not theirs
            assert ours.device == torch.device(slots[slot])
            assert torch.equal(ours.to(root), theirs + PERTURBATION.noise(theirs, slot, index))
        for name, parameter in replica.named_parameters():
            assert torch.equal(state[name], parameter)
            assert torch.equal(dict(replica.named_parameters())[name], parameter)
        for ours, theirs in zip(replica.buffers(), source.buffers(), strict=True):
            assert torch.equal(ours.to(root), theirs)
            assert slot == 0 or ours.data_ptr() != theirs.data_ptr()


def tied_and_shared(root: torch.device) -> nn.Sequential:
    layer = nn.Linear(3, 3)
    tree = nn.Sequential(nn.Linear(3, 3), layer, nn.Sequential(layer, nn.BatchNorm1d(3))).to(root)
    tree[0].weight = layer.weight  # torch keeps ties of parameters when it moves a tree, but not those of buffers
    tree.register_buffer("mean", tree[2][1].running_mean)
    return tree


def test_ties_and_shared_modules_stay(slots: list, root: torch.device) -> None:
    source = tied_and_shared(root)
    for replica in perturbed_replicas(source, slots):
        assert replica[1] is replica[2][0]
        assert replica[1] is not source[1]
        assert replica[0].weight is replica[1].weight
        assert replica.mean is replica[2][1].running_mean
        assert replica._is_replica


class Counter(nn.Module):
    """Changes itself in every way that a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.child = nn.Linear(1, 1)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("kept", torch.zeros(1))
        self.tag = "source"

    def forward(self, x: Tensor) -> Tensor:
        self.tag = "replica"
        self.new = x
        with torch.no_grad():
            self.count.add_(x.sum())
        self.kept = self.kept + 1
        self.child = nn.Identity()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_parameter("late", nn.Parameter(torch.zeros(1)))
        self.register_buffer("late_buffer", x, persistent=False)
        self.register_buffer("kept", x, persistent=False)
        self.add_module("late_child", nn.Identity())
        self.train(not self.training)
        del self.tag
        return x


def test_what_a_forward_assigns_is_dropped(slots: list, root: torch.device) -> None:
    source = Counter().to(root)
    attributes = {name: value for name, value in vars(source).items() if not isinstance(value, (dict, set))}
    registries = {name: dict(vars(source)[name]) for name in ("_parameters", "_buffers", "_modules")}
    names = list(source.state_dict())
    DataParallel(source, slots)(torch.ones(3, 1, device=root))
    for name, value in attributes.items():
        assert vars(source)[name] is value, name
    assert not hasattr(source, "new")
    for name, registry in registries.items():
        assert vars(source)[name].keys() == registry.keys()
        assert all(vars(source)[name][key] is registry[key] for key in registry), name
    assert list(source.state_dict()) == names, "what is persistent stays so"
    assert source.kept.item() == 0


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("trainable", [True, False])
def test_parameters_changed_in_place_on_slot_0_stay(
    recorded: bool, trainable: bool, slots: list, root: torch.device
) -> None:
    source = nn.Linear(1, 1).to(root).requires_grad_(trainable)
    before = source.weight._version
    with torch.set_grad_enabled(recorded):
        replica = replicate(source, slots)[0]
    with torch.no_grad():
        replica.weight.fill_(7)
    assert source.weight.item() == 7
    assert source.weight._version > before, "torch sees the change when a graph needs the old value"


def test_hooks_registered_in_forward_do_not_reach_the_source(slots: list, root: torch.device) -> None:
    class Hooking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.register_forward_hook(lambda *_: None)
            self.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True)
            self.register_forward_pre_hook(lambda *_: None)
            self.register_forward_pre_hook(lambda *_, **__: None, with_kwargs=True)
            self.register_full_backward_hook(lambda *_: None)
            self.register_full_backward_pre_hook(lambda *_: None)
            return super().forward(x)

    source = nn.Sequential(Hooking(2, 2)).to(root)
    DataParallel(source, slots)(torch.ones(3, 2, device=root))
    assert [name for name, table in vars(source[0]).items() if "_hooks" in name and table] == []


@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_copies_without_autograd(how: str, slots: list, root: torch.device) -> None:
    source = tied_and_shared(root)
    with torch.set_grad_enabled(how == "detach"):
        replicas = replicate(source, slots, detach=how == "detach")
    for replica in replicas:
        for ours, theirs in zip(replica.parameters(), source.parameters(), strict=True):
            assert type(ours) is nn.Parameter
            assert ours is not theirs
            assert ours.grad_fn is None
            # Without detach a forward may turn recording on again.
            assert ours.requires_grad == (how == "no_grad")
        assert replica[0].weight is replica[1].weight
    assert all(parameter.requires_grad for parameter in source.parameters())


@pytest.mark.parametrize("order", [1, -1], ids=["source first", "source last"])
def test_copies_without_autograd_are_objects_of_each_slot(order: int, slots: list, root: torch.device) -> None:
    """Those of slots on one device share memory. What one replica does to the object, others do not see."""
    source = tied_and_shared(root)
    with torch.no_grad():
        replicas = replicate(source, [*slots[::order], *slots])
    ids = {id(parameter) for module in (source, *replicas) for parameter in module.parameters()}
    assert len(ids) == (1 + len(replicas)) * len([*source.parameters()])


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "requires_grad_": (lambda net: net.weight.requires_grad_(False), "not a leaf. Set it on the source module"),
    "requires_grad": (lambda net: setattr(net.weight, "requires_grad", False), "not a leaf. Set it on the source"),
    "module.requires_grad_": (lambda net: net.requires_grad_(False), "not a leaf. Set it on the source module"),
    "thaw": (lambda net: net.bias.requires_grad_(), "not a leaf. Set it on the source module"),
    "optimizer": (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), "can't optimize a non-leaf Tensor"),
    "deepcopy": (lambda net: copy.deepcopy(net.weight), "cannot deepcopy a parameter of a replica.*not a leaf"),
    "deepcopy of the module": (copy.deepcopy, "cannot deepcopy a parameter of a replica.*not a leaf"),
}


@pytest.mark.parametrize(("misuse", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_meant_for_leaves_is_refused(misuse: Callable, sentence: str, slots: list, root: torch.device) -> None:
    source = nn.Linear(2, 2).to(root)
    source.bias.requires_grad_(False)
    for replica in replicate(source, slots):
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            misuse(replica)
        assert (replica.weight.requires_grad, replica.bias.requires_grad) == (True, False)
        replica.weight.requires_grad_(True)
        replica.bias.requires_grad = False


@pytest.mark.parametrize("detach", [False, True])
def test_replica_parameters_are_parameters(detach: bool, slots: list, root: torch.device) -> None:
    source = nn.Linear(2, 2).to(root)
    source.bias.requires_grad_(False)
    for replica in replicate(source, slots, detach):
        assert all(isinstance(parameter, nn.Parameter) for parameter in replica.parameters())
        assert not isinstance(replica.weight * 1, nn.Parameter)
        assert type(replica.weight * 1) is Tensor
        assert type(replica.weight.detach()) is Tensor


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_state_dict_of_a_replica_can_be_saved(keep_vars: bool, slots: list, root: torch.device) -> None:
    source = tied_and_shared(root)
    for replica in perturbed_replicas(source, slots):
        file = io.BytesIO()
        torch.save(replica.state_dict(keep_vars=keep_vars), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(torch.equal(loaded[name], value) for name, value in replica.state_dict().items())
        tied_and_shared(root).load_state_dict(loaded)
