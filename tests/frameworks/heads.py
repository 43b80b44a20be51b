"""Heads of transformers that compute a loss: a tiny model of each, and batches whose samples have different items."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from tiny import bert_config, gpt2, t5, tokens
from torch import Tensor, nn

__all__ = ["HEADS", "Head"]

IGNORED = -100
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Head(NamedTuple):
    """``build()`` makes a model, ``batch(samples)`` its arguments. ``is_known``: what its loss divides by is known."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    is_known: bool = True


def random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def made(model: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    return model(config).double()


def of_bert(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: made(getattr(hf, name), bert_config(**settings))


def uneven(labels: Tensor) -> Tensor:
    """The labels, of which the samples of the first chunk keep none, and each other one but the last another number."""
    labels = labels.clone()
    for index in range(len(labels) - 1):
        labels[index].view(-1)[max(index - 2, 0) :] = IGNORED
    return labels


def words(samples: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(samples)}


def labelled_words(samples: int) -> dict[str, Tensor]:
    return {**words(samples), "labels": uneven(tokens(samples, seed=2))}


def labelled(make: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return lambda samples: {**words(samples), "labels": make(samples)}


def classes(samples: int) -> Tensor:
    """The samples of the first chunk have none."""
    labels = torch.arange(samples) % 3
    labels[:3] = labels[4] = IGNORED
    return labels


def numbers(samples: int) -> Tensor:
    return torch.rand(samples, dtype=torch.float64, generator=random())


def spans(outside: Callable[[Tensor, Tensor], None]) -> Callable[[int], dict[str, Tensor]]:
    def batch(samples: int) -> dict[str, Tensor]:
        starts, ends = torch.arange(samples) % 4, torch.arange(samples) % 4 + 1
        outside(starts, ends)
        return {**words(samples), "start_positions": starts, "end_positions": ends}

    return batch


def behind_both(starts: Tensor, ends: Tensor) -> None:
    starts[:2] = ends[:2] = 9


def behind_one(starts: Tensor, ends: Tensor) -> None:
    ends[:2] = 9


def spoken(samples: int) -> dict[str, Tensor]:
    labels = uneven(torch.randint(1, 9, (samples, 5), generator=random()))
    labels[:, 0] = 3
    return {"input_values": torch.randn(samples, 400, dtype=torch.float64, generator=random()), "labels": labels}


def wav2vec2(reduction: str) -> Callable[[], nn.Module]:
    config = hf.Wav2Vec2Config(
        **{"vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4)},
        **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "num_labels": 3},
        **{"mask_time_prob": 0.0, "final_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        **{"feat_proj_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "feat_extract_norm": "layer"},
        ctc_loss_reduction=reduction,
    )
    return lambda: made(hf.Wav2Vec2ForCTC, config)


def pictures(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32, dtype=torch.float64, generator=random())}


def vit() -> nn.Module:
    return made(
        hf.ViTForImageClassification, hf.ViTConfig(image_size=32, patch_size=8, num_labels=3, **SMALL, **NO_DROPOUT)
    )


def segmented(samples: int) -> dict[str, Tensor]:
    labels = torch.randint(0, 3, (samples, 32, 32), generator=random())
    for index in range(samples):
        labels[index, : 5 * index] = 255
    return {**pictures(samples), "labels": labels}


def segformer() -> nn.Module:
    config = hf.SegformerConfig(
        **{"hidden_sizes": [8, 8], "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "strides": [4, 2]},
        **{"num_attention_heads": [1, 2], "patch_sizes": [7, 3], "mlp_ratios": [2, 2], "decoder_hidden_size": 8},
        **{**NO_DROPOUT, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0, "num_labels": 3},
    )
    model = made(hf.SegformerForSemanticSegmentation, config)
    model.decode_head.batch_norm = nn.Identity()  # it would see a part of the batch
    return model


def bart() -> nn.Module:
    config = hf.BartConfig(
        **{"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16},
        **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    )
    return made(hf.BartForCausalLM, config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **{"vocab_size": 50, "max_position_embeddings": 16, **SMALL, "num_key_value_heads": 1},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
        output_router_logits=True,
    )
    return made(hf.MixtralForCausalLM, config)


HEADS = {
    "causal language model": Head(gpt2, labelled_words),
    "causal language model that does not shift": Head(bart, labelled_words),
    "causal language model with a loss of its experts": Head(mixtral, labelled_words, is_known=False),
    "masked language model": Head(of_bert("BertForMaskedLM"), labelled_words),
    "sequence to sequence": Head(t5, labelled_words),
    "sequence classification": Head(of_bert("BertForSequenceClassification"), labelled(classes)),
    "regression": Head(of_bert("BertForSequenceClassification", num_labels=1), labelled(numbers)),
    "question answering": Head(of_bert("BertForQuestionAnswering", num_labels=2), spans(lambda starts, ends: None)),
    "question answering with answers behind the text": Head(
        of_bert("BertForQuestionAnswering", num_labels=2), spans(behind_both)
    ),
    "question answering with ends behind the text": Head(
        of_bert("BertForQuestionAnswering", num_labels=2), spans(behind_one), is_known=False
    ),
    "connectionist temporal classification, sum": Head(wav2vec2("sum"), spoken),
    "connectionist temporal classification, mean": Head(wav2vec2("mean"), spoken),
    "image classification": Head(vit, lambda n: {**pictures(n), "labels": classes(n)}),
    "semantic segmentation": Head(segformer, segmented),
}
