"""Heads of transformers that compute a loss from sounds, tables, series of numbers or words, as in heads."""

from typing import Any

import torch
import transformers as hf
from heads import (
    NO_DROPOUT,
    SMALL,
    Head,
    bart,
    floats,
    labelled_words,
    made,
    random,
    sounds,
    spans,
    uneven,
    wav2vec2,
    words,
)
from tiny import tokens
from torch import Tensor

__all__ = ["NO_LOSS", "SERIES_HEADS"]

# Heads, by their names in modeling_auto, whose models have no loss for a trainer: they take no labels or
# refuse them, and audio tokenizers return a loss for each sample.
NO_LOSS = {
    *("AUDIO_TOKENIZATION", "BACKBONE", "DECISION", "IMAGE", "IMAGE_MATTING", "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION"),
    *("KEYPOINT_MATCHING", "MASK_GENERATION", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION", "POSE_ESTIMATION"),
    *("RETRIEVAL", "TABLE_RECOGNITION", "TEXT_ENCODING", "TEXT_RECOGNITION"),
}


def values(name: str, *shape: int, **more: Any) -> Any:
    """Numbers with this name, and what ``more`` makes of a number of samples."""
    return lambda samples: {name: floats(*shape)(samples), **{key: make(samples) for key, make in more.items()}}


def whole(high: int, *shape: int) -> Any:
    return lambda samples: torch.randint(1, high, (samples, *shape), generator=random())


def framed(samples: int) -> dict[str, Any]:
    frames = wav2vec2("Wav2Vec2ForAudioFrameClassification")()._get_feat_extract_output_lengths(400)
    labels = torch.nn.functional.one_hot(torch.randint(0, 3, (samples, int(frames)), generator=random()), 3)
    return {"input_values": sounds(samples), "labels": labels}


def parakeet(name: str) -> Any:
    encoder = hf.ParakeetEncoderConfig(
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"conv_kernel_size": 3, "subsampling_conv_channels": 4, "num_mel_bins": 16, "dropout": 0.0},
        **{"layerdrop": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0},
    )
    kind = getattr(hf, f"Parakeet{name}Config")
    config = kind(
        **{"vocab_size": 10, "blank_token_id": 9, "decoder_hidden_size": 8, "num_decoder_layers": 1},
        **{"encoder_config": encoder.to_dict(), "pad_token_id": 2},
    )
    return made(getattr(hf, f"ParakeetFor{name}"), config)().float()


def transduced(samples: int) -> dict[str, Any]:
    features = torch.randn(samples, 64, 16, generator=random())
    return {
        "input_features": features,
        "attention_mask": torch.ones(samples, 64, dtype=torch.int64),
        "labels": torch.randint(3, 9, (samples, 4), generator=random()),
        "decoder_input_ids": torch.randint(3, 9, (samples, 5), generator=random()),
    }


