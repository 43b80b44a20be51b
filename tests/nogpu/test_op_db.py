"""Every operator of torch's own database of samples on devices without hardware: right, or refused by an error that
names what is missing. `beside_cpu` is the script behind it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment
from stand_in import needs_stand_in

pytestmark = [
    pytest.mark.devices("cpu"),  # each test has a process of its own
    pytest.mark.watchdog(3600.0),
    pytest.mark.usefixtures("available"),
    pytest.mark.parametrize("kind", ["sim", pytest.param("cuda", marks=needs_stand_in)]),
]

SCRIPT = Path(__file__).with_name("beside_cpu.py")
PIECES = 16

# torch has no kernel of CUDA for these either, or takes an argument on the CPU only.
REFUSED = {
    "histogram",
    "histogramdd",
    "sparse.mm.reduce",
    "tensor_split",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
}

# It adds in an order that depends on where memory lies, in 16 bits too.
ROUNDED = {"nn.functional.linear_cross_entropy.chunked_none"}


def lines_of(*arguments: str) -> list[dict]:
    """What the script prints, to its end."""
    variables = environment()
    variables.pop("NOGPU_STAND_IN", None)
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3600, check=False)
    lines: list[dict] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout + done.stderr
    assert "ends" in lines[-1], f"{lines[-1]}: the process has ended with {done.returncode}"
    return lines


def check(*arguments: str) -> None:
    found = [line for line in lines_of(*arguments) if "op" in line]
    wrong = [
        f"{line['op']} {line['dtype']}: {line['wrong'][0]}"
        for line in found
        if line["wrong"] and line["op"] not in ROUNDED
    ]
    assert not wrong, "\n".join(wrong)
    refused = {line["op"]: list(line["refused"]) for line in found if line["refused"] and line["op"] not in REFUSED}
    assert not refused, refused
    assert any(line["right"] for line in found)


def test_operators_that_programs_meet(kind):
    names = "add,mm,sum,cat,index_put,softmax,nn.functional.conv2d,nn.functional.batch_norm,nn.functional.dropout"
    names += ",nn.functional.scaled_dot_product_attention,nn.functional.layer_norm,nn.functional.rms_norm"
    names += ",nn.functional.cross_entropy,nn.functional.embedding,linalg.solve,fft.fft,sparse.sampled_addmm,nonzero"
    check(kind, "--names", names, "--samples", "4")


def test_some_of_all_operators(kind):
    check(kind, "--piece", "0/24", "--samples", "3")


@pytest.mark.long
@pytest.mark.parametrize("piece", range(PIECES))
def test_all_operators(kind, piece):
    check(kind, "--piece", f"{piece}/{PIECES}")
