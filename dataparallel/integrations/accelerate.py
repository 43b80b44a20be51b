"""`Accelerator` is accelerate's, for models that have a form. Import it from here, and the program stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator as PlainAccelerator
from torch import nn
from torch.optim import Optimizer

from dataparallel.forms.data_parallel import DataParallel
from dataparallel.forms.full_state import full_copy
from dataparallel.forms.fully_shard import fully_shard
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.forms.managed import ManagedModule
from dataparallel.forms.replicate import ReplicatedModule
from dataparallel.sharded.tensor import ShardedTensor


class Accelerator(PlainAccelerator):
    """``accelerate.Accelerator``, which leaves a model that has a form on its slots.

    Give the model its form, make the optimizer, then call ``prepare``. These things differ from accelerate's own class:

    - ``prepare`` does not move a model that has a form, or holds one that has.
    - In ``accumulate`` and ``no_sync`` gradients wait on their slots, with `replicate` and `fully_shard`.
    - ``save_state`` writes plain tensors of a `fully_shard` model and of its optimizer. ``load_state`` loads them into
      a model with any form but `DataParallel`, on any number of devices. ``get_state_dict`` returns plain tensors too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_pre_hook(_load_full_states)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, without moving a model that has a form."""
        if _has(model, (DataParallel, ManagedModule)):
            device_placement = False
        return super().prepare_model(model, device_placement, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's. The state dict of the optimizer will have full tensors in place of sharded ones."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        is_prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        if not is_prepared and any(isinstance(parameter, ShardedTensor) for parameter in parameters):
            optimizer.register_state_dict_post_hook(lambda _, state: full_copy(state, {}))
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside the block gradients wait on their slots; ``accumulate`` calls this before the last batch of a step."""
        with ExitStack() as stack:
            stack.enter_context(super().no_sync(model))
            for module in model.modules():
                if isinstance(module, (ReplicatedModule, FullyShardedModule)):
                    stack.enter_context(module.no_sync())
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """As accelerate's. That of a `fully_shard` model has plain tensors in host memory."""
        if _has(model, FullyShardedModule):
            return fully_shard.full_state_dict(self.unwrap_model(model) if unwrap else model)
        return super().get_state_dict(model, unwrap)


def _has(model: nn.Module, classes: type | tuple[type, ...]) -> bool:
    return any(isinstance(module, classes) for module in model.modules())


class _WithFullState:
    """A `fully_shard` model for functions that look at the memory of its state, as those of safetensors do."""

    def __init__(self, model: nn.Module) -> None:
        self.state_dict = lambda: fully_shard.full_state_dict(model)
        self.load_state_dict = model.load_state_dict


def _load_full_states(models: list[Any], input_dir: str) -> None:
    """A hook of ``load_state``, which loads the state into ``models``."""
    models[:] = [_WithFullState(model) if _has(model, FullyShardedModule) else model for model in models]
