"""Slots for tests of other people's frameworks, and what their packages lack on a machine without CUDA.

A test module that needs a package begins with ``pytest.importorskip``: without the extra ``frameworks`` all of this
folder is skipped.
"""

import importlib.util
from pathlib import Path

import torch

_kept = []


def pytest_configure() -> None:
    """timm needs torchvision, whose compiled operators are missing beside a build of torch that they do not fit.

    No model here calls one, but the import of torchvision registers what two of them do on meta, so they must have a
    name. Where the library loads it defines them itself.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        names = torch.library.Library("torchvision", "DEF")
        names.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        names.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(names)  # the names go with it
