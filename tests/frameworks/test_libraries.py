"""Libraries that look for ``torch.nn.DataParallel`` find the model in ours, and take a replicated model as it is."""

import copy

import pytest
import torch
from torch import nn

from each_form import replicating_forms


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


@replicating_forms
@pytest.mark.parametrize(("package", "find"), [("accelerate", found_by_accelerate), ("ignite", found_by_ignite)])
def test_they_find_the_model(package, find, form, slots, root, tmp_path):
    pytest.importorskip(package)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(root)
    torch.testing.assert_close(dict(find(form(copy.deepcopy(net), slots), tmp_path)), dict(net.state_dict()))
