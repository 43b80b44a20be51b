"""`LossByItems` combines the losses of the chunks of a batch. `known_items` says what models of transformers divide by.

A loss that a model computes itself is a mean over items, such as tokens, or a sum. Nothing in the loss says which.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from dataparallel.batches.structures import number_of_samples, register_batch
from dataparallel.devices import CPU
from dataparallel.replicas.plan import original_class
from dataparallel.user_warnings import warn_user

Items: TypeAlias = 'Tensor | Literal["mean", "sum"] | None'
"""For each sample the number of items that a loss divides by; ``"mean"``: one each; ``"sum"``; ``None``: unknown."""


class LossByItems:
    """Combines the losses of the chunks of a batch as one device would, for models that return their own loss.

    The mean of the chunks' losses, weighted by their items, is the loss of one device. With the argument
    ``num_items_in_batch`` most models return a sum divided by it, and some a mean over their own items all the same. So
    each chunk gets another number: the one that the batch would have if all chunks were like this one. Then both kinds
    of losses are means over the items of the chunk, up to a factor that all chunks share.
    """

    def __init__(self, items_of: Callable[[Mapping[str, Any]], Items], name: str) -> None:
        self.items_of, self._name = items_of, name
        self._items: Items = None
        self._has_told = False
        register_batch(_ItemsInBatch, size=lambda batch: len(batch.items), split=_ItemsInBatch.split, merge=_no_merge)

    def before_call(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A forward pre-hook of a model that has a form: asks for the items of the batch."""
        self._items = items = self.items_of(kwargs)
        samples, number = number_of_samples((args, kwargs), 0), kwargs.get("num_items_in_batch")
        if isinstance(items, Tensor) and items.shape != (samples,):
            shape = tuple(items.shape)
            raise ValueError(
                f"loss_items returned a tensor of shape {shape}; expected one of {samples} samples: ({samples},)"
            )
        if not (items is None or isinstance(items, Tensor) or items in ("mean", "sum")):
            raise TypeError(
                f"loss_items returned {items!r}: expected a tensor with a number for each sample, 'mean', 'sum' or None"
            )
        if number is None or (isinstance(items, str) and items == "sum"):
            return args, kwargs
        if not isinstance(items, Tensor):
            items = torch.ones(samples, dtype=torch.int64, device=CPU)
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        number = torch.as_tensor(number, dtype=dtype, device=items.device)
        return args, {**kwargs, "num_items_in_batch": _ItemsInBatch(number, items)}

    def combine(self, values: Tensor, samples: tuple[int, ...]) -> Tensor:
        """What ``scalars=`` takes: the sum of ``values``, or their mean weighted by items, or by ``samples``."""
        items = self._items
        if isinstance(items, str) and items == "sum":
            return values.sum()
        if items is None and len(values) > 1 and not self._has_told:
            self._has_told = True
            warn_user(
                f"{self._name} returns a loss, and it is not known what it divides by. Each chunk of the batch counts "
                "by its samples, which is right for a mean over samples only. Give the trainer scalars='mean', 'sum' "
                "or a function, or a method loss_items(inputs) that returns the number of items of each sample"
            )
        counts = _of_chunks(items, samples) if isinstance(items, Tensor) else torch.tensor(samples, device=CPU)
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        counts = counts.to(values.device, torch.promote_types(values.dtype, torch.float32))
        weights = counts / counts.sum()
        # A chunk without any item may have no loss (0 / 0), and counts nothing.
        return torch.where(weights == 0, 0, values * weights).sum().to(values.dtype)


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


# ---- what models of transformers divide by ---------------------------------------------------------------------------

_WORDS = "CausalLM|ConditionalGeneration|MaskedLM|TokenClassification|SpeechToText|TextToText|EncoderDecoder|MT|LMHead"
_CLASSES = "(?:Sequence|Image|Video|Audio)Classification|MultipleChoice|NextSentencePrediction"
_HEADS = re.compile(
    f"(?:For)?({_WORDS}|{_CLASSES}|QuestionAnswering|SemanticSegmentation|AudioFrameClassification|CTC)(?:Model)?$"
)

