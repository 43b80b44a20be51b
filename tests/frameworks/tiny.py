"""Tiny models with random weights, in float64 and without dropout, and batches for them. Nothing is downloaded."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["VOCABULARY", "examples", "gpt2", "tokens"]

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
