"""Random sequences of collectives in each form: right results and gradients, the injected error, and no hang."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataparallel import peers
from each_form import FORMS, whole
from peer_calls import Calls, on_a_side_stream, samples

LIMIT = 60.0  # seconds for one call, which takes some milliseconds


class InjectedError(Exception):
    """Raised by one replica of a sequence."""


@dataclass(frozen=True)
class Sequence:
    """What the replicas of one call do.

    Attributes:
        form: of `FORMS`.
        names: of the collectives, in order.
        fails: the replica and the position at which it raises, if it does.
        on_side_streams: the replicas' own streams are current.
        arguments: of the form; the sizes of the chunks are among them.
    """

    form: str
    names: tuple[str, ...]
    fails: tuple[int, int] | None
    on_side_streams: bool
    arguments: dict[str, Any]

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        """The forward of a replica."""
        x = x * weight
        for position, name in enumerate((*self.names, None)):
            if self.fails == (peers.index(), position):
                raise InjectedError(f"replica {peers.index()} at {position}")
            if name is not None:
                x = STEPS[name](x).tanh()
        return x

    def run_on_its_stream(self, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight * 1.0  # of the stream that is current; `on_a_side_stream` waits for it
        return on_a_side_stream(lambda own: self.run(own * 1.0, weight))(x, None)


# Each maps the rows of a replica to as many rows, so that any of them can follow any other.
STEPS = {
    "all_reduce": lambda x: x * peers.all_reduce(x.sum()),
    "mean": lambda x: x + peers.all_reduce(x.mean(0), "mean"),
    "max": lambda x: x * peers.all_reduce(x.amax(0), "max"),
    "min": lambda x: x * peers.all_reduce(x.amin(0), "min"),
    "prod": lambda x: x + peers.all_reduce(x.mean(0), "prod"),
    "all_gather": lambda x: x + peers.all_gather(x).sum(0),
    "broadcast": lambda x: x - peers.broadcast(x[:1] * 2, peers.count() - 1),
    "reduce_scatter": lambda x: x * peers.reduce_scatter(x.sum() * x.new_ones(peers.count())),
    "barrier": lambda x: (peers.barrier(), x)[1],
}


def alone(names: tuple[str, ...], chunks: list[Tensor]) -> list[Tensor]:
    """The same on one device, written out for all replicas at once."""
    for name in names:
        sums = [chunk.sum() for chunk in chunks]
        if name == "all_reduce":
            chunks = [chunk * sum(sums) for chunk in chunks]
        elif name == "mean":
            chunks = [chunk + sum(other.mean(0) for other in chunks) / len(chunks) for chunk in chunks]
        elif name == "max":
            chunks = [chunk * torch.stack([other.amax(0) for other in chunks]).amax(0) for chunk in chunks]
        elif name == "min":
            chunks = [chunk * torch.stack([other.amin(0) for other in chunks]).amin(0) for chunk in chunks]
        elif name == "prod":
            chunks = [chunk + torch.stack([other.mean(0) for other in chunks]).prod(0) for chunk in chunks]
        elif name == "all_gather":
            chunks = [chunk + torch.cat(chunks).sum(0) for chunk in chunks]
        elif name == "broadcast":
            chunks = [chunk - chunks[-1][:1] * 2 for chunk in chunks]
        elif name == "reduce_scatter":
            chunks = [chunk * sum(sums) for chunk in chunks]
        chunks = [chunk.tanh() for chunk in chunks]
    return chunks


def within_limit(call) -> None:
    """Runs ``call`` in a thread. A hang is a failure."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "the call hangs"
    if raised:
        raise raised[0]


def check(sequence: Sequence, slots: list) -> None:
    forward = sequence.run_on_its_stream if sequence.on_side_streams else sequence.run
    sizes = sequence.arguments["chunk_sizes"]
    model, batch = Calls(forward).to(slots[0]), samples(sum(sizes)).to(slots[0]).requires_grad_()
    wrapped, weight = FORMS[sequence.form](model, slots, **sequence.arguments), Calls(forward).weight.to(slots[0])
    if sequence.fails is not None:
        with pytest.raises(InjectedError, match=rf"replica {sequence.fails[0]} at {sequence.fails[1]}"):
            wrapped(batch)
        return
    found = wrapped(batch)
    (grad,) = torch.autograd.grad(found.sin().sum(), batch, retain_graph=True)
    found.sin().sum().backward()
    wanted = torch.cat(alone(sequence.names, [*(batch * weight).split(sizes)]))
    expected = torch.autograd.grad(wanted.sin().sum(), [batch, weight])
    for ours, theirs in zip([found, grad, whole(model.weight.grad)], [wanted, *expected], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def sequences(count: int, accelerators: bool) -> st.SearchStrategy[Sequence]:
    """Sequences for so many replicas; more than half of them with an error."""
    names = st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=6).map(tuple)
    sizes = st.lists(st.integers(1, 3), min_size=count, max_size=count)
    options = st.sampled_from([{}, {"serial": True}, *({"workers": n} for n in range(1, count + 1))])
    arguments = st.builds(lambda options, sizes: {**options, "chunk_sizes": sizes}, options, sizes)
    streams = st.booleans() if accelerators else st.just(False)

    def with_fails(names: tuple[str, ...]) -> st.SearchStrategy[Sequence]:
        place = st.tuples(st.integers(0, count - 1), st.integers(0, len(names)))
        fails = st.one_of(st.none(), place, place)
        return st.builds(Sequence, st.sampled_from([*FORMS]), st.just(names), fails, streams, arguments)

    return names.flatmap(with_fails)


@pytest.mark.slots(2, 3, 5)
@settings(max_examples=9 * settings().max_examples)
@given(data=st.data())
def test_sequences(slots, data):
    accelerators = torch.device(slots[0]).type != "cpu"
    sequence = data.draw(sequences(len(slots), accelerators))
    within_limit(lambda: check(sequence, slots))
    if accelerators:
        torch.accelerator.synchronize()
