"""A training whose states are saved and loaded by ``torch.distributed.checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dataparallel import DataParallel
from sharded_steps import whole

FULL = StateDictOptions(full_state_dict=True)


class Trained:
    """A model with AdamW. `step` is the same step for all. Of a wrapper, what is saved and loaded is its ``module``."""

    def __init__(self, model: Any, steps: int = 0) -> None:
        self.call, self.model = model, model.module if isinstance(model, DataParallel) else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for seed in range(steps):
            self.step(seed)

    def step(self, seed: int) -> Trained:
        x = torch.randn(8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.call(x.to(next(self.model.parameters()).device)).square().mean().backward()
        self.optimizer.step()
        return self

    def state(self) -> Any:
        """Of the model and of the optimizer, with whole tensors."""
        return _whole((dict(self.model.state_dict()), self.optimizer.state_dict()["state"]))

    def to_save(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        of_model, of_optimizer = of_torch.get_state_dict(self.model, self.optimizer, options=options)
        return {"model": of_model, "optimizer": of_optimizer}

    def set(self, state: dict[str, Any], options: StateDictOptions | None = None) -> None:
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        of_torch.set_state_dict(self.model, self.optimizer, **states, options=options)

    def load(self, folder: str | Path) -> Trained:
        state = self.to_save()
        checkpoint.load(state, checkpoint_id=folder)
        self.set(state)
        return self


def _whole(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return whole(torch.utils._pytree.tree_map_only(DTensor, DTensor.full_tensor, value))
