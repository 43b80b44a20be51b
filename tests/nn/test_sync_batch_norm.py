"""`SyncBatchNorm` in replicas equals BatchNorm over the whole batch on one device, with CUDA's kernels and without."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clocked import counted
from dataparallel import DataParallel, peers
from dataparallel.composable import fully_shard, replicate
from dataparallel.nn import BatchNorm, SyncBatchNorm, sync_batch_norm

SHAPES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (3, 2), nn.BatchNorm3d: (2, 1, 2)}
OPTIONS = [{}, {"momentum": None}, {"momentum": 0.3, "eps": 1e-2}, {"affine": False}, {"track_running_stats": False}]


def made(kind: type, seed: int = 0, **options: Any) -> nn.Module:
    """A BatchNorm of 4 channels in float64. One weight is zero, as many models begin."""
    torch.manual_seed(seed)
    module = kind(4, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5)[1] = 0
    return module


def batch_of(rows: int, kind: type = nn.BatchNorm2d, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + torch.randn(rows, 4, *SHAPES[kind], dtype=torch.float64, generator=generator)


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, check_device=False)


def results(model: nn.Module, module: nn.Module, batch: Tensor, steps: int = 3) -> list[Tensor]:
    """Outputs, gradients and running statistics of a few training steps."""
    found: list[Tensor] = []
    for step in range(steps):
        own = (batch + step).requires_grad_()
        module.zero_grad()
        output = model(own)
        (output * output.detach().cos() + output**2 * own.detach()).sum().backward()
        found += [output.detach(), own.grad, *(parameter.grad.clone() for parameter in module.parameters())]
    return [*found, *(buffer.clone() for buffer in module.buffers())]


@pytest.fixture(params=["by operators", pytest.param("by kernels", marks=pytest.mark.devices("cuda"))])
def way(request, monkeypatch):
    """Both ways. The kernels exist on CUDA only."""
    if request.param == "by operators":
        monkeypatch.setattr(sync_batch_norm, "_has_kernels", lambda chunk: False)


class TestParity:
    @pytest.mark.slots(2, 3, 8)
    @pytest.mark.parametrize("kind", SHAPES)
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_training(self, slots, way, kind, options):
        module = made(kind, **options).to(slots[0])
        alone, batch = copy.deepcopy(module), batch_of(2 * len(slots) + 1, kind).to(slots[0])
        batch[:, 2] = 5  # a channel without variance
        wrapped = DataParallel(module, slots, sync_batch_norm=True)
        same(results(wrapped, module, batch), results(alone, alone, batch))
        same([wrapped.eval()(batch)], [alone.eval()(batch)])

    @given(sizes=st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(lambda sizes: sum(sizes) > 1))
    def test_any_chunks(self, slots, sizes):
        """A replica may come with an empty chunk: it cuts its chunk itself, because no batch is split so."""

        class Cut(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = SyncBatchNorm.convert(made(nn.BatchNorm2d))

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(x[: sizes[peers.index()]])

        module, batch = Cut().to(slots[0]), batch_of(12).to(slots[0])
        kept = torch.cat([chunk[:size] for chunk, size in zip(batch.split(4), sizes, strict=True)])
        alone = made(nn.BatchNorm2d).to(slots[0])
        outputs = []
        for model, data in ((DataParallel(module, slots), batch), (alone, kept)):
            for _ in range(2):
                outputs.append(model(data))
            outputs[-1].sin().sum().backward()
        same(outputs[:2], outputs[2:])
        same([p.grad for p in module.parameters()], [p.grad for p in alone.parameters()])
        same([*module.buffers()], [*alone.buffers()])

    def test_layouts(self, slots, way):
        """Chunks and gradients with other strides than each other."""
        module, batch = made(nn.BatchNorm2d).to(slots[0]), batch_of(8).to(slots[0])
        wanted = results(module, module, batch)
        for change in (
            lambda tensor: tensor.to(memory_format=torch.channels_last),
            lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3),
        ):
            for forward in (lambda x: wrapped(change(x)), lambda x: change(wrapped(x))):  # noqa: B023
                own = made(nn.BatchNorm2d).to(slots[0])
                wrapped = DataParallel(own, slots, sync_batch_norm=True)
                same(results(forward, own, batch), wanted)

    def test_a_gradient_without_memory_of_its_own(self, slots, way):
        """The gradient of a sum is one value, seen in all places."""
        found = []
        for sync in (False, True):
            module, batch = made(nn.BatchNorm1d).to(slots[0]), batch_of(8, nn.BatchNorm1d).to(slots[0]).requires_grad_()
            model = DataParallel(module, slots, sync_batch_norm=True) if sync else module
            model(batch).sum().backward()
            found.append([batch.grad, *(parameter.grad for parameter in module.parameters())])
        same(*found)

    def test_replicas_whose_output_leads_to_no_loss(self, slots, way):
        """Their chunks have a gradient all the same: the statistics are theirs too."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = SyncBatchNorm.convert(made(nn.BatchNorm2d))

            def forward(self, x: Tensor) -> Tensor:
                output = self.norm(x)
                return output.sin() if peers.index() == 0 else output.detach()

        module, batch = Net().to(slots[0]), batch_of(len(slots)).to(slots[0]).requires_grad_()
        DataParallel(module, slots)(batch).sum().backward()
        alone, other = made(nn.BatchNorm2d).to(slots[0]), batch.detach().clone().requires_grad_()
        alone(other)[:1].sin().sum().backward()
        same([batch.grad], [other.grad])

    def test_large_means_cost_no_digits(self, slots):
        module = made(nn.BatchNorm1d, affine=False).float().to(slots[0])
        batch = (batch_of(64, nn.BatchNorm1d) + 1e4).to(slots[0])
        found = DataParallel(module, slots, sync_batch_norm=True)(batch.float())
        wanted = made(nn.BatchNorm1d, affine=False).to(slots[0])(batch.float().double())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("steps", ["together", "one after the other"])
