"""Libraries that look for ``torch.nn.DataParallel``, to find the model in it: the smallest use of each.

A function here is named like the package it needs. It gets a wrapped model and a folder for files, and returns the
state dict of the model that the library has found, as it saves it or as it keeps it.
"""

import torch


def accelerate(model, folder):
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model).state_dict()


def captum(model, folder):
    from captum.influence._utils.common import _load_flexible_state_dict

    saved = {name: value + 1 for name, value in model.module.state_dict().items()}
    torch.save(saved, folder / "saved.pt")
    _load_flexible_state_dict(model, folder / "saved.pt")
    return {name: value - 1 for name, value in model.module.state_dict().items()}


def fvcore(model, folder):
    from fvcore.common.checkpoint import Checkpointer

    Checkpointer(model, str(folder)).save("saved")
    return torch.load(folder / "saved.pth")["model"]


def ignite(model, folder):
    from ignite.engine import Engine
    from ignite.handlers import Checkpoint, DiskSaver

    engine = Engine(lambda engine, batch: None)
    engine.run([0])
    Checkpoint({"model": model}, DiskSaver(folder), filename_pattern="saved.pt")(engine)
    Checkpoint.load_objects({"model": model}, str(folder / "saved.pt"))
    return torch.load(folder / "saved.pt")


def mmengine(model, folder):
    from mmengine.model import is_model_wrapper

    assert is_model_wrapper(model)
    assert not is_model_wrapper(model.module)
    return model.module.state_dict()


def monai(model, folder):
    from monai.networks import copy_model_state, get_state_dict

    copy_model_state(model, get_state_dict(model))
    return get_state_dict(model)


def pfrl(model, folder):
    from pfrl.agent import AttributeSavingMixin

    class Agent(AttributeSavingMixin):
        saved_attributes = ("model",)

    agent = Agent()
    agent.model = model
    agent.save(folder)
    agent.load(folder)
    return torch.load(folder / "model.pt")


def timm(model, folder):
    from timm.utils import get_state_dict

    return get_state_dict(model)


def torchdistill(model, folder):
    from torchdistill.common.module_util import check_if_wrapped, get_full_state_dict

    assert check_if_wrapped(model)
    return get_full_state_dict(model)


def ultralytics(model, folder):
    from ultralytics.utils.torch_utils import ModelEMA, is_parallel

    assert is_parallel(model)
    return ModelEMA(model).ema.state_dict()


THAT_SAVE = [accelerate, fvcore, ignite, monai, pfrl, timm]

LIBRARIES = [*THAT_SAVE, captum, mmengine, torchdistill, ultralytics]