def speech_t5() -> Any:
    config = hf.SpeechT5Config(
        **{"vocab_size": 50, "hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
        **{"num_mel_bins": 8, "speaker_embedding_dim": 4, "speech_decoder_prenet_units": 8},
        **{"speech_decoder_postnet_units": 8, "speech_decoder_postnet_layers": 2, "reduction_factor": 2},
        **{"use_guided_attention_loss": False},
    )
    return made(hf.SpeechT5ForTextToSpeech, config)()


def csm() -> Any:
    sizes = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
    config = hf.CsmConfig(
        **{"num_codebooks": 4, "vocab_size": 20, "text_vocab_size": 80, "codebook_eos_token_id": 0},
        **{"codebook_pad_token_id": 19, "audio_token_id": 49, "bos_token_id": 1, "pad_token_id": 0},
        **{"eos_token_id": None},
        **sizes,
        depth_decoder_config={"num_codebooks": 4, "backbone_hidden_size": 16, "vocab_size": 20, **sizes},
        codec_config=hf.MimiConfig(
            **{"hidden_size": 16, "num_filters": 4, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8, "codebook_size": 16},
            **{"codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "upsampling_ratios": [2, 2]},
            **{"upsample_groups": 16, "num_quantizers": 4},
        ).to_dict(),
    )
    return made(hf.CsmForConditionalGeneration, config)()


def said(samples: int) -> dict[str, Any]:
    ids = whole(15, 6, 4)(samples)
    labels = ids.clone()
    for index in range(samples):
        labels[index, index + 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def tapas() -> Any:
    config = hf.TapasConfig(
        vocab_size=50,
        max_position_embeddings=32,
        type_vocab_sizes=[3, 8, 8, 2, 8, 8, 2],
        num_aggregation_labels=0,
        **SMALL,
        **NO_DROPOUT,
    )
    return made(hf.TapasForQuestionAnswering, config)().float()


def tables(samples: int) -> dict[str, Any]:
    kinds = torch.zeros(samples, 6, 7, dtype=torch.int64)
    kinds[:, 2:, 0], kinds[:, 2:, 1], kinds[:, 2:, 2] = 1, torch.tensor([1, 2, 1, 2]), torch.tensor([1, 1, 2, 2])
    return {**words(samples), "token_type_ids": kinds, "labels": torch.arange(6 * samples).view(samples, 6) % 2}


def patch_tst(name: str, **settings: Any) -> Any:
    config = hf.PatchTSTConfig(
        **{"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4},
        **{"num_hidden_layers": 1, "d_model": 8, "num_attention_heads": 2, "ffn_dim": 8, "prediction_length": 4},
        **{"norm_type": "layernorm", "loss": "mse"},
        **settings,
    )
    return made(getattr(hf, name), config)


def times_fm() -> Any:
    config = hf.TimesFmConfig(
        **{"patch_length": 4, "context_length": 16, "horizon_length": 4, "num_hidden_layers": 1, "hidden_size": 16},
        **{"intermediate_size": 16, "head_dim": 8, "num_attention_heads": 2},
    )
    return made(hf.TimesFmModelForPrediction, config)().float()


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


def two_heads() -> Any:
    return made(
        hf.GPT2DoubleHeadsModel,
        hf.GPT2Config(
            **{"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "embd_pdrop": 0.0},
            **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0.0},
        ),
    )()


def continued(samples: int) -> dict[str, Any]:
    ids = tokens(2 * samples).view(samples, 2, 6)
    return {
        "input_ids": ids,
        "labels": uneven(ids),
        "mc_labels": torch.arange(samples) % 2,
        "mc_token_ids": torch.full((samples, 2), 5),
    }


SERIES_HEADS = {
    "classification of frames of sounds": Head(wav2vec2("Wav2Vec2ForAudioFrameClassification"), framed),
    "transducer of tokens and durations": Head(lambda: parakeet("TDT"), transduced, is_known=False),
    "transducer of tokens": Head(lambda: parakeet("RNNT"), transduced, is_known=False),
    "text to spectrogram": Head(
        speech_t5, lambda n: {**words(n), "labels": floats(8, 8)(n), "speaker_embeddings": floats(4)(n)}, is_known=False
    ),
    "text to waveform": Head(csm, said, is_known=False),
    "table question answering": Head(tapas, tables, is_known=False),
    "time series prediction": Head(
        times_fm,
        lambda n: {
            "past_values": floats(16)(n).float(),
            "future_values": floats(4)(n).float(),
            "freq": torch.zeros(n, dtype=torch.int64),
        },
        is_known=False,
    ),
    "time series prediction of patches": Head(
        patch_tst("PatchTSTForPrediction"), values("past_values", 16, 2, future_values=floats(4, 2)), is_known=False
    ),
    "time series classification": Head(
        patch_tst("PatchTSTForClassification", num_targets=3),
        values("past_values", 16, 2, target_values=lambda n: torch.arange(n) % 3),
        is_known=False,
    ),
    "time series regression": Head(
        patch_tst("PatchTSTForRegression", num_targets=2),
        values("past_values", 16, 2, target_values=floats(2)),
        is_known=False,
    ),
    "question answering by a decoder": Head(bart("BartForQuestionAnswering"), asked_of_decoder),
    "permutation language model": Head(xlnet, labelled_words),
    "two heads": Head(two_heads, continued, is_known=False),
    "pretraining by replaced words": Head(
        made(
            hf.ElectraForPreTraining,
            hf.ElectraConfig(vocab_size=50, embedding_size=16, max_position_embeddings=16, **SMALL, **NO_DROPOUT),
        ),
        lambda n: {**words(n), "labels": words(n)["input_ids"] % 2},
        is_known=False,
    ),
}
