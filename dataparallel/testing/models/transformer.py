"""A small transformer for tests of sharding: what makes sharding hard, in few layers.

One weight is used twice (tied embeddings), dropout draws random numbers, attention is causal, and blocks may be
recomputed in backward. The names of its parts are those of the transformer in torch's own tests of sharding. By default
its sizes divide by 2 and 4. The same seed gives the same weights everywhere: see ``layers``.

`tensor_parallel` has the plan that `Transformer.parallelize` applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.testing.models.layers import draw_weights, undrawn
from dataparallel.testing.models.tensor_parallel import apply_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class ModelArgs:
    """The sizes of a `Transformer`, and what it has.

    Args:
        n_layers: the number of blocks.
        vocab_size: tokens are whole numbers below this one.
        max_seq_len: the largest number of tokens in a sequence.
        dim: the width of embeddings and blocks, a multiple of ``n_heads``.
        n_heads: the number of attention heads.
        dropout_p: the probability of each dropout, of attention's too.
        use_attn_mask: attention is causal: a token sees itself and earlier ones.
        weight_tying: the output layer uses the weight of the token embedding.
        checkpoint_activations: the blocks are recomputed in backward.
    """

    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.1
    use_attn_mask: bool = True
    weight_tying: bool = True
    checkpoint_activations: bool = False


class Attention(nn.Module):
    """Several heads, each with ``dim / n_heads`` features.

    `Transformer.parallelize` leaves a part of the heads to each process. ``n_heads`` is then the number of its own.
    """

    def __init__(self, args: ModelArgs, **options: Any) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.head_dim = args.dim // args.n_heads
        self.dropout_p = args.dropout_p
        self.use_attn_mask = args.use_attn_mask
        self.wq, self.wk, self.wv, self.wo = (
            undrawn(nn.Linear, args.dim, args.dim, bias=False, **options) for _ in range(4)
        )
        self.resid_dropout = nn.Dropout(args.dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """From and to tensors of shape (samples, length, dim)."""
        query, key, value = (self._in_heads(project(x)) for project in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout_p if self.training else 0.0, is_causal=self.use_attn_mask
        )
        out: Tensor = self.resid_dropout(self.wo(attended.transpose(1, 2).flatten(2)))
        return out

    def _in_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden_dim: int, dropout_p: float, **options: Any) -> None:
        super().__init__()
        self.w1 = undrawn(nn.Linear, dim, hidden_dim, **options)
        self.gelu = nn.GELU()
        self.w2 = undrawn(nn.Linear, hidden_dim, dim, **options)
        self.resid_dropout = nn.Dropout(dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """From and to tensors of shape (samples, length, dim)."""
        out: Tensor = self.resid_dropout(self.w2(self.gelu(self.w1(x))))
        return out


class TransformerBlock(nn.Module):
    """Attention, then two linear layers. What goes in is normed before each, and added after each."""

    def __init__(self, args: ModelArgs, **options: Any) -> None:
        super().__init__()
        self.attention_norm = undrawn(nn.LayerNorm, args.dim, **options)
        self.attention = Attention(args, **options)
        self.ffn_norm = undrawn(nn.LayerNorm, args.dim, **options)
        self.feed_forward = FeedForward(args.dim, 4 * args.dim, args.dropout_p, **options)

    def forward(self, x: Tensor) -> Tensor:
        """From and to tensors of shape (samples, length, dim)."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a norm and an output layer.

    Its parts are ``tok_embeddings``, ``pos_embeddings``, ``dropout``, ``layers``, ``norm`` and ``output``. Tied weights
    stay tied when the model is moved to another device.

    Args:
        args: its sizes, and what it has.
        seed: the same seed gives the same weights, on each device and in each process, in each dtype up to rounding.
        device: of the weights; None is the default device. On ``"meta"`` no weights are drawn.
        dtype: of the weights; None is the default dtype.

    Raises:
        ValueError: ``dim`` is no multiple of ``n_heads``.
    """

    def __init__(self, args: ModelArgs, *, seed: int = 0, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if args.n_heads < 1 or args.dim % args.n_heads != 0:
            raise ValueError(
                f"each attention head has dim / n_heads features, so dim must be a multiple of n_heads; got "
                f"dim={args.dim}, n_heads={args.n_heads}"
            )
        options = {"device": device, "dtype": dtype}
        self.model_args = args
        self.max_seq_len = args.max_seq_len
        self.checkpoint_activations = args.checkpoint_activations
        self.seed = seed
        self.sequence_parts = 1  # of how many equal parts a sequence must consist, see `parallelize`
        self.tok_embeddings = undrawn(nn.Embedding, args.vocab_size, args.dim, **options)
        self.pos_embeddings = undrawn(nn.Embedding, args.max_seq_len, args.dim, **options)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList(TransformerBlock(args, **options) for _ in range(args.n_layers))
        self.norm = undrawn(nn.LayerNorm, args.dim, **options)
        self.output = undrawn(nn.Linear, args.dim, args.vocab_size, bias=False, **options)
        if args.weight_tying:
            self.output.weight = self.tok_embeddings.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives the weights their first values again. Made on ``"meta"``, it gets them here, after ``to_empty``."""
        draw_weights(self, self.seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """From tokens of shape (samples, length) to scores of shape (samples, length, vocab_size).

        The scores are float32 at least: those of a float64 model are float64, others float32.

        Raises:
            ValueError: the tokens have another number of dimensions, the sequences are longer than ``max_seq_len``, or,
                with sequence parallelism, their length is no multiple of the number of processes.
        """
        positions = torch.arange(self._length(tokens), device=tokens.device)
        x = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoint_activations else layer(x)
        scores = self.output(self.norm(x))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    @staticmethod
    def parallelize(module: Transformer, mesh: DeviceMesh, use_seq_parallel: bool) -> Transformer:
        """Divides a model among the processes of a mesh, with torch's own tensor parallelism, and returns the model.

        Each process calls it with the same model, then passes the same tokens and gets the whole scores. Parameters
        that are divided become DTensors in place. Attention computes with the local heads, ``n_heads / mesh.size()``,
        as plain tensors. Tied weights are one parameter afterwards too.

        Dropout draws from the generator of each process. Without sequence parallelism, tensors that all processes have
        whole are the same on all of them only if all of them began with the same seed.

        Args:
            module: on the mesh's kind of device, or on ``meta``.
            mesh: of one dimension.
            use_seq_parallel: between attention and feed-forward, each process has a part of each sequence. The length
                of sequences must then be a multiple of the number of processes.

        Raises:
            TypeError: ``module`` is no `Transformer`, or ``mesh`` no mesh.
            ValueError: the mesh has several dimensions, its size does not divide ``n_heads``, its devices are of
                another type than the model's, or the model is divided already. The model is as it was.
            RuntimeError: this torch is built without ``torch.distributed``.
        """
        if not isinstance(module, Transformer):
            raise TypeError(f"Transformer.parallelize divides a Transformer; got {type(module).__name__}")
        apply_plan(module, mesh, use_seq_parallel)
        return module

    def _length(self, tokens: Tensor) -> int:
        if tokens.dim() != 2:
            raise ValueError(f"tokens have the shape (samples, length); got {tuple(tokens.shape)}")
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise ValueError(
                f"a sequence has at most max_seq_len={self.max_seq_len} tokens; got tokens of shape "
                f"{tuple(tokens.shape)}, sequences of {length}"
            )
        if length % self.sequence_parts != 0:
            raise ValueError(
                f"sequence parallelism cuts sequences into {self.sequence_parts} equal parts; got tokens of shape "
                f"{tuple(tokens.shape)}: pass sequences whose length is a multiple of {self.sequence_parts}"
            )
        return length

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        # Where torch makes new parameters (to a simulated device, to_empty), it makes one for each use.
        tied = self.output.weight is self.tok_embeddings.weight
        super()._apply(fn, recurse)
        if tied:
            self.output.weight = self.tok_embeddings.weight
        return self
