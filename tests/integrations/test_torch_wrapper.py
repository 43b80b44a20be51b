"""Programs do more with torch's class than call it: they derive from it, save whole models, patch torch's functions."""

import copy
import pickle
import sys

import numpy
import pytest
import torch
from torch import nn

import dataparallel
from dataparallel import replace_torch
from dataparallel.forms.data_parallel import TorchDataParallel
from processes import run_script


def linear(root):
    torch.manual_seed(0)
    return nn.Linear(4, 2).double().to(root)


@pytest.fixture
def x(root):
    return torch.randn(6, 4, dtype=torch.float64, device=root)


@pytest.fixture
def ids(slots):
    """The slots as torch's class takes them: accelerators as ints."""
    return [slot if slot.index is None else slot.index for slot in map(torch.device, slots)]


# ---- what is wrapped -------------------------------------------------------------------------------------------------


@pytest.mark.devices("cuda")
def test_optimizers_and_schedulers_are_wrapped_by_torchs_class(ids, root, x):
    net = linear(root)
    with replace_torch():
        optimizer = nn.DataParallel(torch.optim.SGD(net.parameters(), lr=0.5), device_ids=ids)
        scheduler = nn.DataParallel(torch.optim.lr_scheduler.StepLR(optimizer.module, 1), device_ids=ids)
        assert isinstance(optimizer, nn.DataParallel)
    before = net.weight.detach().clone()
    net(x).sum().backward()
    optimizer.module.step()
    scheduler.module.step()
    torch.testing.assert_close(net.weight, before - 0.5 * net.weight.grad)
    assert not isinstance(optimizer, dataparallel.DataParallel)


# ---- how it is made --------------------------------------------------------------------------------------------------


@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("kind", [numpy.array, torch.tensor, lambda ids: [numpy.int64(i) for i in ids]])
def test_device_ids_are_what_python_takes_for_an_index(ids, root, x, kind):
    model = dataparallel.DataParallel(linear(root), device_ids=kind(ids), output_device=kind(ids)[1])
    assert model.device_ids == ids
    assert type(model.output_device) is int
    assert model(x).device == torch.device(root.type, ids[1])


def test_a_subclass_may_make_a_plain_module_of_itself(ids, root, x):
    """``super`` from torch's class, and torch's attributes by hand: so wrote who did not want torch's checks."""
    with replace_torch():

        class Wrapper(nn.DataParallel):
            def __init__(self, module):
                super(nn.DataParallel, self).__init__()
                self.module, self.device_ids, self.dim = module, ids, 0
                self.output_device = ids[0]
                self.src_device_obj = root

        wrapper = Wrapper(linear(root))
        torch.testing.assert_close(wrapper(x), linear(root)(x))
        with pytest.raises(TypeError, match="module"):
            nn.DataParallel()


# ---- whole models in files -------------------------------------------------------------------------------------------

LOAD = """
import sys
import torch

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("dataparallel") and "testing" not in name:  # a stand-in for CUDA may need its own files
            raise ImportError(name)

sys.meta_path.insert(0, NotInstalled())
model = torch.load(sys.argv[1], weights_only=False)
x = torch.load(sys.argv[2])
print(type(model).__module__, (model(x) if len(sys.argv) < 4 else model.module(x)).sum().item())
"""


def as_torch_has_it(net, ids):
    """A wrapper of torch's class for any slots: torch's own constructor takes GPUs only."""
    model = TorchDataParallel.__new__(TorchDataParallel)
    nn.Module.__init__(model)
    model.module, model.device_ids, model.dim, model.output_device = net, ids, 0, ids[0]
    model.src_device_obj = torch.device(ids[0]) if isinstance(ids[0], torch.device) else torch.device("cuda", ids[0])
    return model


@pytest.mark.devices("cpu", "cuda")
def test_a_file_that_was_written_with_torchs_class_is_loaded_and_runs(ids, root, x, tmp_path):
    torch.save(as_torch_has_it(linear(root), ids), tmp_path / "whole.pt")
    with replace_torch():
        model = torch.load(tmp_path / "whole.pt", weights_only=False)
        assert type(model) is nn.DataParallel
        torch.testing.assert_close(model(x), linear(root)(x))
        model(x).sum().backward()
    assert model.module.weight.grad is not None


@pytest.mark.devices("cpu", "cuda")
def test_a_file_that_is_written_here_needs_torch_alone(ids, root, x, tmp_path):
    with replace_torch():
        model = nn.DataParallel(linear(root), ids)
        model.note = "of the program"
        expected = model(x).sum().item()
        model(x).sum().backward()
        torch.save(model, tmp_path / "whole.pt")
    torch.save(x, tmp_path / "x.pt")
    only_module = ["module"] if root.type == "cpu" else []  # torch's class needs GPUs to run
    printed = run_script(LOAD, str(tmp_path / "whole.pt"), str(tmp_path / "x.pt"), *only_module).split()
    assert printed[0] == "torch.nn.parallel.data_parallel"
    assert float(printed[1]) == pytest.approx(expected)


def test_copies_run_and_keep_what_the_program_has_added(ids, root, x):
    with replace_torch():
        model = nn.DataParallel(linear(root), ids)
        model.note = "of the program"
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(again) is nn.DataParallel
            assert again.note == "of the program"
            torch.testing.assert_close(again(x), model(x))


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_types_of_results_are_torchs(slots, root, x):
    parallel = torch.nn.parallel
    with replace_torch():
        assert type(parallel.scatter(x, slots)) is tuple
        assert type(parallel.scatter((x,), slots)) is list
        assert type(parallel.scatter([x], slots)) is list


PATCHES = {
    "gather": ("data_parallel", lambda theirs: lambda outputs, target_device, dim=0: [*outputs, "gathered"]),
    "scatter": ("scatter_gather", lambda theirs: lambda inputs, devices, dim=0: theirs(inputs, devices[:1], dim)),
}


@pytest.mark.parametrize("name", PATCHES)
def test_functions_that_a_program_puts_into_torchs_module_are_called(name, slots, root, x, monkeypatch):
    module, make = PATCHES[name]
    module, called = sys.modules[f"torch.nn.parallel.{module}"], []
    with replace_torch():
        model = nn.DataParallel(linear(root), [root] * 3)
        patch = make(getattr(module, name))

        def noted(*args, **kwargs):
            called.append(name)
            return patch(*args, **kwargs)

        model(x)
        assert not called
        monkeypatch.setattr(module, name, noted)
        output = model(x)
        monkeypatch.undo()
        assert called
        if name == "gather":
            assert output[-1] == "gathered"
        else:
            torch.testing.assert_close(output, linear(root)(x)[: len(output)])
        torch.testing.assert_close(model(x), linear(root)(x))