# A forward that names none of these computes its loss elsewhere.
_LOSSES = {"CrossEntropyLoss", "mlm_loss_fct", "binary_cross_entropy_with_logits", "ctc_loss"}
_OTHER_MASKS = {"active_loss", "bbox_first_token_mask", "shift_labels"}  # variables of forwards that drop more items
_MORE_TERMS = ("output_router_logits", "z_loss_coefficient")  # settings that add to a loss what has other items


def known_items(model: Any, inputs: Mapping[str, Any]) -> Items:
    """Returns over which items a model of transformers takes the mean, for a batch with these keyword arguments.

    It is known for losses that transformers computes, not for those of other people's classes or functions: causal,
    masked and sequence to sequence language models, classification, semantic segmentation, connectionist temporal
    classification, and questions whose answers are spans. It is unknown if a batch or a setting adds another term.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and not adapter.is_prompt_learning:  # prompts are more tokens with labels
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        return None
    head, in_forward = _head(model)
    config: Any = model.config.get_text_config()
    has_others = any(re.search("label|loss", name) for name in inputs.keys() - {"labels", "shift_labels"})
    if head is None or has_others or any(inputs.get(name) or getattr(config, name, None) for name in _MORE_TERMS):
        return None
    if head == "QuestionAnswering":
        return _answers(inputs)
    labels: Any = inputs.get("labels")
    if labels is None or head == "AudioFrameClassification":
        return "mean"  # there is no loss, or one over frames, of which each sample has as many
    if head == "CTC":
        reduction: Any = getattr(model.config, "ctc_loss_reduction", None)
        return reduction if reduction in ("mean", "sum") else None  # the mean is one over samples
    if not isinstance(labels, Tensor):
        return None
    if head == "SemanticSegmentation":
        names = ("semantic_loss_ignore_index", "loss_ignore_index")
        ignored = next((getattr(model.config, name) for name in names if hasattr(model.config, name)), None)
        if ignored is None or model.config.num_labels == 1:
            return None if ignored is None else "mean"
        return labels.ne(ignored).flatten(1).sum(1)
    if re.fullmatch(_CLASSES, head):
        is_number = head.endswith("Classification") and model.config.num_labels == 1
        if is_number or labels.is_floating_point() or model.config.problem_type == "regression":
            return "mean"
        return labels.ge(0).flatten() if labels.numel() == len(labels) else None
    if not re.fullmatch(_WORDS, head):
        return None
    if isinstance(inputs.get("shift_labels"), Tensor):
        labels = inputs["shift_labels"]
    elif head == "CausalLM" and not in_forward:
        is_shifted = not any(getattr(each, "is_encoder_decoder", False) for each in (model.config, config))
        labels = labels[..., is_shifted:]
    return labels.ge(0).sum(1) if labels.dim() == 2 else None


def _head(model: Any) -> tuple[str | None, bool]:
    """Returns the name of the head whose loss ``forward`` computes, and whether by itself, not by ``loss_function``."""
    forward: Any = inspect.unwrap(original_class(type(model)).forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return None, True
    names = {*code.co_names, *code.co_varnames}
    if "loss_function" in names:
        known = (name for name, function in LOSS_MAPPING.items() if function is model.loss_function)
        return next(known, "").removeprefix("For") or None, False
    found = _HEADS.search(forward.__qualname__.removesuffix(".forward"))
    is_plain = forward.__module__.startswith("transformers.") and names & _LOSSES and not names & _OTHER_MASKS
    return found[1] if found and is_plain else None, True


def _answers(inputs: Mapping[str, Any]) -> Items:
    """Positions behind the text are ignored. If starts and ends are not ignored together, no weights fit both means."""
    names = ("start_positions", "end_positions", "input_ids", "decoder_input_ids")
    starts, ends, words, of_decoder = map(inputs.get, names)
    words = words if of_decoder is None else of_decoder  # a decoder finds the answers in its own text
    if starts is None or ends is None:
        return "mean"  # there is no loss
    if words is None:
        return None
    have_starts, have_ends = (positions.flatten() < words.shape[1] for positions in (starts, ends))
    if "pixel_values" in inputs and not have_starts.all():
        return None  # the picture may lie behind the text, with positions of its own
    return have_starts if torch.equal(have_starts, have_ends) else None
