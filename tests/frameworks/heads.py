"""Heads of transformers that compute a loss: a tiny model of each, and batches whose samples have different items."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from tiny import bert_config, gpt2, t5, tokens
from torch import Tensor, nn

__all__ = ["HEADS", "Head"]

IGNORED = -100


class Head(NamedTuple):
    """``build()`` makes a model, ``batch(samples)`` its arguments.

    ``is_known``: what its loss divides by is known. ``refusal``: why the model does not run on slots.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    is_known: bool = True
    refusal: str = ""


def random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def made(model: Any, config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return model(config).double()

    return build


def of_bert(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return made(getattr(hf, name), bert_config(**settings))


def uneven(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """The labels, of which each sample but the last keeps another number."""
    labels = labels.clone()
    for index in range(len(labels) - 1):
        labels[index].view(-1)[index + 1 :] = ignored
    return labels


def words(samples: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(samples)}


def labelled_words(samples: int, classes: int = 50) -> dict[str, Tensor]:
    return {**words(samples), "labels": uneven(tokens(samples, seed=2) % classes)}


def labelled(make: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return lambda samples: {**words(samples), "labels": make(samples)}


def classes(samples: int) -> Tensor:
    """Most of the first samples have none."""
    labels = torch.arange(samples) % 3
    labels[: samples - 2 : 2] = IGNORED
    return labels


def choices(samples: int) -> dict[str, Tensor]:
    ids = tokens(3 * samples).view(samples, 3, -1)
    return {"input_ids": ids, "labels": classes(samples)}


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


def sounds(samples: int) -> Tensor:
    return torch.randn(samples, 400, dtype=torch.float64, generator=random())


def spoken(samples: int) -> dict[str, Tensor]:
    labels = uneven(torch.randint(1, 9, (samples, 5), generator=random()))
    labels[:, 0] = 3
    return {"input_values": sounds(samples), "labels": labels}


def wav2vec2(name: str, **settings: Any) -> Callable[[], nn.Module]:
    config = hf.Wav2Vec2Config(
        **{"vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4)},
        **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "num_labels": 3},
        **{"mask_time_prob": 0.0, "final_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        **{"feat_proj_dropout": 0.0, "activation_dropout": 0.0, "classifier_proj_size": 8, "pad_token_id": 0},
        **{"feat_extract_norm": "layer", "tdnn_dim": (8, 8), "tdnn_kernel": (3, 1), "tdnn_dilation": (1, 1)},
        **{"xvector_output_dim": 8, **settings},
    )
    return made(getattr(hf, name), config)


def pictures(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32, dtype=torch.float64, generator=random())}


def segmented(samples: int) -> dict[str, Tensor]:
    labels = torch.randint(0, 3, (samples, 32, 32), generator=random())
    for index in range(samples):
        labels[index, : 5 * index] = 255
    return {**pictures(samples), "labels": labels}


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEEN = {"image_size": 32, "patch_size": 8, **SMALL, **NO_DROPOUT, "num_labels": 3}


def segformer(**settings: Any) -> Callable[[], nn.Module]:
    config = hf.SegformerConfig(
        **{"hidden_sizes": [8, 8], "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "strides": [4, 2]},
        **{"num_attention_heads": [1, 2], "patch_sizes": [7, 3], "mlp_ratios": [2, 2], "decoder_hidden_size": 8},
        **{**NO_DROPOUT, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0, "num_labels": 3, **settings},
    )

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = hf.SegformerForSemanticSegmentation(config).double()
        model.decode_head.batch_norm = nn.Identity()  # it would see a part of the batch
        return model

    return build


def bart(name: str) -> Callable[[], nn.Module]:
    config = hf.BartConfig(
        **{"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16},
        **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    )
    return made(getattr(hf, name), config)


def encoder_decoder() -> nn.Module:
    decoder = bert_config(is_decoder=True, add_cross_attention=True)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(bert_config(), decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    return made(hf.EncoderDecoderModel, config)()


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **{"vocab_size": 50, "max_position_embeddings": 16, **SMALL, "num_key_value_heads": 1},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
        output_router_logits=True,
    )
    return made(hf.MixtralForCausalLM, config)()


def clip() -> nn.Module:
    text = hf.CLIPTextConfig(vocab_size=50, max_position_embeddings=8, eos_token_id=2, **SMALL)
    vision = hf.CLIPVisionConfig(image_size=32, patch_size=8, **SMALL)
    return made(hf.CLIPModel, hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))()


def texts_and_pictures(samples: int) -> dict[str, Any]:
    return {**words(samples), **pictures(samples), "return_loss": True}


def yolos() -> nn.Module:
    config = hf.YolosConfig(**{**SEEN, "image_size": [32, 32]}, num_detection_tokens=4)
    return made(hf.YolosForObjectDetection, config)().float()  # the weights of its loss are


def boxes(samples: int) -> dict[str, Any]:
    labels = [
        {"class_labels": torch.arange(index % 3 + 1) % 3, "boxes": torch.full((index % 3 + 1, 4), 0.3)}
        for index in range(samples)
    ]
    return {"pixel_values": pictures(samples)["pixel_values"].float(), "labels": labels}


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda samples: torch.rand(samples, *shape, dtype=torch.float64, generator=random())


DECODER = {
    "decoder_hidden_size": 8,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 8,
}


def layout(vision: bool) -> Any:
    config = hf.LayoutLMv3Config(
        **{"vocab_size": 50, "max_position_embeddings": 32, "input_size": 32, "patch_size": 8, **SMALL, **NO_DROPOUT},
        **{"coordinate_size": 3, "shape_size": 2, "visual_embed": vision, "num_labels": 2},
        max_2d_position_embeddings=16,
        **{"has_relative_attention_bias": False, "has_spatial_attention_bias": False},
    )
    return made(hf.LayoutLMv3ForQuestionAnswering, config)


def document(outside: Any, **more: Any) -> Any:
    asked = spans(outside)
    return lambda samples: {
        **asked(samples),
        "bbox": torch.ones(samples, 6, 4, dtype=torch.int64),
        **{key: make(samples) for key, make in more.items()},
    }


def vilt() -> Any:
    config = hf.ViltConfig(
        **{"vocab_size": 50, "max_position_embeddings": 16, "image_size": 32, "patch_size": 8},
        **{"max_image_length": -1, "num_labels": 3},
        **SMALL,
        **NO_DROPOUT,
    )
    return made(hf.ViltForQuestionAnswering, config)()


def framed(samples: int) -> dict[str, Any]:
    frames = wav2vec2("Wav2Vec2ForAudioFrameClassification")()._get_feat_extract_output_lengths(400)
    labels = torch.nn.functional.one_hot(torch.randint(0, 3, (samples, int(frames)), generator=random()), 3)
    return {"input_values": sounds(samples), "labels": labels}


def asked_of_decoder(samples: int) -> dict[str, Any]:
    """Its text is shorter, so that some answers are behind it."""
    batch = spans(behind_the_decoder)(samples)
    return {**batch, "decoder_input_ids": batch["input_ids"][:, :5]}


def behind_the_decoder(starts: Tensor, ends: Tensor) -> None:
    starts[:2] = ends[:2] = 5


def xlnet() -> Any:
    return made(
        hf.XLNetLMHeadModel,
        hf.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16, dropout=0.0, use_mems_eval=False),
    )()


HEADS = {
    "causal language model": Head(gpt2, labelled_words),
    "causal language model that does not shift": Head(bart("BartForCausalLM"), labelled_words),
    "causal language model with a loss of its experts": Head(mixtral, labelled_words, is_known=False),
    "masked language model": Head(of_bert("BertForMaskedLM"), labelled_words),
    "sequence to sequence": Head(t5, labelled_words),
    "encoder and decoder": Head(encoder_decoder, labelled_words),
    "token classification": Head(of_bert("BertForTokenClassification"), lambda n: labelled_words(n, classes=3)),
    "token classification with a loss function": Head(
        made(
            hf.LlamaForTokenClassification, hf.LlamaConfig(vocab_size=50, num_labels=3, classifier_dropout=0.0, **SMALL)
        ),
        lambda n: labelled_words(n, classes=3),
    ),
    "sequence classification": Head(of_bert("BertForSequenceClassification"), labelled(classes)),
    "regression": Head(of_bert("BertForSequenceClassification", num_labels=1), labelled(floats())),
    "several labels": Head(of_bert("BertForSequenceClassification"), labelled(floats(3))),
    "multiple choice": Head(of_bert("BertForMultipleChoice"), choices),
    "next sentence": Head(of_bert("BertForNextSentencePrediction"), labelled(lambda n: classes(n).clamp(max=1))),
    "question answering": Head(of_bert("BertForQuestionAnswering", num_labels=2), spans(lambda starts, ends: None)),
    "question answering with answers behind the text": Head(
        of_bert("BertForQuestionAnswering", num_labels=2), spans(behind_both)
    ),
    "question answering with ends behind the text": Head(
        of_bert("BertForQuestionAnswering", num_labels=2), spans(behind_one), is_known=False
    ),
    "connectionist temporal classification, sum": Head(wav2vec2("Wav2Vec2ForCTC", ctc_loss_reduction="sum"), spoken),
    "connectionist temporal classification, mean": Head(wav2vec2("Wav2Vec2ForCTC", ctc_loss_reduction="mean"), spoken),
    "classification of sounds": Head(
        wav2vec2("Wav2Vec2ForSequenceClassification"), lambda n: {"input_values": sounds(n), "labels": classes(n)}
    ),
    "image classification": Head(
        made(hf.ViTForImageClassification, hf.ViTConfig(**SEEN)), lambda n: {**pictures(n), "labels": classes(n)}
    ),
    "semantic segmentation": Head(segformer(), segmented),
    "contrastive": Head(clip, texts_and_pictures, refusal='cannot gather output."logits_per_image"'),
    "object detection": Head(yolos, boxes, is_known=False),
    "video classification": Head(
        made(
            hf.VideoMAEForVideoClassification,
            hf.VideoMAEConfig(**{**SEEN, "image_size": 16, "num_frames": 2, **DECODER}),
        ),
        lambda n: {"pixel_values": floats(2, 3, 16, 16)(n), "labels": classes(n)},
    ),
    "questions about documents with pictures": Head(
        layout(True), document(lambda s, e: None, pixel_values=lambda n: pictures(n)["pixel_values"])
    ),
    "questions about documents with pictures and answers behind the text": Head(
        layout(True), document(behind_both, pixel_values=lambda n: pictures(n)["pixel_values"]), is_known=False
    ),
    "questions about pictures": Head(
        vilt,
        lambda n: {
            **words(n),
            **pictures(n),
            "pixel_mask": torch.ones(n, 32, 32, dtype=torch.int64),
            "labels": floats(3)(n),
        },
    ),
    "classification of frames of sounds": Head(wav2vec2("Wav2Vec2ForAudioFrameClassification"), framed),
    "question answering by a decoder": Head(bart("BartForQuestionAnswering"), asked_of_decoder),
    "permutation language model": Head(xlnet, labelled_words),
}
