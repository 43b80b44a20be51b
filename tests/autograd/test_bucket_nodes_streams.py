"""Each slot's device flattens its own gradients of a bucket, and the sums end on the caller's stream."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from buckets import broadcast, check, expected, loss_of
from dataparallel.autograd.bucket_gradients import FromSource, SlotGradients, ToSlots


@pytest.mark.devices("sim", "cuda")
class TestOnAccelerators:
    """The threads and streams of each step."""

    @pytest.fixture(autouse=True)
    def distinct(self, slots: list) -> None:
        if len({*slots}) < len(slots):
            pytest.skip("nothing travels between slots on one device")

    def test_each_device_flattens_in_its_own_thread(
        self, slots: list, root: torch.device, sources: list, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: dict[torch.device, int] = {}
        init = SlotGradients.__init__

        def noted(self: SlotGradients, grads: Any, bucket: Any = None) -> None:
            init(self, grads, bucket)
            assert self.flat is not None
            assert not self.separate
            threads[self.flat.device] = threading.get_ident()

        monkeypatch.setattr(SlotGradients, "__init__", noted)
        loss_of(broadcast(slots, sources), root).backward()
        assert {*threads} == {torch.device(slot) for slot in slots}
        assert len({*threads.values()}) == len(slots)

    def test_nothing_is_flattened_if_the_caller_says_so(
        self, slots: list, root: torch.device, sources: list, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summed = []
        sum_all = ToSlots.sum_into_envelope
        monkeypatch.setattr(
            ToSlots, "sum_into_envelope", lambda ctx, grads: summed.extend(grads) or sum_all(ctx, grads)
        )
        loss_of(broadcast(slots, sources, may_flatten=lambda: False), root).backward()
        assert [of_slot.flat for of_slot in summed] == [None] * len(slots)
        check(sources, expected(sources, slots))

    def test_what_comes_from_the_source_belongs_to_the_callers_stream(self, slots: list, root: torch.device) -> None:
        x = torch.ones(3, device=root, requires_grad=True)
        seen: list[torch.Stream] = []
        (copy, *_) = (of_slot[0] for of_slot in broadcast(slots, [x]))
        from_source = copy.grad_fn.next_functions[0][0].next_functions[0][0]
        assert from_source.name() == "FromSourceBackward"
        from_source.register_prehook(lambda _: seen.append(torch.accelerator.current_stream(root)))
        (copy * 2).sum().backward()
        assert seen == [torch.accelerator.current_stream(root)]
        assert x.grad.tolist() == [2, 2, 2]

    def test_an_envelope_has_no_memory_and_gives_its_contents_away(self, root: torch.device) -> None:
        seen: list[Tensor] = []

        class Sums(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, handle: Tensor) -> Tensor:
                ctx.source_device = root
                return torch.zeros((), device=root)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
                grads = [torch.full((3, 2), 5.0, device=root), None]
                seen.append(ToSlots.envelope_of(ctx, grads))
                return seen[0]

        x = torch.ones(3, 2, device=root, requires_grad=True)
        y = torch.ones((), dtype=torch.float64, device=root, requires_grad=True)
        Sums.apply(FromSource.apply(x, y)).backward()
        assert x.grad.tolist() == [[5, 5]] * 3
        assert y.grad is None
        assert [each.untyped_storage().nbytes() for each in seen] == [0]
        assert "contents" not in vars(seen[0])
