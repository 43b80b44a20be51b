"""The nodes of a chain of buckets whose sums go on after the slots, in autograd's graph.

The nodes of all buckets, whose order the engine keeps by tokens, are one chain ::

    parameters <-- FromExchange <-- AllArrived <-- EndOfBackward <-- ToExchange of the last bucket
                                                                 <-- ... <-- ToExchange of the first bucket

- `ToExchange` sums a bucket over the slots and launches it. Before it launches its own bucket it launches earlier ones
  that this pass does not reach, with zeros: the engine would have run them before. The engine runs later ones in any
  case. So each pass launches all buckets in their order, on every machine.
- `EndOfBackward` then says which parameters have a gradient here.
- `AllArrived` blocks until all has arrived. Every `FromExchange` follows it, also those of buckets that this pass has
  not reached. So nobody waits before all is launched, and no ``.grad`` is written before the pass has succeeded
  everywhere. A parameter that is used on no machine gets ``None``.

On the CPU one thread runs all nodes, and the last two run when nothing else is ready. So an error anywhere in this
machine's backward comes before its end. The threads of accelerators never block: `AllArrived` runs in the thread that
has called ``backward``, and `ToExchange` of the last bucket that the pass reaches does what the rest would do.

``composable.exchanges`` has what the nodes call, and ``composable.persistent_copies`` makes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.autograd.bucket_nodes import FromSource, ToSlots
from dataparallel.autograd.node import Node
from dataparallel.autograd.node_order import run_before_last, run_last
from dataparallel.composable.exchanges import Chain
from dataparallel.composable.gradient_sums import PersistentToSlots

__all__ = ["make_sources", "make_to_slots"]


def make_sources(chain: Chain) -> tuple[list[Tensor], Tensor]:
    """Makes the nodes before the sums: for each bucket a handle, and the first token."""
    handles: list[Tensor] = []
    tokens: list[Tensor] = []
    for bucket in chain.buckets:
        handle, token = FromExchange.apply(*bucket.waiting.sources)
        node: Any = handle.grad_fn
        node.chain, node.index = chain, len(handles)
        run_last(handle.grad_fn)
        handles.append(handle)
        tokens.append(token)
    token = EndOfBackward.apply(chain, AllArrived.apply(chain, *tokens))
    chain.end = weakref.ref(token.grad_fn)
    chain.passes.chains.add(chain)
    return handles, token


def make_to_slots(chain: Chain, index: int, token: Tensor) -> Callable[..., Sequence[Tensor]]:
    """A function that applies `ToExchange` for a bucket; its last output is the token for the one before."""

    def to_slots(*arguments: Any) -> Sequence[Tensor]:
        outputs: tuple[Tensor, ...] = ToExchange.apply(*arguments, token)
        node: Any = outputs[-1].grad_fn
        node.waiting, node.chain, node.index = chain.buckets[index].waiting, chain, index
        return outputs

    return to_slots


class ToExchange(PersistentToSlots):
    """A bucket's node; see `PersistentToSlots`. ``node.chain`` and ``node.index`` say which one it is."""

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        """Launches the sums over the slots, or keeps the gradients."""
        chain: Chain = ctx.chain
        by_slot = ToSlots.brought(envelopes[:-1])
        exchange = chain.passes.this(chain)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True leads to the parameters of a module that is replicated over "
                "machines or has a communication hook: what happens to its sums cannot be recorded. Use "
                "create_graph=True with inputs= that do not include its parameters, or leave it out"
            )
        with ToSlots.computing_streams_set(ctx):
            if exchange.is_on:
                exchange.bring(ctx, ctx.index, by_slot)
                return None, None, None, None
            kept = exchange.keep(ctx.index, by_slot)
            return None, None, None if kept is None else ToSlots.handed_on(ctx, kept), None


class EndOfBackward(Node):
    """``EndOfBackward.apply(chain, token)``: the token of the last bucket. Backward ends what is launched."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.chain = chain
        run_before_last(ctx)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[None, None]:
        ctx.chain.passes.this(ctx.chain).end()
        return None, None


class AllArrived(Node):
    """``AllArrived.apply(chain, *tokens)``: a token. Backward blocks until all that was launched has arrived."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, *tokens: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.chain, ctx.count = chain, len(tokens)
        run_last(ctx)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[None, ...]:
        ctx.chain.passes.this(ctx.chain).wait()
        return (None,) * (1 + ctx.count)


class FromExchange(FromSource):
    """``FromExchange.apply(*tensors)``: a handle for them, and a token. Backward returns what has arrived."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        return FromSource.forward(ctx, *tensors), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None, token: Tensor | None = None) -> tuple[Tensor | None, ...]:
        exchange = ctx.chain.passes.this(ctx.chain)
        return tuple(exchange.take(ctx.index)) if exchange.is_on else FromSource.backward(ctx, envelope)
