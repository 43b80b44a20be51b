"""The library in torch's CUDA build on a machine without a GPU: it trains, and says what is missing."""

import re

import pytest
import torch

from dataparallel import DataParallel
from dataparallel.integrations import machine

pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.skipif(torch.version.cuda is None, reason=f"needs a CUDA build of torch, this is {torch.__version__}"),
]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@without_gpu
def test_the_report_tells_of_the_build_and_of_no_gpu() -> None:
    text = machine.description()
    assert f"CUDA {torch.version.cuda}" in text
    assert "accelerator   none" in text
    assert re.search(r"NCCL +\d+\.\d+", text)


@without_gpu
def test_a_model_trains_where_there_is_no_gpu() -> None:
    for devices in (None, ["cpu", "cpu"]):
        model = DataParallel(torch.nn.Linear(4, 3), devices)
        model(torch.randn(6, 4)).sum().backward()
        assert not torch.cuda.is_initialized()