def test_a_penalty_on_gradients(slots, way, steps):
    """Gradients of the loss and of its gradients in one pass of backward, and in two."""
    found = []
    for sync in (False, True):
        module, batch = made(nn.BatchNorm2d).to(slots[0]), batch_of(7).to(slots[0]).requires_grad_()
        model = DataParallel(module, slots, sync_batch_norm=True) if sync else module
        loss = model(batch).sin().sum()
        (grad,) = torch.autograd.grad(loss, batch, create_graph=True)
        penalty = (grad - 1).square().sum()
        losses = [loss + penalty] if steps == "together" else [penalty, loss]
        for each in losses:
            each.backward(retain_graph=True)
        found.append([batch.grad, *(parameter.grad for parameter in module.parameters())])
    same(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_and_buffers_in_half_precision(slots, way, dtype):
    """As torch's BatchNorm has it where everything is in half precision."""
    module = made(nn.BatchNorm2d).to(slots[0], dtype)
    alone, batch = copy.deepcopy(module).float(), batch_of(8).to(slots[0], dtype)
    found = []
    for model, own, x in (
        (DataParallel(module, slots, sync_batch_norm=True), module, batch.requires_grad_()),
        (alone, alone, batch.detach().float().requires_grad_()),
    ):
        output = model(x)
        (output.sin() * output.detach()).sum().backward()
        found.append([output, x.grad, *(parameter.grad for parameter in own.parameters()), *own.buffers()])
    for one, other in zip(*found, strict=True):
        assert one.dtype in (dtype, torch.int64)
        torch.testing.assert_close(one.to(other.dtype), other, rtol=3e-2, atol=3e-2)


class TestWhereItIsPlain:
    def test_eval_and_outside(self, slots):
        module = made(nn.BatchNorm2d).to(slots[0])
        alone, batch = copy.deepcopy(module), batch_of(5).to(slots[0])
        SyncBatchNorm.convert(module)
        same(results(module, module, batch), results(alone, alone, batch))
        same([DataParallel(module.eval(), slots)(batch)], [alone.eval()(batch)])

    def test_one_value_of_a_channel_is_an_error_for_the_whole_batch_only(self, slots):
        wrapped = DataParallel(made(nn.BatchNorm1d).to(slots[0]), slots, sync_batch_norm=True)
        wrapped(batch_of(3, nn.BatchNorm1d).to(slots[0]))  # one value a replica
        with pytest.raises(ValueError, match="more than"):
            wrapped(batch_of(1, nn.BatchNorm1d).to(slots[0]))

    def test_an_input_without_channels(self):
        with pytest.raises(ValueError, match="samples, channels"):
            SyncBatchNorm(4)(torch.ones(4))


class TestConversion:
    def test_modules_stay_the_same_objects(self):
        shared = nn.BatchNorm1d(4)
        model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm3d(4), shared), shared, nn.SyncBatchNorm(4))
        before, state = [*model.modules()], [*model.state_dict(keep_vars=True).values()]
        hooked = []
        handle = shared.register_forward_hook(lambda *_: hooked.append(True))
        assert SyncBatchNorm.convert(model) is model
        assert [*model.modules()] == before
        assert all(a is b for a, b in zip(model.state_dict(keep_vars=True).values(), state, strict=True))
        kinds = [type(module) for module in before if not isinstance(module, nn.Sequential)]
        assert kinds == [SyncBatchNorm] * 4
        shared(torch.randn(3, 4))
        assert hooked == [True]
        handle.remove()
        assert pickle.loads(pickle.dumps(shared)).state_dict().keys() == shared.state_dict().keys()
        assert SyncBatchNorm.revert(model) is model
        kinds = [type(module) for module in before if not isinstance(module, nn.Sequential)]
        assert kinds == [nn.BatchNorm2d, nn.BatchNorm3d, nn.BatchNorm1d, BatchNorm]
        assert type(SyncBatchNorm.revert(SyncBatchNorm(4))) is BatchNorm

    def test_subclasses_are_left_and_lazy_ones_refused(self):
        class Own(nn.BatchNorm2d):
            pass

        model = nn.Sequential(Own(4))
        assert type(SyncBatchNorm.convert(model)[0]) is Own
        with pytest.raises(ValueError, match="call the model once"):
            SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm2d(4), nn.LazyBatchNorm2d()))

    def test_torchs_own_is_refused_or_converted(self, slots):
        for refused in (
            lambda model: DataParallel(model, slots),
            lambda model: replicate(model, devices=slots),
            lambda model: fully_shard(model, devices=slots),
        ):
            with pytest.raises(ValueError, match="convert"):
                refused(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)))
        module = nn.Sequential(made(nn.SyncBatchNorm)).to(slots[0])
        alone, batch = made(nn.BatchNorm2d).to(slots[0]), batch_of(5).to(slots[0])
        model = replicate(module, devices=slots, sync_batch_norm=True)
        same(results(model, module, batch), results(alone, alone, batch))
        with pytest.raises(ValueError, match="expected True, False or 'across_machines'"):
            DataParallel(alone, slots, sync_batch_norm="yes")


