"""A training over two machines, which the main thread of each rank runs while its other threads call local models."""

from __future__ import annotations

import torch
from stress_models import by_chunks, made, same_parameters, samples
from torch import distributed

from dataparallel.composable import fully_shard, replicate

SLOTS = 2
RENEWED_EVERY = 50  # steps


class RankTraining:
    """A model whose gradients are means over two machines, beside one device that has the samples of both.

    All ranks make the same steps: if one of them says that a step is the last, it is.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.rank, self.steps = seed, rank, 0
        self._root = torch.device("cpu")
        self._renew()

    def _renew(self) -> None:
        number = self.steps // RENEWED_EVERY
        self.form = ("replicate", "fully_shard")[number % 2]
        net, self.alone = (made(self.seed + number, self._root) for _ in range(2))
        options = {"devices": [self._root] * SLOTS, "process_group": distributed.group.WORLD}
        if self.form == "replicate":
            self.model = replicate(net, **options)
        else:
            for unit in (net.first, net.middle, net):
                self.model = fully_shard(unit, **options)
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.model, self.alone)]

    def step(self, is_last: bool) -> bool:
        """Makes a step. False if a rank says that it is the last."""
        if self.steps and self.steps % RENEWED_EVERY == 0:
            self._renew()
        batches = [samples(1000 * self.steps + rank, 5, self._root) for rank in range(2)]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(batches[self.rank]).square().mean().backward()
        torch.stack([by_chunks(self.alone, batch, SLOTS).square().mean() for batch in batches]).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        same_parameters(self.model, self.alone, f"{self.form} in step {self.steps} of rank {self.rank}")
        self.steps += 1
        says = torch.tensor([float(is_last)])
        distributed.all_reduce(says)
        return bool(says.item() == 0)
