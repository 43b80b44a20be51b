"""`SlotsStrategy` has Lightning's ``Trainer`` run the steps of a module on slots. It needs Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from dataparallel.batches.structures import number_of_samples
from dataparallel.devices import CPU, DeviceLike, current_device, resolve_slots
from dataparallel.forms.data_parallel import DataParallel
from dataparallel.forms.full_state import full_copy
from dataparallel.forms.fully_shard import fully_shard
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.forms.replicate import ReplicatedModule, replicate
from dataparallel.integrations.form_names import Form, check_form


class SlotsStrategy(ParallelStrategy):
    """``Trainer(strategy=SlotsStrategy())`` runs the steps of a ``LightningModule`` on all slots.

    ``training_step``, ``validation_step``, ``test_step`` and ``predict_step`` run in replicas, each with its chunk of
    the batch. Scalars that they return, such as the loss, become means in which each chunk counts by its samples.
    Tensors are joined. What they log with ``self.log`` is combined in the same way, or as ``reduce_fx`` says if that
    is a sum, a maximum or a minimum, and is logged once. Accumulated gradients wait on their slots, except with
    `DataParallel`. Checkpoints are those of one device.

    A step runs in a copy of the module. What it assigns to ``self`` is lost. It logs numbers and tensors with one
    element, and no metrics; update these with what the step returns, in ``on_validation_batch_end`` for example.

    With `fully_shard` all parameters make one unit. To have more, apply `fully_shard` to blocks in
    ``configure_model``, over the same devices.

    Args:
        devices: the slots, as for `DataParallel`. Default: all accelerators; without any, steps run on the CPU.
        form: ``"replicate"``, ``"DataParallel"`` or ``"fully_shard"``.
        options: further options of the form, such as ``chunk_sizes``.

    Raises:
        ValueError: ``form`` is another string; devices as for `DataParallel`. In ``fit``: the module optimises by hand.
    """

    strategy_name = "slots"

    def __init__(self, devices: Sequence[DeviceLike] | None = None, form: Form = "replicate", **options: Any) -> None:
        check_form(form)
        slots = resolve_slots(devices)
        super().__init__(parallel_devices=slots or [CPU])
        self._slots, self._form, self._options = slots, form, {"scalars": "mean", **options}
        self._steps: Any = None

    # ---- where the module is -----------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The first slot."""
        return self.parallel_devices[0]

    def setup(self, trainer: Any) -> None:
        """As the base's. Raises ``ValueError`` for a module that optimises by hand: its steps would do so in copies."""
        if trainer.state.fn == TrainerFn.FITTING and not self.lightning_module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: the steps of SlotsStrategy run in replicas, which cannot call "
                "manual_backward; give the model inside of the LightningModule a form, and leave strategy as it is"
            )
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Moves the module to the first slot, unless it is to be divided."""
        if self._form != "fully_shard":
            self.lightning_module.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        devices, running = self._slots or None, _running.get(id(model))
        if running is None:
            running = _Steps(model, (self._form, self._slots))
            if self._form == "fully_shard":
                fully_shard(running, devices=devices, **self._options)
            elif self._form == "replicate":
                replicate(running, devices=devices, **self._options)
            _running[id(model)] = running
        elif running.form_and_slots != (self._form, self._slots):
            raise RuntimeError(
                f"this {type(model).__name__} has the form and slots {running.form_and_slots} of another strategy, "
                f"and cannot get {(self._form, self._slots)}; use the same strategy or another module"
            )
        is_wrapped = self._form == "DataParallel"
        self._steps = DataParallel(running, devices, **self._options) if is_wrapped else running
        return model

    def teardown(self) -> None:
        """As the base's, but the shards of a module that is divided stay where they are."""
        if self._form == "fully_shard":
            self.precision_plugin.teardown()
            self.accelerator.teardown()
        else:
            super().teardown()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _run(self, name: str, context: Any, args: Any, kwargs: Any) -> Any:
        with context:
            output, logged, settings = self._steps(name, *args, **kwargs)
        for key, values in logged.items():
            self.lightning_module.log(key, _combined(values, settings[key]), **settings[key], **_batch_size(values))
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``training_step`` on the slots, and returns its loss for the whole batch."""
        return self._run("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``validation_step`` on the slots."""
        return self._run("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``test_step`` on the slots."""
        return self._run("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``predict_step`` on the slots, and returns its outputs joined."""
        return self._run("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside the block gradients wait on their slots. The trainer calls this while it accumulates."""
        waits = isinstance(self._steps, (ReplicatedModule, FullyShardedModule))
        with self._steps.no_sync() if waits else nullcontext():
            yield

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the module, as one device would save it."""
        if not isinstance(self._steps, FullyShardedModule):
            return super().lightning_module_state_dict()
        state = fully_shard.full_state_dict(self._steps)  # type: ignore[call-overload]
        return {name.removeprefix("module."): value for name, value in state.items()}

    def optimizer_state(self, optimizer: Any) -> Any:
        """Returns the state dict of the optimizer, as one device would save it."""
        state = super().optimizer_state(optimizer)
        return full_copy(state, {}) if isinstance(self._steps, FullyShardedModule) else state

    # ---- there is one process ----------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns its argument."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns its argument."""
        return decision

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns its argument."""
        return obj


# ---- in a replica ----------------------------------------------------------------------------------------------------


class _Steps(nn.Module):
    """Runs a step of a module by its name. It has the form, so that checkpoints have the module's own names."""

    def __init__(self, module: nn.Module, form_and_slots: tuple[str, list[torch.device]]) -> None:
        super().__init__()
        self.module, self.form_and_slots = module, form_and_slots

    def forward(self, step: str, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Returns the output of the step, what it has logged, and with which settings, both by the logged names."""
        module: Any = self.module
        logged: dict[str, dict[str, Tensor]] = {}
        settings: dict[str, Any] = {}
        samples = number_of_samples((args, kwargs), 0)

        def log(name: str, value: Any, *, batch_size: int | None = None, **others: Any) -> None:
            if not isinstance(value, (int, float, Tensor)):
                raise TypeError(
                    f"log({name!r}): a {type(value).__name__} in a step that runs in a replica: log a number or a "
                    "tensor with one element, or log it in a hook such as on_validation_epoch_end"
                )
            value = torch.as_tensor(value, device=module.device)
            value = value if others.get("enable_graph") else value.detach()
            logged[name] = {"value": value.reshape(1), "samples": torch.tensor([samples])}
            if batch_size is not None:
                logged[name]["batch_size"] = torch.tensor([batch_size])
            settings[name] = others

        device, module._device = module.device, current_device(module.device)
        vars(module)["log"] = log
        try:
            return getattr(module, step)(*args, **kwargs), logged, settings
        finally:  # without replicas this is the module itself
            del vars(module)["log"]
            module._device = device


_running: weakref.WeakValueDictionary[int, _Steps] = weakref.WeakValueDictionary()
"""By a module's id: the object that runs it, for as long as a strategy has it. It keeps the module alive."""


def _combined(values: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """Combines what the replicas have logged under one name."""
    rule = settings.get("reduce_fx", "mean")
    rule = rule if isinstance(rule, str) else getattr(rule, "__name__", "mean")
    value = values["value"]
    if rule in ("sum", "max", "min"):
        return getattr(value, rule)()
    if not value.is_floating_point():
        value = value.to(torch.get_default_dtype())
    shares = values["samples"].to(value)
    return (value * (shares / shares.sum())).sum()


def _batch_size(values: dict[str, Tensor]) -> dict[str, int]:
    """Returns the argument ``batch_size`` of ``log``, if the step has passed it."""
    return {"batch_size": int(values["batch_size"].sum())} if "batch_size" in values else {}
