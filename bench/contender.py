"""A script for processes that make training steps of a GPT on command, each in one of five ways.

``python contender.py THREADS`` is a single process. It makes a step by ``DataParallel`` on two CPU slots, by the same
module with the whole batch, by the module with the two halves of the batch in a row, or by ``composable.replicate``,
which changes the module for good. ``python contender.py THREADS RANK FILE`` is one of two processes of
``DistributedDataParallel``, which find each other through FILE.

`cpu_slots` starts the processes and talks to them. A command is a line on stdin, and a line on stdout says that it is
done. Before that comes a line with what the step returns, as JSON, if it returns anything. A process that has no
command waits for its stdin and takes no time from the others.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from dataparallel import DataParallel
from dataparallel.composable import ReplicatedModule, replicate
from shapes import GPT, VOCABULARY
from ways import ByHand

SLOTS = 2
SAMPLES_PER_SLOT = 8
LENGTH = 64
COLLECT = "collect garbage"
SAVE = "save gradients "
ANSWER = "answer "
DONE = "done"

Step = Callable[[], object]


def model() -> nn.Module:
    """The same model in every process."""
    torch.manual_seed(0)
    return GPT(width=256, blocks=6, heads=4, length=LENGTH)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, both ``(samples, length)``."""
    text = torch.randint(VOCABULARY, (SLOTS * SAMPLES_PER_SLOT, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def step(network: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """A training step without an optimizer, which would be the same everywhere."""

    def run() -> None:
        network.zero_grad()
        F.cross_entropy(network(tokens).flatten(0, 1), targets.flatten()).backward()

    return run


def steps_of_one_process(module: nn.Module) -> dict[str, Step]:
    """All of them use the same parameters, so that none has a better place in memory."""
    tokens, targets = batch()
    return {
        "slots": step(DataParallel(module, ["cpu"] * SLOTS), tokens, targets),
        "module": step(module, tokens, targets),
        "chunks": step(ByHand(module, SLOTS), tokens, targets),
        "replicate": replicated(module, tokens, targets),
    }


def replicated(module: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """A step of the module itself, which is replicated before the first of these steps."""
    run = step(module, tokens, targets)

    def replicate_and_run() -> None:
        if not isinstance(module, ReplicatedModule):
            replicate(module, devices=["cpu"] * SLOTS)
        run()

    return replicate_and_run


def steps_of_a_rank(module: nn.Module, rank: int, file: str) -> dict[str, Step]:
    """A step with this rank's half of the batch. DDP averages the gradients, as the loss averages the whole batch."""
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=SLOTS, timeout=timedelta(minutes=2)
    )
    tokens, targets = (whole.chunk(SLOTS)[rank].contiguous() for whole in batch())
    return {"ddp": step(nn.parallel.DistributedDataParallel(module), tokens, targets)}


def no_file(path: str) -> None:
    """For processes whose steps answer all that is asked."""
    raise ValueError(f"this process saves nothing; asked for {path}")


def obey(steps: Mapping[str, Step], save: Callable[[str], None] = no_file) -> None:
    """Carries out the commands on stdin, until it is closed. ``save`` gets the path of a file."""
    gc.collect()
    gc.freeze()  # so that collections need not visit what torch has imported
    print(DONE, flush=True)
    for line in sys.stdin:
        command = line.rstrip("\n")
        if command == COLLECT:
            gc.collect()
        elif command.startswith(SAVE):
            save(command.removeprefix(SAVE))
        elif (answer := steps[command]()) is not None:
            print(ANSWER + json.dumps(answer))
        print(DONE, flush=True)


def main(threads: str, rank: str | None = None, file: str = "") -> None:
    torch.set_num_threads(int(threads))  # before anything that runs a backward
    module = model()
    steps = steps_of_one_process(module) if rank is None else steps_of_a_rank(module, int(rank), file)
    obey(steps, lambda path: torch.save([parameter.grad for parameter in module.parameters()], path))
    if rank is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
