"""What single collectives promise: shapes, structures, modes, errors. `test_random_sequences` has their values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from dataparallel import DataParallel, peers
from peer_calls import Calls, parallel, samples

OPERATIONS = ["sum", "mean", "max", "min", "prod"]


class TestValues:
    def test_all_gather_along_another_dimension(self, slots):
        batch = samples(3).to(slots[0])
        found = parallel(lambda chunk, _: peers.all_gather(chunk, dim=-1)[None], slots)(batch)
        assert all(torch.equal(own[0], batch.flatten()) for own in found)

    @pytest.mark.parametrize("sizes", [None, [3, 0, 2]])
    def test_reduce_scatter(self, slots, sizes):
        batch = samples(15).to(slots[0])
        found = parallel(lambda chunk, _: peers.reduce_scatter(chunk, sizes), slots)(batch)
        torch.testing.assert_close(found, batch.view(3, 5, 3).sum(0))

    def test_structures_of_several_dtypes(self, slots):
        def nested(chunk: Tensor, _: Tensor) -> Tensor:
            found = peers.all_reduce({"a": chunk[0], "b": (chunk.sum(), torch.tensor(2, device=chunk.device))})
            assert found["b"][1].dtype == torch.int64
            assert found["b"][1].item() == 6
            return torch.cat([found["a"], found["b"][0][None]])[None]

        batch = samples(3).to(slots[0])
        wanted = torch.cat([batch.sum(0), batch.sum()[None]])
        torch.testing.assert_close(parallel(nested, slots)(batch), wanted.expand(3, -1))

    def test_no_two_replicas_share_the_memory_of_a_result(self, slots):
        def changed(chunk: Tensor, _: Tensor) -> Tensor:
            results = [
                peers.all_reduce(chunk), peers.all_gather(chunk), peers.broadcast(chunk, 1),
                peers.reduce_scatter(chunk.expand(3, -1)),
            ]  # fmt: skip
            peers.barrier()
            for result in results:
                result.fill_(peers.index())
            peers.barrier()
            assert all((result == peers.index()).all() for result in results)
            return chunk

        batch = samples(3).to(slots[0])
        with torch.no_grad():
            assert torch.equal(parallel(changed, slots)(batch.clone()), batch)


class TestGradients:
    @pytest.mark.parametrize("op", OPERATIONS)
    def test_numerically_once_and_twice(self, slots, op):
        wrapped = parallel(lambda chunk, w: (peers.all_reduce(chunk * w, op) ** 2) * peers.all_gather(chunk), slots)
        batch = samples(3).to(slots[0]).requires_grad_()
        assert gradcheck(lambda x: wrapped(x).sum(0), batch)
        # The engine adds gradients of one tensor in the order in which its threads bring them, one thread a device.
        assert gradgradcheck(lambda x: wrapped(x).sum(0), batch, nondet_tol=1e-12)


class TestModes:
    def test_a_replica_without_gradients_gets_a_result_without_a_graph(self, slots):
        seen = {}

        def partly(chunk: Tensor, weight: Tensor) -> Tensor:
            with torch.set_grad_enabled(peers.index() != 1):
                total = peers.all_reduce(chunk * weight)
            seen[peers.index()] = total.requires_grad
            return total * chunk

        batch = samples(3).to(slots[0])
        for workers in (None, 1, 3):
            wrapped = parallel(partly, slots, workers=workers)
            wrapped(batch).sum().backward()
            assert seen == {0: True, 1: False, 2: True}
            # Replica 1 brought a constant, and only replicas 0 and 2 send gradients back.
            wanted = (batch[[0, 2]] * batch[[0, 2]].sum(0)).sum(0)
            torch.testing.assert_close(wrapped.module.weight.grad, wanted)

    def test_inference_mode_in_some_replicas_is_an_error(self, slots):
        def partly(chunk: Tensor, _: Tensor) -> Tensor:
            with torch.inference_mode(peers.index() == 1):
                return peers.all_reduce(chunk)

        with pytest.raises(RuntimeError, match="in inference mode"):
            parallel(partly, slots)(samples(3).to(slots[0]))

    def test_a_compiled_replica_has_a_graph_break(self, slots):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 3, dtype=torch.float64)

            def forward(self, x: Tensor) -> Tensor:
                y = self.linear(x).tanh()
                return self.linear(peers.all_reduce(y, "mean")) * (1 + peers.index())

        torch.manual_seed(0)
        module, batch = Net().to(slots[0]), samples(3).to(slots[0])
        results = []
        for argument in (None, {"backend": "aot_eager"}):
            wrapped = DataParallel(module, slots, compile=argument)
            for _ in range(2):
                module.zero_grad()
                output = wrapped(batch)
                output.sum().backward()
            results.append([output.detach(), *(parameter.grad for parameter in module.parameters())])
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted)


class TestAlone:
    """Outside of a parallel forward there is one replica."""

    def test_each_function(self):
        tensor = torch.arange(3.0, requires_grad=True)
        assert (peers.index(), peers.count()) == (0, 1)
        for op in OPERATIONS:
            assert torch.equal(peers.all_reduce(tensor, op), tensor)
        assert torch.equal(peers.all_gather(tensor), tensor)
        assert torch.equal(peers.broadcast(tensor, 0), tensor)
        assert torch.equal(peers.reduce_scatter(tensor), tensor)
        peers.barrier()
        peers.all_reduce(tensor, "prod").sum().backward()
        assert tensor.grad.tolist() == [1.0] * 3

    def test_in_a_wrapper_without_slots_or_with_one(self, root):
        batch = samples(2)
        for slots in ([], [root]):
            wrapped = DataParallel(Calls(lambda chunk, _: peers.all_reduce(chunk.sum())), slots or ["cpu"])
            assert torch.equal(wrapped(batch.to(wrapped.src_device_obj)).cpu(), batch.sum())


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "error", "words"),
        [
            (lambda x: peers.all_reduce(x, "median"), ValueError, "expected 'sum', 'mean', 'max', 'min' or 'prod'"),
            (lambda x: peers.all_reduce(x.long(), "mean"), TypeError, "floating-point"),
            (lambda x: peers.all_reduce(x > 0), TypeError, "bool"),
            (lambda x: peers.all_reduce("text"), TypeError, "got str"),
            (lambda x: peers.all_gather(x.sum()), IndexError, "unsqueeze"),
            (lambda x: peers.broadcast(x, 7), IndexError, "source=7"),
            (lambda x: peers.reduce_scatter(x, [1]), ValueError, "one size for each replica"),
        ],
    )
    def test_bad_arguments(self, slots, function, error, words):
        with pytest.raises(error, match=words):
            parallel(lambda chunk, _: function(chunk), slots)(samples(3).to(slots[0]))

    def test_a_tensor_of_another_device(self, slots):
        other = torch.ones(3) if torch.device(slots[0]).type != "cpu" else torch.ones(3, device="meta")
        with pytest.raises(ValueError, match="runs on"):
            parallel(lambda chunk, _: peers.all_reduce(other), slots)(samples(3).to(slots[0]))

    @pytest.mark.parametrize("workers", [None, 1, 3])
    def test_replicas_that_disagree_say_what_each_waits_for(self, slots, workers):
        def differs(chunk: Tensor, _: Tensor) -> Tensor:
            if peers.index() == 1:
                return peers.all_gather(chunk)
            return peers.all_reduce(chunk if peers.index() else chunk.float())

        with pytest.raises(RuntimeError) as caught:
            parallel(differs, slots, workers=workers)(samples(3).to(slots[0]))
        for words in (
            "replica 0 on .* waits for all_reduce\\('sum'\\) of float32\\[1, 3\\]",
            "replica 1 on .* waits for all_gather\\(dim=0\\) of float64\\[any, 3\\]",
            "replica 2 on .* waits for all_reduce\\('sum'\\) of float64\\[1, 3\\]",
        ):
            assert caught.match(words)
