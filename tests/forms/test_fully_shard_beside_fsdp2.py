"""Beside FSDP2 on two processes with gloo: the same policies give the same numbers.

Each process computes with its half of a batch, as each slot does here. FSDP2 averages gradients over processes, and
here they are summed. The loss is the mean of the process's half there, and of the whole batch here, so both mean the
same. The factors are powers of two, so they round nothing.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import beside_fsdp2
from beside_fsdp2 import HALF, RANKS, WAYS, Net, Trained, train
from dataparallel.composable import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from processes import environment
from sharded_steps import on_device, whole

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """What FSDP2's two processes have computed, for each way."""
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


def ours(way: str, slots: list) -> Trained:
    """What one process computes on two slots."""
    model = on_device(Net, slots[0])
    offloads = WAYS[way].offloads
    policy = OffloadPolicy() if offloads is None else CPUOffloadPolicy(pin_memory=torch.device(slots[0]).type != "cpu")
    WAYS[way].shard(model, fully_shard, MixedPrecisionPolicy, devices=slots, offload_policy=policy)
    return train(model, lambda x: x.to(slots[0]), whole)


@pytest.mark.slots(RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_five_steps_are_those_of_fsdp2(way, slots, theirs):
    """On the same kernels to the last bit; 1e-6 leaves room for others.

    FSDP2 runs on the CPU here. AdamW makes whole steps of gradients that are nothing but rounding, so where kernels
    differ only gradients and outputs are compared. FSDP2 rounds each sum to 16 bits if it sums in these, and here only
    what is added is rounded: then the first gradients are compared, to that rounding.

    Inputs and parameters are cast as the policy says, buffers never.
    """
    found, expected = ours(way, slots), theirs[way]
    assert found.seen == expected.seen
    assert found.seen[2] == torch.float32
    precision = WAYS[way].precision
    if precision.get("reduce_dtype", precision.get("param_dtype")) == HALF:
        assert_near(found.gradients[0], expected.gradients[0], torch.finfo(HALF).eps)
        return
    for ours_of_step, of_step in zip(found.gradients, expected.gradients, strict=True):
        assert_near(ours_of_step, of_step)
    if slots[0].type != "cuda":
        assert_near(found.parameters, expected.parameters)
    for output, of_first_half in zip(found.outputs, expected.outputs, strict=True):
        assert output.dtype == of_first_half.dtype
        torch.testing.assert_close(output[: len(of_first_half)], of_first_half)


def assert_near(found: dict[str, Any], expected: dict[str, Any], rounding: float | None = None) -> None:
    """To 1e-6, or to a part of the largest element."""
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        assert found[name].dtype == other.dtype
        atol = 1e-6 if rounding is None else rounding * float(other.abs().max())
        torch.testing.assert_close(found[name], other, rtol=0, atol=atol, msg=name)
