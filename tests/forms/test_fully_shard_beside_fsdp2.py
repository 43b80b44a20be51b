"""Beside FSDP2 on two processes with gloo: the same policies give the same numbers.

Each process computes with its half of a batch, as each slot does here. FSDP2 averages gradients over processes, and
here they are summed. The loss is the mean of the process's half there, and of the whole batch here, so both mean the
same. The factors are powers of two, so they round nothing.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import beside_fsdp2
from beside_fsdp2 import HALF, MODELS, RANKS, WAYS, Trained, build, train
from dataparallel.composable import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from processes import environment
from sharded_steps import on_device, whole

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trained]:
    """What FSDP2's two processes have computed, for each model and way."""
    folder: Path = tmp_path_factory.mktemp("fsdp2")
    out = folder / "results"
    command = [sys.executable, beside_fsdp2.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), str(out)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(printed)
    return {key: Trained(**fields) for key, fields in torch.load(out, weights_only=False).items()}


def ours(name: str, way: str, slots: list) -> Trained:
    """What one process computes on two slots."""
    model = on_device(lambda: build(name), slots[0])
    offloads = WAYS[way].offloads
    policy = OffloadPolicy() if offloads is None else CPUOffloadPolicy(pin_memory=torch.device(slots[0]).type != "cpu")
    WAYS[way].shard(model, fully_shard, MixedPrecisionPolicy, devices=slots, offload_policy=policy)
    layers = model.layers if name == "mixed" else []
    seen = [layer.seen for layer in layers]  # the same lists on all slots
    trained = train(model, lambda seed: MODELS[name][1](seed).to(slots[0]), whole)
    trained.seen = seen[0] if seen else []
    return trained


def sums_in(way: str) -> torch.dtype | None:
    precision = WAYS[way].precision
    return precision.get("reduce_dtype") or precision.get("param_dtype")


EXACT = [way for way in WAYS if sums_in(way) != HALF]
COARSE = [way for way in WAYS if sums_in(way) == HALF]


@pytest.mark.long
@pytest.mark.slots(RANKS)
@pytest.mark.parametrize("name", MODELS)
class TestFiveSteps:
    @pytest.mark.parametrize("way", EXACT)
    def test_are_those_of_fsdp2(self, way, name, slots, theirs):
        """On the same kernels to the last bit; 1e-6 leaves room for others.

        FSDP2 runs on the CPU here. Attention has another kernel on CUDA, and AdamW makes whole steps of gradients that
        are nothing but rounding: there only gradients and outputs are compared.
        """
        found, expected = ours(name, way, slots), theirs[name, way]
        assert_near(found.gradients, expected.gradients, lambda tensor: 1e-6)
        if slots[0].type != "cuda":
            assert_near([found.parameters], [expected.parameters], lambda tensor: 1e-6)
        for mine, of_first_half in zip(found.outputs, expected.outputs, strict=True):
            assert mine.dtype == of_first_half.dtype
            torch.testing.assert_close(mine[: len(of_first_half)], of_first_half)

    @pytest.mark.parametrize("way", COARSE)
    def test_with_coarse_sums_differ_by_their_rounding(self, way, name, slots, theirs):
        """FSDP2 rounds each sum to 16 bits, and here only what is added is rounded.

        The first gradients are compared: AdamW makes whole steps of gradients that are nothing but rounding.
        """
        found, expected = ours(name, way, slots), theirs[name, way]
        eps = torch.finfo(HALF).eps

        def rounding(tensor: torch.Tensor) -> float:
            return eps * float(tensor.abs().max())

        assert_near(found.gradients[:1], expected.gradients[:1], rounding)


@pytest.mark.long
@pytest.mark.slots(RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_sees_the_dtypes_that_it_sees_in_fsdp2(way, slots, theirs):
    """Inputs and parameters are cast as the policy says, buffers never."""
    found = ours("mixed", way, slots).seen
    assert found == theirs["mixed", way].seen
    assert found[2] == torch.float32


def assert_near(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: Callable[[torch.Tensor], float]
) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == other[name].dtype
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance(other[name]), msg=name)
