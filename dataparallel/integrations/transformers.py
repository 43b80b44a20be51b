"""`OnSlots` has a ``Trainer`` of transformers, or any class derived from it, train on slots. It needs transformers.

The trainer's own code sees one device, which gets the whole batch. `LossByItems` combines the losses of the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from dataparallel.batches.batch_types import register_batch
from dataparallel.call.scalars import Scalars
from dataparallel.devices import DeviceLike, resolve_slots
from dataparallel.forms.data_parallel import DataParallel
from dataparallel.forms.fully_shard import fully_shard
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.forms.managed import ManagedModule, register_forward_method, state_of
from dataparallel.forms.replicate import replicate
from dataparallel.integrations.accelerate import Accelerator
from dataparallel.integrations.form_names import Form, check_form
from dataparallel.integrations.packing import unpacked

_Trainer: Any = object  # what a subclass adds as its second base


class OnSlots(_Trainer):
    """The first base of a trainer that trains on slots: ``class SlotsTrainer(OnSlots, Trainer): pass``.

    The trainer takes two more arguments, ``devices`` and ``form``. What it logs, learns, predicts and saves is that of
    one device with the whole batch. As for a ``Trainer`` with several GPUs, ``per_device_train_batch_size`` and
    ``per_device_eval_batch_size`` are the number of samples for each slot, and ``args.n_gpu`` the number of slots.

    The trainer gives the model its form, or takes a model that has one. ``trainer.model`` is the model itself.
    Except with `DataParallel`, accumulated gradients wait on their slots.

    Args:
        model: as for the trainer, or a model with any of the three forms. The trainer sets ``scalars`` and
            ``output_device`` of that form, and ``pad`` of ``generate``.
        devices: the slots, as for `DataParallel`. Default: all accelerators; without any, the trainer is what it is
            without this class.
        form: ``"replicate"``, which is the default, ``"DataParallel"`` or ``"fully_shard"``. The last one makes a unit
            of each block, which are the modules that the model's ``_no_split_modules`` names, and one of the rest. For
            other units or options give the model its form yourself.
        args, kwargs: those of the trainer.

    Raises:
        ValueError: ``form`` is another string; ``devices`` or ``form`` is given for a model that has a form; devices
            are wrong as for `DataParallel`.
    """

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        devices: Sequence[DeviceLike] | None = None,
        form: Form | None = None,
        **kwargs: Any,
    ) -> None:
        if form is not None:
            check_form(form)
        self._form, self._wrapper = form or "replicate", None
        if isinstance(model, (DataParallel, ManagedModule)):
            if devices is not None or form is not None:
                raise ValueError(
                    f"devices={devices}, form={form!r}: this {type(model).__name__} has a form and slots already; "
                    "pass it without these arguments, or pass a plain model"
                )
            devices = (model.device_ids if isinstance(model, DataParallel) else state_of(model).slots) or None
        if isinstance(model, DataParallel):
            self._form, self._wrapper, model = "DataParallel", model, model.module
        self._slots = resolve_slots(devices)
        self._n_gpu = 1  # trainers of other libraries refuse more while they are made
        super().__init__(model, *args, **kwargs)
        if self._slots:
            self._n_gpu = self.args._n_gpu = len(self._slots)
            self._train_batch_size = self.args.train_batch_size
            self._put_on_slots(self.model)

    # ---- the model and its form --------------------------------------------------------------------------------------

    def _put_on_slots(self, model: Any) -> None:
        """Gives the model its form, unless it has one, and makes the form's calls return what the trainer expects."""
        if self._form == "DataParallel":
            if self._wrapper is None or self._wrapper.module is not model:
                self._wrapper = DataParallel(model, self._slots)
        elif not isinstance(model, ManagedModule):
            if self._form == "fully_shard":
                _shard_blocks(model, self._slots)
            else:
                replicate(model, devices=self._slots)
        scalars, device = Scalars(_loss_by_items(model, self._wrapper or model).combine), self.args.device
        if self._wrapper is not None:
            self._wrapper._scalars, self._wrapper.output_device = scalars, device
            self._wrapper = self.accelerator.prepare(self._wrapper)  # for mixed precision; the trainer prepares others
        else:
            options = state_of(model).options
            options.scalars, options.output_device = scalars, device
            if hasattr(model, "generate"):
                register_forward_method(model, "generate", pad=_padding_token(model, {}))

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's, with an accelerator that knows the forms."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        if self._slots:
            assert self.args.n_gpu >= 0  # sets `_n_gpu` if nobody has asked for it before
            self.args._n_gpu = self._n_gpu

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As the trainer's, and gives the model its form."""
        model = super().call_model_init(*args, **kwargs)
        if self._slots:
            self._put_on_slots(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._form != "fully_shard" and not isinstance(model, FullyShardedModule):  # no device has room for those
            super()._move_model_to_device(model, self._slots[0] if self._slots else device)

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if self._wrapper is not None and (model is self._wrapper or model is self._wrapper.module):
            return self._wrapper
        with self._as_one_device():
            return super()._wrap_model(model, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and isinstance(self.model, FullyShardedModule):
            state_dict = fully_shard.full_state_dict(self.model)  # type: ignore[call-overload]
        super()._save(output_dir, state_dict)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As the trainer's, and makes a row of each sequence of a packed batch, so that it can be split."""
        inputs = super()._prepare_inputs(inputs)
        return unpacked(inputs, _padding_token(self.model, {})) if self._slots else inputs

    # ---- losses, which the trainer would divide by the number of GPUs ------------------------------------------------

    @contextmanager
    def _as_one_device(self) -> Iterator[None]:
        before, self.args._n_gpu = self.args.n_gpu, min(self.args.n_gpu, 1)
        try:
            yield
        finally:
            self.args._n_gpu = before

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's on one device."""
        with self._as_one_device():
            return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the trainer's on one device."""
        with self._as_one_device():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's on one device. What the model generates is generated on the slots."""
        with self._as_one_device(), self._generating({**getattr(self, "_gen_kwargs", {}), **kwargs}):
            return super().prediction_step(*args, **kwargs)

    @contextmanager
    def _generating(self, settings: Mapping[str, Any]) -> Iterator[None]:
        if not self._slots or not hasattr(self.model, "generate"):
            yield
            return
        token = _padding_token(self.model, settings)
        if self._wrapper is None:
            register_forward_method(self.model, "generate", pad=token)
            yield
            return
        on_slots = DataParallel(_Generate(self.model), self._slots, self.args.device, pad=token)
        self.model.generate = lambda *args, **kwargs: on_slots(*args, **kwargs)
        try:
            yield
        finally:
            del self.model.generate


# ---- the losses of the chunks ----------------------------------------------------------------------------------------


class LossByItems:
    """Combines the losses of the chunks of a batch as one device would, for models that return their own loss.

    A chunk counts by its items, which are the labels that are not masked, and without labels by its samples. With the
    argument ``num_items_in_batch`` most models return a sum divided by it, and some a mean over their own items all the
    same. So each chunk gets another number: the one that the batch would have if all chunks were like this one. Then
    both kinds of losses are means over the items of the chunk, up to a factor that all chunks share. The mean of the
    chunks' losses, weighted by their items, is the loss of one device.

    Args:
        shifts: true if the loss compares with the labels that come one token later.

    Attributes:
        items: the number of items of each sample of the batch; ``None`` without labels.
    """

    def __init__(self, shifts: bool) -> None:
        self._shifts = shifts
        self.items: Tensor | None = None
        register_batch(_ItemsInBatch, size=lambda batch: len(batch.items), split=_ItemsInBatch.split, merge=_no_merge)

    def before_call(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A forward pre-hook of a model that has a form: counts the items of the batch."""
        self.items = None
        labels = kwargs.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() == 0:
            return args, kwargs
        if isinstance(kwargs.get("shift_labels"), Tensor):
            labels = kwargs["shift_labels"]
        elif self._shifts and labels.dim() > 1 and labels.shape[-1] > 1:
            labels = labels[..., 1:]
        self.items = labels.ne(-100).unsqueeze(-1).flatten(1).sum(1)
        number = kwargs.get("num_items_in_batch")
        if number is None:
            return args, kwargs
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        number = torch.as_tensor(number, dtype=dtype, device=self.items.device)
        return args, {**kwargs, "num_items_in_batch": _ItemsInBatch(number, self.items)}

    def combine(self, values: Tensor, samples: tuple[int, ...]) -> Tensor:
        """What ``scalars=`` takes: the mean of ``values``, weighted by items, or by ``samples`` without labels."""
        items = torch.tensor(samples) if self.items is None else _of_chunks(self.items, samples)
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        weights = items.to(values) / items.sum().clamp(min=1).to(values.device)
        # A chunk without any item may have no loss (0 / 0), and counts nothing.
        return torch.where(weights > 0, values * weights, 0).sum()


class _ItemsInBatch:
    """The argument ``num_items_in_batch`` of a call that will be split: each chunk gets a number of its own."""

    def __init__(self, number: Tensor, items: Tensor) -> None:
        self.number, self.items = number, items

    def split(self, sizes: Sequence[int]) -> list[Tensor]:
        """Returns the number that the batch would have if all of its chunks were like this one, for each chunk."""
        items = _of_chunks(self.items, sizes).clamp(min=1)
        return [*(self.number * items / self.items.sum().clamp(min=1)).unbind()]

    def to(self, device: torch.device) -> Tensor:
        """Returns the number itself: the batch is one chunk."""
        return self.number.to(device)


def _no_merge(parts: Any) -> Any:
    raise TypeError("a model returned num_items_in_batch, which is for its loss only")


def _of_chunks(items: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack([chunk.sum() for chunk in items.split([*sizes])])


def _loss_by_items(model: nn.Module, called: nn.Module) -> LossByItems:
    """Returns the `LossByItems` whose hook ``called`` has, the model or the wrapper around it. Adds one if need be."""
    for hook in called._forward_pre_hooks.values():
        if isinstance(owner := getattr(hook, "__self__", None), LossByItems):
            return owner
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    loss = LossByItems(shifts=is_decoder and getattr(model, "loss_function", None) is ForCausalLMLoss)
    called.register_forward_pre_hook(loss.before_call, with_kwargs=True)
    return loss


# ---- forms -----------------------------------------------------------------------------------------------------------


def _shard_blocks(model: nn.Module, slots: Sequence[torch.device]) -> None:
    """Applies `fully_shard` to the blocks of a model of transformers, then to the model."""
    names = {*(getattr(model, "_no_split_modules", None) or ())}
    for module in reversed([*model.modules()]):  # children before their parents
        if type(module).__name__ in names and module is not model:
            fully_shard(module, devices=slots)
    fully_shard(model, devices=slots)


# ---- generate --------------------------------------------------------------------------------------------------------


class _Generate(nn.Module):
    """Its ``forward`` is ``generate`` of a model, for a `DataParallel`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the replica of the model generates."""
        model: Any = self.model
        return type(model).generate(model, *args, **kwargs)


def _padding_token(model: Any, settings: Mapping[str, Any]) -> int:
    """Returns the token with which one device fills sequences that end early, with these arguments of ``generate``."""
    config = settings.get("generation_config") or getattr(model, "generation_config", None)
    names = ("pad_token_id", "eos_token_id")
    ends = [token for name in names for token in (settings.get(name), getattr(config, name, None))]
    token: Any = next((end for end in ends if end is not None), 0)
    return token[0] if isinstance(token, (list, tuple)) else token
