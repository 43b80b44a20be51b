"""What the library asks of torch on CUDA only is there in its CUDA build, and takes what it is given.

No GPU is needed, but a torch that is built for CUDA. This proves that names exist, that calls fit the signatures, and
that the library says what is missing where there is no GPU. It does not prove what a call does on a GPU.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import dataparallel
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

READ = {
    "torch.cuda.Stream": ("cuda_stream", "record_event", "wait_event", "wait_stream"),
    "torch.cuda.Event": ("query",),
    "torch.Tensor": ("is_pinned", "pin_memory", "record_stream"),
    "torch._C._CudaDeviceProperties": ("multi_processor_count", "uuid"),
}
"""What the library reads of objects that only a GPU brings into being, by their classes."""

AMONG_THEM = {
    "torch.cuda.can_device_access_peer",
    "torch.cuda.current_stream",
    "torch.cuda.device",
    "torch.cuda.get_device_properties",
    "torch.cuda.is_current_stream_capturing",
    "torch.cuda.nccl.broadcast",
    "torch.cuda.nccl.reduce",
    "torch.version.hip",
}
"""What is only asked for on CUDA, and has to be among what the source is found to ask for."""


class Use(NamedTuple):
    """A place where the library names something of torch's; ``call`` where it calls it."""

    place: str
    name: str
    call: ast.Call | None


def modules() -> Iterator[ModuleType]:
    """All of the library, but for integrations, which need other libraries, and for the simulated devices.

    These share no process with CUDA.
    """
    for found in pkgutil.walk_packages(dataparallel.__path__, "dataparallel."):
        if not found.name.startswith(("dataparallel.testing", "dataparallel.integrations")) and (
            not found.name.endswith("__main__")
        ):
            yield importlib.import_module(found.name)


def uses() -> Iterator[Use]:
    """Every dotted name that begins with one of torch's modules."""
    for module in modules():
        tree = ast.parse(inspect.getsource(module))
        calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        longer = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node not in longer:
                first, _, rest = ast.unparse(node).partition(".")
                root = vars(module).get(first)
                if re.fullmatch(r"[\w.]+", rest) and inspect.ismodule(root) and is_torchs(root):
                    yield Use(f"{module.__name__}:{node.lineno}", f"{root.__name__}.{rest}", calls.get(node))


def is_torchs(module: ModuleType) -> bool:
    return module.__name__.split(".")[0] == "torch"


def named(name: str) -> Any:
    """What torch has under that name; of what each thread has its own, the whole."""
    value: Any = torch
    for part in name.split(".")[1:]:
        if not isinstance(value, threading.local):
            value = getattr(value, part)
    return value


@pytest.fixture(scope="module")
def used() -> list[Use]:
    found = [*uses()]
    assert {use.name for use in found} >= AMONG_THEM
    return found


def test_every_name_of_torchs_is_there(used: list[Use]) -> None:
    missing = []
    for use in used:
        try:
            named(use.name)
        except AttributeError as error:
            missing.append(f"{use.place}: {error}")
    assert missing == []


def test_every_call_of_torchs_functions_fits_their_signature(used: list[Use]) -> None:
    fit, unfit = set(), []
    for _, name, call in used:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords} if call is not None else {}
        if call is None or None in keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
            continue
        try:
            signature = inspect.signature(named(name))
        except ValueError:  # operators, which say nothing about themselves
            continue
        try:
            signature.bind(*call.args, **keywords)
            fit.add(name)
        except TypeError as error:
            unfit.append(f"{name}: {error}")
    assert unfit == []
    assert fit >= {name for name in AMONG_THEM if callable(named(name))}


@pytest.mark.parametrize("kind", READ)
def test_streams_events_and_properties_have_what_is_read(kind: str) -> None:
    assert [name for name in READ[kind] if not hasattr(named(kind), name)] == []


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
