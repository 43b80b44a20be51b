"""Heads of transformers that compute a loss from pictures or videos, as in heads."""

from typing import Any

import torch
import transformers as hf
from heads import (
    NO_DROPOUT,
    SEEN,
    SMALL,
    Head,
    boxes,
    classes,
    floats,
    labelled_words,
    made,
    pictures,
    random,
    spans,
    words,
)
from tiny import bert_config

__all__ = ["PICTURE_HEADS"]

IMAGE = 49  # the token that stands for a part of a picture

DECODER = {"decoder_hidden_size": 8, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
PRETRAINED = {**SEEN, **DECODER, "decoder_intermediate_size": 8}


def llava() -> Any:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(image_size=16, patch_size=8, **SMALL),
        text_config=hf.LlamaConfig(vocab_size=50, max_position_embeddings=32, **SMALL),
        image_token_id=IMAGE,
    )
    return made(hf.LlavaForConditionalGeneration, config)()


def shown(samples: int) -> dict[str, Any]:
    batch = labelled_words(samples)
    image = torch.full((samples, 4), IMAGE)
    words = torch.cat([image, batch["input_ids"].clamp(max=IMAGE - 1)], 1)
    return {
        "input_ids": words,
        "labels": torch.cat([torch.full_like(image, -100), batch["labels"]], 1),
        "pixel_values": pictures(samples)["pixel_values"][..., :16, :16],
    }


def git() -> Any:
    vision = hf.GitVisionConfig(image_size=16, patch_size=8, **SMALL)
    config = hf.GitConfig(
        **{"vision_config": vision.to_dict(), "vocab_size": 50, "max_position_embeddings": 32, "bos_token_id": 1},
        **{"eos_token_id": 2},
        **SMALL,
        **NO_DROPOUT,
    )
    return made(hf.GitForCausalLM, config)()


def captioned(samples: int) -> dict[str, Any]:
    return {**labelled_words(samples), "pixel_values": pictures(samples)["pixel_values"][..., :16, :16]}


def pictures_to_words() -> Any:
    decoder = bert_config(is_decoder=True, add_cross_attention=True)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**SEEN), decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    return made(hf.VisionEncoderDecoderModel, config)()


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


def behind_the_text(starts: Any, ends: Any) -> None:
    starts[:2] = ends[:2] = 9


def vilt() -> Any:
    config = hf.ViltConfig(
        **{"vocab_size": 50, "max_position_embeddings": 16, "image_size": 32, "patch_size": 8},
        **{"max_image_length": -1, "num_labels": 3},
        **SMALL,
        **NO_DROPOUT,
    )
    return made(hf.ViltForQuestionAnswering, config)()


