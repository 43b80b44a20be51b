"""Lightning's own strategies for several GPUs, in a program that imports this library too: they stay as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from learner import Learner, fit, loader, net, weights

from processes import environment

pytestmark = [pytest.mark.devices("cuda"), pytest.mark.long, pytest.mark.watchdog(600)]

SAMPLES = 8

# Each of the two processes has half of the samples in each step, which Lightning's sampler draws.
PROGRAM = f"""
import sys

import torch
from torch import nn

import dataparallel
from learner import Learner, fit, loader, net, weights

class Distributed(Learner):
    def on_fit_start(self):
        # Lightning 2.6.6 makes DistributedDataParallel on a stream of its own. The parameters are written there, and no
        # other stream waits for that: the clocks of a stand-in report it.
        torch.cuda.synchronize()

    def training_step(self, batch, index):
        assert type(self.trainer.strategy.model) is nn.parallel.DistributedDataParallel
        assert torch.distributed.get_backend() == "nccl"
        assert batch[0].device == self.device == torch.device("cuda", self.global_rank)
        assert len(batch[0]) == {SAMPLES // 2}
        return super().training_step(batch, index)

    def on_train_end(self):
        if self.trainer.is_global_zero:
            torch.save(weights(self), sys.argv[2] + "/weights.pt")

if __name__ == "__main__":
    batches = loader({SAMPLES // 2}, {SAMPLES})
    fit(Distributed(net()), sys.argv[2], batches=batches, accelerator="gpu", devices=2, strategy=sys.argv[1])
"""


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_it_trains_as_one_device(strategy, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = Learner(net())
    fit(expected, tmp_path, batches=loader(SAMPLES, SAMPLES))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), strategy, str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    done = subprocess.run(
        command,
        env=environment(PYTHONPATH=path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), weights(expected), rtol=1e-9, atol=1e-12)
