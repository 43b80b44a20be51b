"""Libraries that wrap models in ``torch.nn.DataParallel``, or look for it: what they do with ours.

Each is used on all GPUs with torch's class and, unchanged, under `replace_torch`. transformers' trainer has tests of
its own.
"""

import importlib
from contextlib import nullcontext

import libraries_that_wrap
import pytest
import torch
from torch import nn

import dataparallel
from dataparallel.composable import replicate
from dataparallel.integrations.torch_wrapper import counts

pytestmark = pytest.mark.devices("cuda")

DERIVED = {"gpytorch": "gpytorch.kernels.multi_device_kernel", "torch_geometric": "torch_geometric.nn.data_parallel"}
"""Modules that derive a class from torch's."""


def named(library):
    return library.__name__


@pytest.fixture
def gpus():
    found = [*range(torch.cuda.device_count())]
    if len(found) < 2:
        pytest.skip("needs two GPUs")
    return found


@pytest.fixture
def expected(request, tmp_path):
    """What comes out on one GPU."""
    library = request.getfixturevalue("library")
    pytest.importorskip(library.__name__)
    (tmp_path / "one").mkdir()
    return library([0], tmp_path / "one")


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, check_device=False)


@pytest.mark.parametrize("library", libraries_that_wrap.LIBRARIES, ids=named)
class TestLibrariesThatWrap:
    def test_torchs(self, library, expected, gpus, tmp_path):
        assert_same(library(gpus, tmp_path), expected)

    def test_ours(self, library, expected, gpus, tmp_path):
        """The libraries are imported already, and their names are replaced."""
        with dataparallel.replace_torch() as replacement:
            before = dict(counts.calls)
            assert_same(library(gpus, tmp_path), expected)
            if library.__name__ in DERIVED:
                assert DERIVED[library.__name__] in replacement.report()
            else:
                assert dict(counts.calls) != before


@pytest.mark.parametrize("library", [getattr(libraries_that_wrap, name) for name in DERIVED], ids=named)
def test_classes_that_are_derived_inside(library, expected, gpus, tmp_path):
    module = importlib.import_module(DERIVED[library.__name__])
    before = dict(vars(module))
    try:
        with dataparallel.replace_torch():
            importlib.reload(module)
            calls = dict(counts.calls)
            assert_same(library(gpus, tmp_path), expected)
            assert dict(counts.calls) != calls
    finally:
        vars(module).update(before)


def found_by_accelerate(model, folder):
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model).state_dict()


def found_by_ignite(model, folder):
    from ignite.engine import Engine
    from ignite.handlers import Checkpoint, DiskSaver

    engine = Engine(lambda engine, batch: None)
    engine.run([0])
    Checkpoint({"model": model}, DiskSaver(folder), filename_pattern="saved.pt")(engine)
    Checkpoint.load_objects({"model": model}, str(folder / "saved.pt"))
    return torch.load(folder / "saved.pt")


@pytest.mark.parametrize("way", ["torchs", "under_replace_torch", "by_hand", "replicated"])
@pytest.mark.parametrize(("package", "find"), [("accelerate", found_by_accelerate), ("ignite", found_by_ignite)])
def test_libraries_that_look_for_the_wrapper_find_the_model(package, find, way, gpus, tmp_path):
    """A replicated model is saved as it is."""
    pytest.importorskip(package)
    model, expected = libraries_that_wrap.net().to(gpus[0]), libraries_that_wrap.net().state_dict()
    with dataparallel.replace_torch() if way == "under_replace_torch" else nullcontext():
        if way == "replicated":
            wrapped = replicate(model, devices=gpus)
        else:
            wrapped = (dataparallel if way == "by_hand" else nn).DataParallel(model, gpus)
        assert_same(dict(find(wrapped, tmp_path)), dict(expected))
