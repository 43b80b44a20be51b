"""The library in torch's CUDA build on a machine without a GPU: it trains, and says what is missing."""

import re
from collections.abc import Callable

import pytest
import torch

from dataparallel import DataParallel
from dataparallel.comm import kernels
from dataparallel.comm.nccl import Nccl
from dataparallel.comm.nccl import why_not as why_not_nccl
from dataparallel.integrations import machine

pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.skipif(torch.version.cuda is None, reason=f"needs a CUDA build of torch, this is {torch.__version__}"),
]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.mark.parametrize(
    "use",
    [
        lambda flats: Nccl(sums=False).broadcast_flat(flats[0], flats[1:]),
        lambda flats: Nccl(sums=True).add_up(flats, flats[0].device),
    ],
    ids=["broadcast", "reduce"],
)
def test_nccl_takes_the_arguments_and_looks_at_the_tensors(use: Callable) -> None:
    """So it is in this build, and what it says is about devices, not about arguments."""
    assert why_not_nccl() is None
    with pytest.raises(RuntimeError, match="cuda dense Tensors"):
        use([torch.ones(3), torch.ones(3)])


@without_gpu
def test_the_report_tells_of_the_build_and_of_no_gpu() -> None:
    text = machine.description()
    assert f"CUDA {torch.version.cuda}" in text
    assert "accelerator   none" in text
    assert re.search(r"NCCL +\d+\.\d+", text)
    assert kernels.why_not() == "torch sees no CUDA device"


@without_gpu
def test_a_model_trains_where_there_is_no_gpu() -> None:
    for devices in (None, ["cpu", "cpu"]):
        model = DataParallel(torch.nn.Linear(4, 3), devices)
        model(torch.randn(6, 4)).sum().backward()
        assert not torch.cuda.is_initialized()