def swin() -> Any:
    return hf.SwinConfig(
        **{"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
        **{"window_size": 2, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    )


def mask2former() -> Any:
    config = hf.Mask2FormerConfig(
        **{"backbone_config": swin(), "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32},
        **{"encoder_feedforward_dim": 16, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2},
        **{"dim_feedforward": 16, "num_queries": 4, "num_labels": 3, "train_num_points": 16},
    )
    return made(hf.Mask2FormerForUniversalSegmentation, config)().float()


def maskformer() -> Any:
    config = hf.MaskFormerConfig(
        fpn_feature_size=32,
        mask_feature_size=32,
        backbone_config=swin(),
        decoder_config=hf.DetrConfig(
            **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16},
            **{"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 4},
        ),
        num_labels=3,
    )
    return made(hf.MaskFormerForInstanceSegmentation, config)().float()


def masked(samples: int) -> dict[str, Any]:
    return {
        "pixel_values": pictures(samples)["pixel_values"].float(),
        "mask_labels": (torch.rand(samples, 2, 32, 32, generator=random()) > 0.5).float(),
        "class_labels": torch.arange(2 * samples).view(samples, 2) % 3,
    }


def resnet() -> Any:
    return hf.ResNetConfig(
        **{"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "layer_type": "basic"},
        **{"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    )


def detr() -> Any:
    config = hf.DetrConfig(
        **{"backbone_config": resnet(), "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
        **{"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 8, "decoder_attention_heads": 8},
        **{"num_queries": 4, "num_labels": 3},
    )
    return made(hf.DetrForSegmentation, config)().float()


def boxes_with_masks(samples: int) -> dict[str, Any]:
    batch = boxes(samples)
    for label in batch["labels"]:
        label["masks"] = torch.ones(len(label["boxes"]), 32, 32)
    return batch


def grounding_dino() -> Any:
    config = hf.GroundingDinoConfig(
        backbone_config=hf.SwinConfig(
            **{"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
            **{"window_size": 2, "out_features": ["stage2", "stage3", "stage4"]},
        ),
        text_config=bert_config(vocab_size=1100),
        **{"num_queries": 4, "encoder_layers": 1, "encoder_ffn_dim": 16, "encoder_attention_heads": 2},
        **{"decoder_layers": 2, "decoder_ffn_dim": 16, "decoder_attention_heads": 2, "d_model": 32},
        **{"num_feature_levels": 4, "max_text_len": 8, "two_stage": True, "disable_custom_kernels": True},
    )
    return made(hf.GroundingDinoForObjectDetection, config)().float()


def found_by_words(samples: int) -> dict[str, Any]:
    ids = torch.tensor([[101, 5, 1012, 6, 1012, 102]]).expand(samples, 6).clone()
    batch = boxes(samples)
    for label in batch["labels"]:
        label["class_labels"] %= 2
    return {**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def glpn() -> Any:
    config = hf.GLPNConfig(
        **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8]},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
        **{"decoder_hidden_size": 8},
        **NO_DROPOUT,
    )
    return made(hf.GLPNForDepthEstimation, config)().float()


def image_gpt() -> Any:
    return made(
        hf.ImageGPTForCausalImageModeling,
        hf.ImageGPTConfig(
            **{"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "embd_pdrop": 0.0},
            **{"attn_pdrop": 0.0, "resid_pdrop": 0.0},
        ),
    )()


def bridge_tower() -> Any:
    config = hf.BridgeTowerConfig(
        **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "contrastive_hidden_size": 8},
        **{"logit_scale_init_value": 2.6},
        text_config=hf.BridgeTowerTextConfig(
            **{"vocab_size": 50, "max_position_embeddings": 16, "hidden_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "intermediate_size": 24},
        ).to_dict(),
        vision_config=hf.BridgeTowerVisionConfig(
            hidden_size=64, num_hidden_layers=2, patch_size=16, image_size=32
        ).to_dict(),
    )
    return made(hf.BridgeTowerForContrastiveLearning, config)()


PICTURE_HEADS = {
    "video classification": Head(
        made(hf.VideoMAEForVideoClassification, hf.VideoMAEConfig(**{**PRETRAINED, "image_size": 16, "num_frames": 2})),
        lambda n: {"pixel_values": floats(2, 3, 16, 16)(n), "labels": classes(n)},
    ),
    "words about pictures": Head(git, captioned),
    "words about pictures, which the output lists": Head(
        llava, shown, refusal=r'cannot gather output\["image_outputs"\]\["pooler_output"\]'
    ),
    "pictures to words": Head(pictures_to_words, lambda n: {**pictures(n), "labels": labelled_words(n)["labels"]}),
    "questions about documents": Head(layout(False), document(behind_the_text)),
    "questions about documents with pictures": Head(
        layout(True), document(lambda s, e: None, pixel_values=lambda n: pictures(n)["pixel_values"])
    ),
    "questions about documents with pictures and answers behind the text": Head(
        layout(True), document(behind_the_text, pixel_values=lambda n: pictures(n)["pixel_values"]), is_known=False
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
    "universal segmentation": Head(mask2former, masked, is_known=False),
    "instance segmentation": Head(maskformer, masked, is_known=False),
    "image segmentation": Head(detr, boxes_with_masks, is_known=False),
    "object detection by words": Head(grounding_dino, found_by_words, is_known=False),
    "depth": Head(
        glpn,
        lambda n: {
            "pixel_values": pictures(n)["pixel_values"].float(),
            "labels": 0.5 + torch.rand(n, 32, 32, generator=random()),
        },
        is_known=False,
    ),
    "causal image modeling": Head(image_gpt, labelled_words, is_known=False),
    "contrastive without a table of pairs": Head(
        bridge_tower,
        lambda n: {**words(n), **pictures(n), "return_loss": True},
        refusal=r'cannot gather output\["hidden_states"\]',
    ),
    "pretraining of pictures": Head(
        made(hf.ViTMAEForPreTraining, hf.ViTMAEConfig(**PRETRAINED)), pictures, is_known=False
    ),
}
