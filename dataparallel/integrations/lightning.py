"""`SlotsStrategy` has Lightning's ``Trainer`` run the steps of a module on slots. It needs Lightning."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from dataparallel.arguments import checked
from dataparallel.batches.structures import number_of_samples
from dataparallel.devices import CPU, DeviceLike, current_device, resolve_slots
from dataparallel.forms.data_parallel import DataParallel
from dataparallel.forms.full_state import full_copy
from dataparallel.forms.fully_shard import fully_shard
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.forms.replicate import ReplicatedModule, replicate
from dataparallel.integrations import NAMES, Form
from dataparallel.samples import samples
from dataparallel.user_warnings import warn_user


class SlotsStrategy(ParallelStrategy):
    """``Trainer(strategy=SlotsStrategy())`` runs the steps of a ``LightningModule`` on all slots.

    ``training_step``, ``validation_step``, ``test_step`` and ``predict_step`` run in replicas, each with its chunk of
    the batch. Scalars that they return, such as the loss, become one as ``scalars`` says. Tensors are joined. What they
    log with ``self.log`` becomes the mean over the samples, or what ``reduce_fx`` says if that is a sum, a maximum or a
    minimum, and is logged once. Accumulated gradients wait on their slots, except with `DataParallel`. Checkpoints are
    those of one device. ``Trainer(sync_batchnorm=True)`` is the option ``sync_batch_norm`` of the form.
    :doc:`/guide/frameworks` says what differs from one device.

    Args:
        devices: the slots, as for `DataParallel`. Default: all accelerators; without any, steps run on the CPU.
        form: ``"replicate"``, ``"DataParallel"`` or ``"fully_shard"``.
        scalars: how the losses of the chunks become one, as for `DataParallel`; default: ``"mean"``. It has to fit what
            the steps return: ``"sum"`` for a sum over the batch. Without it a strategy for several slots warns.
        options: further options of the form, such as ``chunk_sizes``.

    Raises:
        ValueError: ``form`` is another string; devices as for `DataParallel`. In ``fit``: the module optimises by hand.
    """

    strategy_name = "slots"

    def __init__(self, devices: Sequence[DeviceLike] | None = None, form: Form = "replicate", **options: Any) -> None:
        checked("form", form, *NAMES)
        slots = resolve_slots(None, devices)
        super().__init__(parallel_devices=slots or [CPU])
        if len(slots) > 1 and "scalars" not in options:
            warn_user(
                "SlotsStrategy takes a loss that a step returns for a mean over the samples of its chunk: the loss of "
                'the batch is the mean in which each chunk counts by its samples. If that is so, pass scalars="mean". '
                'Pass scalars="sum" if a step returns a sum. For a mean over other items, such as tokens that are no '
                "padding, return the sum divided by the number of items in the batch, "
                'dataparallel.peers.all_reduce(items_of_the_chunk), and pass scalars="sum"'
            )
        self._slots, self._form, self._options = slots, form, {"scalars": "mean", **options}
        self._steps: Any = None

    # ---- where the module is -----------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
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
        if self._form != "fully_shard":
            self.lightning_module.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        devices, running = self._slots or None, _running.get(id(model))
        if self._layer_sync is not None:  # of ``Trainer(sync_batchnorm=True)``
            self._options["sync_batch_norm"] = True
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
        module: Any = self.lightning_module
        lists = {key: value for key, value in vars(module).items() if type(value) is list}
        appended: dict[str, list[Any]] = {key: [] for key in lists}
        with context:
            output, logged = self._steps(name, appended, *args, **kwargs)
        for key, values in appended.items():
            lists[key] += values
        for key in dict.fromkeys(entry["name"] for entry in logged):
            _log(module, [entry for entry in logged if entry["name"] == key])
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside the block gradients wait on their slots. The trainer calls this while it accumulates."""
        waits = isinstance(self._steps, (ReplicatedModule, FullyShardedModule))
        with self._steps.no_sync() if waits else nullcontext():
            yield

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not isinstance(self._steps, FullyShardedModule):
            return super().lightning_module_state_dict()
        state = fully_shard.full_state_dict(self._steps)  # type: ignore[call-overload]
        return {name.removeprefix("module."): value for name, value in state.items()}

    def optimizer_state(self, optimizer: Any) -> Any:
        state = super().optimizer_state(optimizer)
        return full_copy(state, {}) if isinstance(self._steps, FullyShardedModule) else state

    # ---- there is one process ----------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


# ---- in a replica ----------------------------------------------------------------------------------------------------


class _Steps(nn.Module):
    """Runs a step of a module by its name. It has the form, so that checkpoints have the module's own names."""

    def __init__(self, module: nn.Module, form_and_slots: tuple[str, list[torch.device]]) -> None:
        super().__init__()
        self.module, self.form_and_slots = module, form_and_slots
        self._signature_of_log = inspect.signature(LightningModule.log)

    def forward(self, step: str, appended: dict[str, list[Any]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What the step appends to lists of the module is put into ``appended``, which the call hands back."""
        module: Any = self.module
        logged: dict[str, dict[str, Any]] = {}
        own, samples_here = vars(module), number_of_samples((args, kwargs), 0)

        def log(*given: Any, **named: Any) -> None:
            bound = self._signature_of_log.bind(module, *given, **named).arguments
            bound.pop("self")
            name, value, batch_size = bound.pop("name"), bound.pop("value"), bound.pop("batch_size", None)
            if not isinstance(value, (int, float, Tensor)):
                raise TypeError(
                    f"log({name!r}): a {type(value).__name__} in a step that runs in a replica: log a number or a "
                    "tensor with one element, or log it in a hook such as on_validation_epoch_end"
                )
            value = torch.as_tensor(value, device=module.device)
            value = value if bound.get("enable_graph") else value.detach()
            entry = {"name": name, "value": value.reshape(()), "samples": samples_here, "batch_size": batch_size}
            logged[name] = {**entry, "settings": bound}

        device, module._device = module.device, current_device(module.device)
        lists = {name: own[name] for name in appended}
        own.update({name: [*values] for name, values in lists.items()}, log=log)
        try:
            output = getattr(module, step)(*args, **kwargs)
            for name, values in lists.items():
                appended[name] += own[name][len(values) :]
            return output, samples([*logged.values()])
        finally:  # without replicas this is the module itself
            del own["log"]
            own.update(lists)
            module._device = device


_running: weakref.WeakValueDictionary[int, _Steps] = weakref.WeakValueDictionary()
"""By a module's id: the object that runs it, for as long as a strategy has it. It keeps the module alive."""


def _log(module: Any, entries: list[dict[str, Any]]) -> None:
    """Logs what the replicas have logged under one name; not all of them may have."""
    first, weights = entries[0], [entry["samples"] for entry in entries]
    sizes = [entry["batch_size"] for entry in entries if entry["batch_size"] is not None]
    value = torch.stack([entry["value"] for entry in entries])
    rule = first["settings"].get("reduce_fx", "mean")
    rule = rule if isinstance(rule, str) else getattr(rule, "__name__", "mean")
    if rule in ("sum", "max", "min"):
        value = getattr(value, rule)()
    else:
        value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
        value = (value * (value.new_tensor(weights) / sum(weights))).sum()
    module.log(first["name"], value, **first["settings"], **({"batch_size": sum(sizes)} if sizes else {}))
