"""Modules of ``torch.jit`` as sources, in every form that they come in: they work, or are refused with a sentence."""

import io

import pytest
import torch
from torch import nn

from around import assert_trains_alike, batches
from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from each_form import by_wrapper, replicated

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4).eval()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.norm(self.first(x)).tanh() * self.shift


class Ranges(nn.Module):
    """It asks its input for a device, of which a trace makes a constant."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return self.first(x) + torch.arange(4, dtype=x.dtype, device=x.device)


class Above(nn.Module):
    def __init__(self, child):
        super().__init__()
        self.child, self.top = child, nn.Linear(4, 2)

    def forward(self, x):
        return self.top(self.child(x))


def loaded(module):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def trace(module):
    parameter = next(module.parameters())
    return torch.jit.trace(module, torch.ones(2, 4, dtype=parameter.dtype, device=parameter.device))


FORMS = {"script": torch.jit.script, "trace": trace, "loaded": loaded}


def build(cls, root):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls().double().to(root)


def above(child, root):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Above(child).double().to(root)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slots(2, 3)
def test_each_form_equals_one_device_in_a_wrapper_and_below_a_python_module(form, slots, root):
    model = DataParallel(FORMS[form](build(Net, root)), slots)
    assert_trains_alike(model, build(Net, root), root)
    for wrap in (by_wrapper, replicated):
        model = wrap(above(FORMS[form](build(Net, root)), root), slots)
        assert_trains_alike(model, above(build(Net, root), root), root)


@pytest.mark.parametrize("form", FORMS)
def test_they_cannot_be_sharded_or_replicated_in_place(form, slots, root):
    module = FORMS[form](build(Net, root))
    with pytest.raises(TypeError, match=r"wrap this one in dataparallel\.DataParallel"):
        replicate(module, devices=slots)
    for tree in (module, above(module, root)):
        with pytest.raises(
            TypeError, match=r"cannot shard .* belong to TorchScript .* Shard the module that is not script"
        ):
            fully_shard(tree, devices=slots)


FIXED = {
    "freeze": lambda root: torch.jit.freeze(torch.jit.script(build(Net, root).eval())),
    "optimize_for_inference": lambda root: torch.jit.optimize_for_inference(torch.jit.script(build(Net, root).eval())),
    "trace": lambda root: trace(build(Ranges, root)),
    "a child": lambda root: above(trace(build(Ranges, root)), root),
}


class TestConstants:
    """What was traced or frozen on one device is right there only."""

    @pytest.mark.devices("sim")
    @pytest.mark.parametrize("fixed", FIXED.values(), ids=FIXED)
    def test_on_other_devices_they_are_refused(self, fixed, slots, root):
        module, (x,) = fixed(root), batches(root, [6])
        refused = r"cannot replicate the ScriptModule '(at the root|child)' to sim:1: .* on sim:0 is a constant"
        for run in (lambda: DataParallel(module, slots)(x), lambda: _frozen(DataParallel(module, slots), x)):
            with pytest.raises(RuntimeError, match=refused):
                run()

    @pytest.mark.parametrize("fixed", FIXED.values(), ids=FIXED)
    def test_on_the_same_device_they_work(self, fixed, slots, root):
        module, (x,) = fixed(root), batches(root, [6])
        with torch.no_grad():
            torch.testing.assert_close(DataParallel(module, [root] * 3)(x), module(x))


def _frozen(model, x):
    with torch.no_grad(), model.options.frozen():
        return model(x)


class TestAround:
    @pytest.mark.parametrize("slots", [2], indirect=True)
    def test_a_trace_of_a_wrapper_is_refused(self, slots, root):
        (x,) = batches(root, [6])
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace is running around the call"):
            torch.jit.trace(DataParallel(build(Net, root), slots), x)
