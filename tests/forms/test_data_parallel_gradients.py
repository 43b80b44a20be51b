"""Gradients through both forms that replicate: twice differentiable, the same bits in every run, ``None`` as alone.

Gradients of a model that is divided are in test_fully_shard_calls and test_fully_shard_parameters.
"""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from each_form import by_wrapper, replicated


class Smooth(nn.Module):
    """Two layers, one of them used twice, and a parameter that only some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.sometimes = nn.Parameter(torch.ones(2))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x, with_sometimes=False):
        y = self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return y * self.sometimes if with_sometimes else y


@pytest.fixture(params=[by_wrapper, replicated], ids=["DataParallel", "replicate"])
def form(request):
    return request.param


@pytest.fixture
def model(root):
    torch.manual_seed(0)
    return Smooth().double().to(root)


@pytest.fixture
def x(root):
    return torch.randn(5, 2, dtype=torch.float64, device=root, requires_grad=True)


def test_hooks_on_a_parameter_that_no_replica_has_used_stay_silent(model, form, slots, x):
    """Optimizers in hooks and hooks that read ``grad`` would act on nothing. Parameters beside it have gradients."""
    called = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    used = [name for name, _ in model.named_parameters() if name not in ("sometimes", "never")]
    model = form(model, slots)
    for _ in range(3):  # the second and third steps know in which order gradients come
        model(x).sum().backward()
        assert sorted(called) == sorted([*used, *used])
        called.clear()
    (model(x) + model(x, with_sometimes=True)).sum().backward()  # one of two calls uses it
    used.append("sometimes")
    assert sorted(called) == sorted([*used, *used])


def test_changing_a_parameter_before_backward_is_noticed_as_on_one_device(model, form, slots, x):
    loss = form(model, slots)(x).sum()
    with torch.no_grad():
        model.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slots(8)
def test_gradients_are_the_same_bits_in_ten_runs(form, slots, root):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(root)
    wrapped = form(model, slots)
    x = torch.randn(37, 16, device=root)
    runs = []
    for _ in range(10):
        model.zero_grad()
        wrapped(x).square().mean().backward()
        runs.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


class Dropping(nn.Module):
    """Dropout, recomputed in backward or not."""

    def __init__(self, reentrant=None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.reentrant = reentrant

    def body(self, x):
        return self.second(nn.functional.dropout(torch.tanh(self.first(x)), 0.5))

    def forward(self, x):
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Meeting(Dropping):
    """Its recomputations, one in each device's thread, all run at the same time."""

    def __init__(self, reentrant, replicas):
        super().__init__(reentrant)
        self.barrier = threading.Barrier(replicas)

    def body(self, x):
        if torch._C._current_graph_task_id() != -1:
            self.barrier.wait(timeout=60)
        return super().body(x)


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(4)
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_cpu_generator_is_where_one_device_leaves_it_in_50_of_50_steps(form, slots, root, reentrant):
    left = []
    for used in (slots[:1], slots):
        # Slots on one device have one thread, which would wait for itself.
        meeting = Meeting(reentrant, len({*used}) if len({*used}) == len(used) else 1)
        model = form(meeting.double().to(root), used)
        torch.manual_seed(0)
        left.append([])
        for _ in range(50):
            x = torch.randn(16, 8, dtype=torch.float64).to(root).requires_grad_()
            loss = model(x).square().sum()
            torch.rand(3)  # moves the generator away from the state that recomputations set
            loss.backward()
            left[-1].append(torch.randint(1_000_000, ()).item())
    assert left[0] == left[1]
