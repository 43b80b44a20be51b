"""Tiny models with random weights, in float64 and without dropout, and batches for them. Nothing is downloaded."""

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["VOCABULARY", "bert", "bert_config", "examples", "gpt2", "t5", "tokens"]

VOCABULARY = 50


def gpt2() -> GPT2LMHeadModel:
    """Two blocks of width 16."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=VOCABULARY,
        n_positions=32,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).double()


def tokens(samples: int, length: int = 6, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


def examples(samples: int) -> list[dict]:
    """For a data loader: each with a column that no model takes."""
    return [{"input_ids": row, "labels": row.clone(), "of_no_use": len(row)} for row in tokens(samples)]


def bert() -> BertForSequenceClassification:
    """Three classes. Its loss is the mean over the samples that it gets, whatever a trainer passes."""
    torch.manual_seed(0)
    return BertForSequenceClassification(bert_config()).double()


def bert_config(**settings) -> BertConfig:
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 3,
    }
    return BertConfig(**{**sizes, **settings})


def t5() -> T5ForConditionalGeneration:
    """An encoder and a decoder of two blocks each. Its weights are large, so that it writes more than one token."""
    config = T5Config(
        num_layers=2,
        num_heads=2,
        d_model=16,
        d_kv=8,
        d_ff=32,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=24,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)
    return model
