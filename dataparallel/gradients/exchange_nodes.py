"""The nodes of buckets whose sums go on after the slots (``after_slots``), and the passes of their module.

The nodes of all buckets are one row, and tokens keep its order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.bucket_nodes import FromSource, ToSlots
from dataparallel.autograd.node import Node, run_before_last, run_last
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass
from dataparallel.batches.structures import tensors_in
from dataparallel.gradients.after_slots import AfterSlots
from dataparallel.gradients.exchanges import Chain, Exchange
from dataparallel.gradients.gradient_sums import PersistentToSlots

_LEFTOVER = 5.0
"""Seconds for the engine's threads to leave a pass that has failed, before the next one is refused."""


def make_sources(chain: Chain) -> tuple[list[Tensor], Tensor]:
    """Makes the nodes that the sums go to: for each bucket a handle, and the first token. ::

        parameters <-- FromExchange <-- AllArrived <-- EndOfBackward <-- ToExchange of the last bucket
                                                                     <-- ... <-- ToExchange of the first bucket

    Every `FromExchange` follows `AllArrived`, also those of buckets that a pass does not reach. So nobody waits before
    all is launched, and no ``.grad`` is written before the pass has succeeded everywhere.

    On the CPU one thread runs all nodes, and `EndOfBackward` and `AllArrived` run when nothing else is ready. So an
    error anywhere in this machine's backward comes before its end. The threads of accelerators never block:
    `AllArrived` runs in the thread that has called ``backward``.
    """
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
    """A bucket's node; see `PersistentToSlots`. ``node.chain`` and ``node.index`` say which one it is.

    Before its own bucket it launches earlier ones that this pass does not reach: the engine would have run them before.
    It runs later ones in any case. So each pass launches all buckets in their order, on every machine.
    """

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


class Passes:
    """All passes of one module. A hook on the outputs of a call notices where a pass begins.

    A pass may go over the copies of several forwards: then those that were made first have their turn first.

    Attributes:
        after: what follows the slots.
        chains: those whose graphs still exist.
    """

    def __init__(self, after: AfterSlots) -> None:
        self.after = after
        self.chains: weakref.WeakSet[Chain] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._under_way: set[PassOfBackward] = set()  # those that go over a chain

    def notice(self, output: Any) -> None:
        """Notices each pass that begins with the output of a call."""
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self.begin)

    @_torch.not_traced
    def begin(self, grad: Tensor | None = None) -> None:
        """Notices the running pass: a hook on the outputs of calls."""
        running = running_pass()
        with self._changed:
            if self in running.contents:
                return
            self._wait_for_leftovers()
            running.get(self, self._begin)  # another thread of the same pass may have waited too

    def this(self, chain: Chain) -> Exchange:
        """The running pass over a chain.

        Raises:
            RuntimeError: it is nested in another one.
        """
        running = running_pass()
        with self._changed:
            if self not in running.contents and self._under_way:  # it did not come by the outputs of a call
                raise _nested()
            return running.get(self, self._begin)[chain]

    def _begin(self, running: PassOfBackward) -> dict[Chain, Exchange]:
        before: Exchange | None = None
        exchanges: dict[Chain, Exchange] = {}
        for chain in sorted(self.chains, key=lambda chain: chain.number):
            if chain.is_reached():
                before = exchanges[chain] = Exchange(chain, before)
        if exchanges:
            self._under_way.add(running)
        running.on_end(partial(self._end, running, exchanges))
        return exchanges

    def _wait_for_leftovers(self) -> None:
        """Waits until no other pass is under way. One that has failed may still be in a thread of the engine."""
        until = time.monotonic() + _LEFTOVER
        while self._under_way:
            if not self._changed.wait(max(0.0, until - time.monotonic())):
                raise _nested()

    def _end(self, ended: PassOfBackward, exchanges: dict[Chain, Exchange], ok: bool) -> None:
        try:
            if not ok:
                for exchange in exchanges.values():
                    exchange.fail(error_of_failed_pass())
        finally:
            with self._changed:
                self._under_way.discard(ended)
                self._changed.notify_all()


def _nested() -> RuntimeError:
    return RuntimeError(
        "a backward has reached the parameters of a module, whose sums go on to other machines or to a hook, while "
        "another backward of the module is under way. If a checkpoint inside it nests them, pass "
        "use_reentrant=False to it; if two threads run them, run one after the other"
    )
