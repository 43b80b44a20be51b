"""`PeerRounds` runs the collectives of replicas across machines, for one form. Each of its forwards has a `PeerCall`,
and values travel in `_Exchange`, a node of the graph, whose backward sends gradients the other way.

They have a lane of their own: a backward may need a collective of replicas while gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel.autograd.node import Node
from dataparallel.autograd.pass_of_backward import error_of_failed_pass, running_pass
from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Lane, Machines

_KIND = "a collective across machines"
_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # the shape and the dtype of a tensor


class PeerRounds:
    """The collectives of one form, and a word at the end of a forward or backward with any, so that all fail together.

    A machine that fails before its first collective has to guess whether others begin one. It expects of a forward what
    the last one in the same mode did. A backward tells of its failure where it sums gradients.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines, self.lane = machines, Lane(machines, "peers")
        self._has_collectives: dict[Hashable, bool] = {}  # for each mode, whether the last call had any

    @contextmanager
    def calling(self, mode: Hashable, others_wait: Callable[[], bool]) -> Iterator[PeerCall]:
        """Wraps a call. ``others_wait``: true if others would wait without collectives too if the call fails here."""
        call, is_expected = PeerCall(self), self._has_collectives.get(mode, False)
        try:
            yield call
            self._has_collectives[mode] = call.has_begun
            if call.has_begun or is_expected:
                self.lane.gather("the end of a forward with collectives across machines", "", None).wait()
        except BaseException as error:
            if call.has_begun or is_expected or others_wait():
                self.machines.state.fail(error)
            raise
        finally:
            call.token = None  # it holds the graph

    def exchange(self, text: str, tensors: Sequence[Tensor], coming: Sequence[_Kind]) -> list[Tensor]:
        """Sends tensors, as many to each machine in rank order, and returns those that come from each, as bytes."""
        size = self.machines.size
        numels = [prod(shape) * dtype.itemsize for shape, dtype in coming]
        flat = torch.cat([*map(_bytes, tensors)])
        send, receive = _totals([each.nbytes for each in tensors], size), _totals(numels, size)
        call = partial(stage(self.machines, flat, sum(receive)).all_to_all, send, receive)
        (result,) = self.lane.launch(_KIND, ["the values"], [call], f"{_KIND}\n{text}")
        pieces = result.wait().split(numels)  # a copy of each has an address that fits its dtype
        return [piece.clone().view(dtype).view(shape) for piece, (shape, dtype) in zip(pieces, coming, strict=True)]

    def expect_in_backward(self) -> None:
        """Ends the running pass of backward with a word, because the pass has a collective on every machine."""
        running = running_pass()
        if running.is_first(self):
            running.on_end(self._end_backward)

    def _end_backward(self, ok: bool) -> None:
        if ok:
            self.lane.gather("the end of a backward with collectives across machines", "", None).wait()
        else:
            self.machines.state.fail(error_of_failed_pass())


class PeerCall:
    """The collectives across machines of one forward. On each machine the last replica to arrive calls its methods.

    In the graph each collective takes a *token*, a tensor without elements, from the collective before. So backward
    runs them in the reverse order on all machines, whatever the engine of each machine would run first.
    """

    def __init__(self, rounds: PeerRounds) -> None:
        self.rounds, self.rank, self.size = rounds, rounds.machines.rank, rounds.machines.size
        self.counts: list[int] | None = None  # the replicas of each machine, once `exchange_counts` was called
        self.has_begun = False
        self.token: Tensor | None = None
        self._number = 0

    def exchange_counts(self, count: int) -> None:
        """Begins the first collective. The machines gather how many replicas each of them has."""
        self.has_begun = True
        self.counts = self.rounds.lane.gather("the first collective across machines of a forward", "", count).wait()

    def exchange(
        self, text: str, for_machines: Sequence[Sequence[Tensor]], note: Any = None
    ) -> tuple[list[list[Tensor]], list[Any]]:
        """Sends each machine as many tensors, all on one device. Returns those from each machine, and their notes.

        A word says which tensors come, and whether any need gradients, for then the results of all are in the graph.
        ``text`` is equal on all machines; ``note`` can be pickled.
        """
        records, sent = torch.is_grad_enabled(), [*chain.from_iterable(for_machines)]
        kinds = [[(tuple(each.shape), each.dtype) for each in tensors] for tensors in for_machines]
        needs_grad = records and any(each.requires_grad for each in sent)
        self._number += 1
        text = f"{text}, {'recorded ' if records else ''}exchange {self._number}"  # backward compares the number
        said = self.rounds.lane.gather(_KIND, text, (needs_grad, kinds, note)).wait()
        coming = [kind for _, for_each, _ in said for kind in for_each[self.rank]]
        if any(of_rank for of_rank, _, _ in said):
            before = torch.empty(0, device=sent[0].device, requires_grad=True) if self.token is None else self.token
            self.token, *found = _Exchange.apply(self.rounds, text, coming, before, *sent)
        else:
            found = self.rounds.exchange(text, sent, coming) if sent else []
        count = len(kinds[0])
        return [found[rank * count :][:count] for rank in range(self.size)], [of_rank for _, _, of_rank in said]


class _Exchange(Node):
    """``token, *received = _Exchange.apply(rounds, text, coming, token, *tensors)``: see `PeerRounds.exchange`.

    A machine sends to itself too, so that a backward through any result runs this node, on every machine.
    """

    @staticmethod
    def forward(
        ctx: Any, rounds: PeerRounds, text: str, coming: Sequence[_Kind], token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rounds, ctx.text, ctx.sent = rounds, text, [(each.shape, each.dtype) for each in tensors]
        received = rounds.exchange(text, tensors, coming)
        ctx.mark_non_differentiable(*(each for each in received if not (each.is_floating_point() or each.is_complex())))
        return (token.new_empty(0), *received)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        """Sends the gradients the other way. All of them are on one device, so the engine knows their stream."""
        ctx.rounds.expect_in_backward()
        return (None, None, None, *_Exchange.apply(ctx.rounds, f"the gradients of {ctx.text}", ctx.sent, token, *grads))


def _totals(numels: Sequence[int], size: int) -> list[int]:
    """The sums of ``size`` parts, of as many numbers each."""
    count = len(numels) // size
    return [sum(numels[k * count :][:count]) for k in range(size)]


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any strides
