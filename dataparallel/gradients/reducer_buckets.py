"""`ReducerBucket` lays a bucket's gradients out for a `Reducer`; `ReducerSums` keeps gradients that wait for one."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import ReadyEvent, SourceGradients
from dataparallel.comm.buckets import Bucket, flatten, has_strides, layout_of
from dataparallel.gradients.gradient_sums import GradientSums, GradSnapshot, KeptGradient, SourceBucket, one_at_a_time


class TakenGradients(NamedTuple):
    """Gradients that a pass has taken, and for each source the ``.grad`` in which the one of slot 0 has waited."""

    kept: dict[tuple[int, int], KeptGradient]
    grads: list[tuple[GradSnapshot, Tensor]]


class ReducerSums(GradientSums):
    """The gradients of a module that has a `Reducer`.

    - Slot 0's gradients wait in ``.grad``, but the reducer has to get them together with those of other slots, and
      without the sums that it has reduced before. So these sums are copied when gradients begin to wait. The pass that
      takes the gradients writes the copy back to ``.grad`` when it has succeeded on all machines.
    - Only a pass with sums takes gradients that wait, and only of sources whose ``.grad`` it writes. If the pass fails,
      the gradients wait again.
    """

    first_waiting_slot = 0
    """Slot 0's gradients wait too, in ``.grad``."""

    def begin_keeping(self, source: Tensor) -> None:
        """See `GradientSums.begin_keeping`. The running pass adds to the ``.grad`` that is copied here."""
        super().begin_keeping(source)
        self._snapshots[id(source)].reduced = None if source.grad is None else source.grad.clone()

    def add_kept(self) -> None:
        """Does nothing: gradients are added to ``.grad`` only after the reducer has had them."""

    @one_at_a_time
    def take_to_send(self, bucket: SourceBucket, written: Set[int]) -> TakenGradients:
        """Takes the gradients of all slots that wait for the ``written`` sources. The forward's streams are current."""
        self.drop_void(bucket.sources)
        ids = {id(bucket.sources[position]) for position in written}
        snapshots = [snapshot for each in ids if (snapshot := self._snapshots.get(each)) is not None]
        if not snapshots:
            return TakenGradients({}, [])
        # Without a ``.grad`` the gradients are void, and the engine still holds the pass that has failed.
        grads = [(snapshot, snapshot.source.grad) for snapshot in snapshots if snapshot.source.grad is not None]
        slot_0_grads = [grad if snapshot.reduced is None else grad - snapshot.reduced for snapshot, grad in grads]
        valid = {id(snapshot.source) for snapshot, _ in grads}
        taken = TakenGradients({key: kept for key, kept in self._take(ids).items() if key[1] in valid}, grads)
        device = bucket.sources[0].device
        ready_event = None if device.type == "cpu" else ReadyEvent(torch.accelerator.current_stream(device))
        for (snapshot, _), grad in zip(grads, slot_0_grads, strict=True):
            taken.kept[0, id(snapshot.source)] = KeptGradient(snapshot.source, grad, ready_event, bucket.streams)
        return taken

    def remove_from_grads(self, taken: TakenGradients) -> None:
        """Removes slot 0's gradients from ``.grad`` after the pass has succeeded.

        The reduced gradients, which the pass adds next, contain them. The streams of the forward are current, and the
        engine orders the additions after them.
        """
        for snapshot, grad in taken.grads:
            if snapshot.reduced is None:
                snapshot.source.grad = None
            else:
                grad.copy_(snapshot.reduced)

    @one_at_a_time
    def put_back(self, taken: TakenGradients) -> None:
        """Lets gradients wait again after the pass that has taken them has failed. No ``.grad`` has changed."""
        for snapshot, _ in taken.grads:
            self._snapshots.setdefault(id(snapshot.source), snapshot)
        for (slot, _), kept in taken.kept.items():
            if slot:
                self._add_to_kept(slot, [kept], kept.ready_event)


class ReducerBucket(SourceBucket):
    """A bucket, and the layout of the flat buffer that a `Reducer` gets for it.

    In the buffer each gradient has the order of a contiguous tensor, whatever its strides are, so that the buffer is
    the same on all machines.
    """

    def __init__(
        self,
        sums: GradientSums,
        sources: Sequence[Tensor],
        streams: dict[torch.device, torch.Stream],
        names: Sequence[str],
    ) -> None:
        super().__init__(sums, sources, streams)
        self.names = list(names)
        for name, source in zip(names, sources, strict=True):
            if not has_strides(source):
                raise TypeError(
                    f"parameter {name!r} is {'nested' if source.is_nested else source.layout}: its gradient cannot "
                    "travel in a flat buffer. Pass it in ignored_params, and sum its gradient yourself"
                )
        contiguous = [torch.empty(source.shape, device="meta") for source in sources]
        self.layout = Bucket.of([(i, layout_of(like)) for i, like in enumerate(contiguous)])

    def describe(self) -> str:
        """Returns words that are equal on all machines if their buckets have the same sources."""
        members = [f"{self.names[i]} {list(self.sources[i].shape)}" for i in self.layout.indices]
        return f"{self.sources[0].dtype}: {', '.join(members)}"

    def flatten(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Copies gradients into a new flat buffer with this layout, on the current stream."""
        filled = []
        for name, source, grad in zip(self.names, self.sources, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {name!r} has the layout {grad.layout}, and gradients go on to other machines, or "
                    "to a hook, in flat buffers. Make it dense, with sparse=False in an Embedding; or pass the "
                    "parameter in ignored_params, and sum its gradient yourself"
                )
            filled.append(torch.zeros_like(source) if grad is None else grad)
        return flatten(self.layout, filled)

    def is_laid_out(self, sums: SourceGradients) -> bool:
        """True if ``sums.flat`` has the bucket's layout already, so that it needs no copy."""
        found = None if sums.flat is None else sums.bucket
        return found is not None and found.row_major and found.indices == self.layout.indices

    def zeros(self) -> Tensor:
        """Returns a flat buffer of zeros with this layout, made on the current stream."""
        return torch.zeros(self.layout.numel, dtype=self.sources[0].dtype, device=self.sources[0].device)