class TestRecomputation:
    def test_leaves_running_statistics_alone(self, slots):
        class Checked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = SyncBatchNorm.convert(made(nn.BatchNorm2d))

            def forward(self, x: Tensor) -> Tensor:
                return peers.checkpoint(lambda chunk: self.norm(chunk.sin()).exp(), x)

        module, batch = Checked().to(slots[0]), batch_of(5).to(slots[0])
        alone = made(nn.BatchNorm2d).to(slots[0])
        found = results(DataParallel(module, slots), module, batch)
        same(found, results(lambda x: alone(x.sin()).exp(), alone, batch))


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.apart
def test_a_layer_sends_two_vectors_and_a_count_up_and_two_down_once_in_forward_and_once_in_backward(slots):
    """That is what it sends beyond BatchNorm of each chunk. In backward the count has no gradient but travels too."""
    batch = batch_of(6).to(slots[0]).requires_grad_()

    def sent(module: nn.Module) -> list[dict[tuple[int, int], int]]:
        wrapped = DataParallel(module.to(slots[0]), slots)
        with counted() as forward:
            output = wrapped(batch)
            torch.accelerator.synchronize()
        with counted() as backward:
            output.sum().backward()
            torch.accelerator.synchronize()
        return [dict(forward.copied), dict(backward.copied)]

    plain, synchronised = sent(made(nn.BatchNorm2d)), sent(SyncBatchNorm.convert(made(nn.BatchNorm2d)))
    root, *others = (torch.device(slot).index for slot in slots)
    two_vectors, a_count = 2 * 4 * 8, 8
    up_and_down = [(two_vectors + a_count, two_vectors), (two_vectors, two_vectors + a_count)]
    for before, now, (up, down) in zip(plain, synchronised, up_and_down, strict=True):
        extra = {pair: count - before.get(pair, 0) for pair, count in now.items() if count != before.get(pair, 0)}
        assert sum(extra.values()) == len(others) * (up + down)
        assert sum(count for (_, target), count in extra.items() if target == root) == len(others) * up


def test_a_form_that_is_refused_leaves_batch_norms_as_they_are(slots: list) -> None:
    outer, other = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(slots[0]) for _ in range(2))
    outer[0].weight = other[0].weight
    replicate(other, devices=slots)
    with pytest.raises(RuntimeError, match="shared with a module outside"):
        replicate(outer, devices=slots, sync_batch_norm=True)
    assert type(outer[1]) is nn.BatchNorm1d
