"""`replace_torch` puts the library in the place of torch's names, wherever they are, and gives them back."""

import sys
import types
from abc import ABC, abstractmethod

import pytest
import torch
from torch import nn

import dataparallel
from around import assert_trains_alike
from at_once import in_threads
from dataparallel import replace_torch

TORCH = nn.DataParallel  # the name in this module is replaced too, so each test asks `originals`
NAMES = {
    torch.nn: ["DataParallel"],
    torch.nn.parallel: ["DataParallel", "data_parallel", "replicate", "scatter", "gather", "parallel_apply"],
}


def now():
    return {(module.__name__, name): getattr(module, name) for module, names in NAMES.items() for name in names}


def linear(root):
    torch.manual_seed(0)
    return nn.Linear(4, 2).double().to(root)


def test_all_names_are_replaced_and_given_back():
    before = now()
    with replace_torch():
        inside = now()
    assert all(inside[name] is not before[name] for name in before)
    assert now() == before


def test_names_that_were_imported_before():
    before, mine = nn.DataParallel, sys.modules[__name__]
    with replace_torch() as replacement:
        assert mine.TORCH is nn.DataParallel is not before
        assert f"{__name__}.TORCH" in replacement.places
    assert mine.TORCH is before


def test_modules_that_are_imported_inside(monkeypatch):
    before = nn.DataParallel
    with replace_torch():
        late = types.ModuleType("late")
        exec("from torch.nn import DataParallel", vars(late))
        monkeypatch.setitem(sys.modules, "late", late)
        assert issubclass(late.DataParallel, dataparallel.DataParallel)
    assert late.DataParallel is before


def test_until_the_last_one_is_undone():
    before = nn.DataParallel
    outer = replace_torch()
    with replace_torch() as inner:
        assert inner.places == outer.places
    assert nn.DataParallel is not before
    outer.undo()
    assert nn.DataParallel is before
    outer.undo()
    assert nn.DataParallel is before


def test_several_threads_replace_at_once():
    before = now()

    def work(index, barrier):
        for _ in range(20):
            with replace_torch():
                assert nn.DataParallel is not before["torch.nn", "DataParallel"]

    in_threads(4, work)
    assert now() == before


def test_isinstance_is_true_of_both(slots, root):
    theirs, ours = nn.DataParallel(nn.Linear(4, 2)), dataparallel.DataParallel(linear(root), slots)
    with replace_torch():
        wrapped = nn.DataParallel(linear(root), slots)
        for model in (theirs, ours, wrapped):
            assert isinstance(model, nn.DataParallel)
        assert not isinstance(wrapped.module, nn.DataParallel)
        assert issubclass(dataparallel.DataParallel, nn.DataParallel)
        with pytest.raises(TypeError, match="wrapped already"):
            nn.DataParallel(theirs, slots)
    assert isinstance(wrapped, nn.DataParallel)
    assert isinstance(wrapped, dataparallel.DataParallel)


def test_without_devices_the_compiler_goes_through(monkeypatch):
    monkeypatch.setattr("dataparallel.devices.accelerator_type", lambda: None)
    net, x = nn.Linear(4, 2), torch.randn(3, 4)
    with replace_torch():
        wrapped = nn.DataParallel(net)
        compiled = torch.compile(lambda x: wrapped(x) + 1, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), net(x) + 1)


def test_subclasses_with_abstract_bases(slots, root):
    class Named(ABC, nn.Module):
        def __init__(self):
            super().__init__()
            self.name = self.own_name()

        @abstractmethod
        def own_name(self): ...

    with replace_torch():

        class Wrapper(nn.DataParallel, Named):
            def own_name(self):
                return "wrapper"

        wrapper = Wrapper(linear(root), slots)
        assert_trains_alike(wrapper, linear(root), root)
        assert wrapper.name == "wrapper"


@pytest.mark.devices("cpu")  # torch's class runs on no device there
def test_subclasses_that_were_defined_before_may_call_methods_by_the_name(monkeypatch):
    module = types.ModuleType("derived_before")
    code = """
from torch.nn import DataParallel

class Derived(DataParallel):
    def __init__(self, module, device_ids=None):
        DataParallel.__init__(self, module, device_ids)

    def forward(self, *inputs):
        return DataParallel.forward(self, *inputs)
"""
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "derived_before", module)
    net, x = linear("cpu"), torch.randn(3, 4, dtype=torch.float64)
    with replace_torch():
        derived = module.Derived(net, [])
        assert issubclass(module.DataParallel, dataparallel.DataParallel)
        torch.testing.assert_close(derived(x), net(x))


def test_hooks_see_the_source_as_in_torch(slots, root):
    """A library keeps what hooks find under the module that it has given to them."""
    seen, net = {}, linear(root)

    def keep_under(layer):
        return lambda module, args, output: seen.setdefault(layer, []).append(module)

    net.register_forward_hook(keep_under(net))
    with replace_torch():
        nn.DataParallel(net, slots)(torch.randn(len(slots), 4, dtype=torch.float64, device=root))
    (modules,) = seen.values()
    assert [*seen] == [net]
    assert len({*modules}) == len(slots)


def test_the_type_is_the_one_that_torch_names(slots, root):
    with replace_torch():
        assert type(nn.DataParallel(linear(root), slots)) in (nn.DataParallel, nn.parallel.DistributedDataParallel)
        assert type(nn.parallel.DataParallel(linear(root), slots)) is nn.DataParallel


def test_the_functions_do_what_torch_says(slots, root):
    x = torch.randn(6, 4, dtype=torch.float64, device=root)
    with replace_torch():
        parallel = torch.nn.parallel
        replicas = parallel.replicate(linear(root), slots)
        chunks = parallel.scatter((x,), slots)
        outputs = parallel.parallel_apply(replicas, chunks, devices=slots)
        torch.testing.assert_close(parallel.gather(outputs, root), linear(root)(x))
        torch.testing.assert_close(parallel.data_parallel(linear(root), x, slots), linear(root)(x))


def test_the_report_says_what_was_replaced_and_called(slots, root):
    with replace_torch() as replacement:
        nn.DataParallel(linear(root), slots)(torch.randn(6, 4, dtype=torch.float64, device=root))
        text = replacement.report()
    assert f"{__name__}.TORCH" in text
    assert "DataParallel.forward" in text
