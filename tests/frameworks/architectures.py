"""Architectures of transformers and timm, small and with random weights, each with a batch that it takes.

Dropout and stochastic depth are off, because slots draw other masks than one device; everything else is as the
libraries have it, normalisation over the batch in training mode included.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
import transformers as hf
from torch import Tensor, nn

__all__ = ["ARCHITECTURES", "Architecture"]

WORDS = 40
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PICTURES = {"image_size": 16, "patch_size": 8}


class Architecture(NamedTuple):
    """``build()`` makes a module, ``batch(samples)`` keyword arguments for its forward."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]


def random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def words(samples: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (samples, 6), generator=random())}


def padded(samples: int) -> dict[str, Tensor]:
    """Words, the last of each second sample being none."""
    mask = torch.ones(samples, 6, dtype=torch.int64)
    mask[::2, -2:] = 0
    return {**words(samples), "attention_mask": mask}


def labelled(samples: int) -> dict[str, Tensor]:
    return {**words(samples), "labels": torch.randint(3, WORDS, (samples, 6), generator=random())}


def pictures(samples: int, size: int = 16, name: str = "pixel_values") -> dict[str, Tensor]:
    return {name: torch.randn(samples, 3, size, size, dtype=torch.float64, generator=random())}


def image_and_text(samples: int) -> dict[str, Tensor]:
    return {**words(samples), **pictures(samples)}


def by_config(model: Any, config: Any, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: model(config(**settings))


def by_timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, num_classes=5, **settings)


def timm_pictures(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda samples: pictures(samples, size, "x")


def clip() -> nn.Module:
    text = hf.CLIPTextConfig(vocab_size=WORDS, max_position_embeddings=8, eos_token_id=2, **SMALL)
    vision = hf.CLIPVisionConfig(**PICTURES, **SMALL)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))


class Features(nn.Module):
    """What both halves of CLIP make of a sample; its own output compares every sample with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = clip()

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> tuple[Any, Any]:
        return self.clip.get_text_features(input_ids), self.clip.get_image_features(pixel_values)


CAUSAL = {"vocab_size": WORDS, "max_position_embeddings": 16, **SMALL}
GROUPED = {**CAUSAL, "num_key_value_heads": 1}
# The grouped kernel for experts takes no float64.
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}

ARCHITECTURES = {
    "gpt2": Architecture(
        by_config(
            hf.GPT2LMHeadModel,
            hf.GPT2Config,
            **{"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": WORDS, "n_positions": 16},
            **{"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
        ),
        labelled,
    ),
    "llama": Architecture(by_config(hf.LlamaForCausalLM, hf.LlamaConfig, **GROUPED), padded),
    "mixtral": Architecture(by_config(hf.MixtralForCausalLM, hf.MixtralConfig, **MIXED, **GROUPED), words),
    "mamba": Architecture(
        by_config(hf.MambaForCausalLM, hf.MambaConfig, vocab_size=WORDS, hidden_size=16, num_hidden_layers=2), words
    ),
    "clip": Architecture(Features, image_and_text),
    "resnet": Architecture(by_timm("resnet18", stem_width=4), timm_pictures(32)),
    "swin": Architecture(
        by_timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=8,
            num_heads=(1, 1, 2, 2),
            drop_path_rate=0.0,
        ),
        timm_pictures(32),
    ),
    "mobilenet": Architecture(by_timm("mobilenetv3_small_050", drop_rate=0.0), timm_pictures(32)),
}
