"""`OnSlots` has a ``Trainer`` of transformers, or any class derived from it, train on slots. It needs transformers.

The trainer's own code sees one device, which gets the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.arguments import checked
from dataparallel.call.options import ScalarRule, scalar_rule
from dataparallel.devices import CPU, DeviceLike, resolve_slots
from dataparallel.forms.data_parallel import DataParallel, own_options
from dataparallel.forms.fully_shard import fully_shard
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.forms.managed import ManagedModule, name_of_form, register_forward_method, state_of
from dataparallel.forms.replicate import replicate
from dataparallel.integrations import NAMES, Form
from dataparallel.integrations.accelerate import Accelerator
from dataparallel.integrations.transformers_losses import Items, LossByItems, known_items

_Trainer: Any = object  # what a subclass adds as its second base


class OnSlots(_Trainer):
    """The first base of a trainer that trains on slots: ``class SlotsTrainer(OnSlots, Trainer): pass``.

    The trainer takes two more arguments, ``devices`` and ``form``. What it logs, learns, predicts and saves is that of
    one device with the whole batch. As for a ``Trainer`` with several GPUs, ``per_device_train_batch_size`` and
    ``per_device_eval_batch_size`` are the number of samples for each slot, and ``args.n_gpu`` the number of slots.

    The trainer gives the model its form, or takes a model that has one. ``trainer.model`` is the model itself.
    Except with `DataParallel`, accumulated gradients wait on their slots.

    A loss that the model returns has to be put together from those of the chunks: see :doc:`/guide/frameworks`.

    Args:
        model: as for the trainer, or a model with any of the three forms. The trainer sets ``output_device`` of that
            form, ``pad`` of ``generate``, and ``scalars`` unless the form was given some.
        devices: the slots, as for `DataParallel`. Default: all accelerators; without any, the trainer is what it is
            without this class.
        form: ``"replicate"``, which is the default, ``"DataParallel"`` or ``"fully_shard"``. The last one makes
            units of the model's blocks, as ``units="auto"`` does. For other units or options give the model its form
            yourself.
        scalars: how the losses of the chunks become one, as for `DataParallel`; default: by `loss_items`.
        args, kwargs: those of the trainer.

    Raises:
        ValueError: ``form`` is another string; the model has a form, and others than its ``devices``, ``form`` or
            ``scalars`` are given; devices or ``scalars`` are wrong as for `DataParallel`; CPU slots, and arguments that
            put the trainer on an accelerator.
    """

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        devices: Sequence[DeviceLike] | None = None,
        form: Form | None = None,
        scalars: ScalarRule = None,
        **kwargs: Any,
    ) -> None:
        checked("form", form, *NAMES, None)
        self._scalars = scalar_rule(scalars)
        self._form, self._wrapper = form or "replicate", None
        if isinstance(model, (DataParallel, ManagedModule)):
            is_wrapper = isinstance(model, DataParallel)
            options = own_options(model) if is_wrapper else state_of(model).options
            has_form = "DataParallel" if is_wrapper else name_of_form(model)
            is_same = (
                form in (None, has_form)
                and (devices is None or resolve_slots(devices) == resolve_slots(options.slots or None))
                and (scalars is None or self._scalars == scalar_rule(options.scalars))
            )
            if not is_same:
                raise ValueError(
                    f"devices={devices}, form={form!r}, scalars={scalars!r}: this {type(model).__name__} has a form "
                    f"and slots already, {has_form!r} on {[*map(str, options.slots)]} scalars={options.scalars!r}. "
                    "Pass it without these arguments or with the same ones, or pass a plain model"
                )
            devices = options.slots or None
        if isinstance(model, DataParallel):
            self._form, self._wrapper, model = "DataParallel", model, model.module
        self._slots = resolve_slots(None, devices)
        self._n_gpu = 1  # trainers of other libraries refuse more while they are made
        super().__init__(model, *args, **kwargs)
        if self._slots:
            if self._slots[0] == CPU != self.args.device:
                raise ValueError(
                    f"devices={[*map(str, self._slots)]} are CPU slots, and the arguments put the trainer on "
                    f"{self.args.device}: pass TrainingArguments(use_cpu=True)"
                )
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
                fully_shard(model, devices=self._slots, units="auto")
            else:
                replicate(model, devices=self._slots)
        device = self.args.device
        if self._wrapper is not None:
            options = own_options(self._wrapper)
            options.scalars, self._wrapper.output_device = self._rule(options.scalars, self._wrapper), device
            self._wrapper = self.accelerator.prepare(self._wrapper)  # for mixed precision; the trainer prepares others
        else:
            options = state_of(model).options
            options.scalars, options.output_device = self._rule(options.scalars, model), device
            if hasattr(model, "generate"):
                register_forward_method(model, "generate", pad=_padding_token(model, {}))

    def _rule(self, given: ScalarRule, called: nn.Module) -> ScalarRule:
        """Returns the rule for scalars that ``called`` will have, the model or the wrapper around it."""
        loss = getattr(given, "__self__", None)
        if isinstance(loss, LossByItems):  # of a trainer that had the model before
            loss.items_of = self.loss_items
        elif given is not None or self._scalars is not None:
            return self._scalars if given is None else given
        else:
            loss = LossByItems(self.loss_items, type(getattr(called, "module", called)).__name__)
            called.register_forward_pre_hook(loss.before_call, with_kwargs=True)
        return loss.combine

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's, with an accelerator that knows the forms."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        if self._slots:
            assert self.args.n_gpu >= 0  # sets `_n_gpu` if nobody has asked for it before
            self.args._n_gpu = self._n_gpu

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
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
        with _full_states(self.model) if isinstance(self.model, FullyShardedModule) else nullcontext():
            super()._save(output_dir, state_dict)

    def loss_items(self, inputs: Mapping[str, Any]) -> Items:
        """Returns over which items the model's own loss of a batch is a mean. Override it for a loss of your own.

        Args:
            inputs: the keyword arguments of the model, with the whole batch.

        Returns:
            A tensor with the number of items of each sample, such as its tokens with a label; ``"mean"`` if each sample
            is one item; ``"sum"`` if the loss is a sum; ``None`` if it is not known. The weights of the items of a
            weighted mean may be added up instead.
        """
        return known_items(self.model, inputs)

    # ---- losses, which the trainer would divide by the number of GPUs ------------------------------------------------

    @contextmanager
    def _as_one_device(self) -> Iterator[None]:
        before, self.args._n_gpu = self.args.n_gpu, min(self.args.n_gpu, 1)
        try:
            yield
        finally:
            self.args._n_gpu = before

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_one_device():
            return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
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


@contextmanager
def _full_states(model: Any) -> Iterator[None]:
    """Inside the block the ``state_dict()`` of the model, and of each of its modules, has full tensors."""
    full = fully_shard.full_state_dict(model)
    with ExitStack() as stack:
        for path, module in model.named_modules():

            def fill(module: nn.Module, state: Any, prefix: str, _: Any, path: str = path) -> None:
                for name in (*module._parameters, *module._buffers):
                    if prefix + name in state:
                        state[prefix + name] = full[f"{path}.{name}" if path else name]

            stack.callback(module.register_state_dict_post_hook(fill).remove)
        yield


class _Generate(nn.Module):
    """Its ``forward`` is ``generate`` of a model, for a `DataParallel`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        return type(model).generate(model, *args, **kwargs)


def _padding_token(model: Any, settings: Mapping[str, Any]) -> int:
    """Returns the token with which one device fills sequences that end early, with these arguments of ``generate``."""
    config = settings.get("generation_config") or getattr(model, "generation_config", None)
    names = ("pad_token_id", "eos_token_id")
    ends = [token for name in names for token in (settings.get(name), getattr(config, name, None))]
    token: Any = next((end for end in ends if end is not None), 0)
    return token[0] if isinstance(token, (list, tuple)) else token
