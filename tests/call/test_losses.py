"""A loss on the replicas equals that of one device with the whole batch, and outputs are gathered only if asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dataparallel import DataParallel, peers
from dataparallel.composable import replicate

CLASSES = 5
WEIGHT = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)


def numbers(rows: int) -> Tensor:
    """Targets in (0, 1), of the shape of the outputs."""
    return torch.rand(rows, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def classes(rows: int) -> Tensor:
    """Targets of which about a half is to be ignored."""
    drawn = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(3))
    return torch.where(drawn > 2, -100, drawn)


def signs(rows: int) -> Tensor:
    return numbers(rows).round() * 2 - 1


LOSSES: dict[str, tuple[Any, Any]] = {
    "cross entropy": (nn.CrossEntropyLoss(), classes),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHT), classes),
    "another ignore_index": (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1), lambda n: classes(n).clamp(min=0)),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.3), classes),
    "label smoothing with weights": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.3), classes),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT), lambda n: numbers(n).softmax(1)),
    "negative log-likelihood": (nn.NLLLoss(weight=WEIGHT), classes),
    "squares": (nn.MSELoss(), numbers),
    "distances": (nn.L1Loss(), numbers),
    "smooth distances": (nn.SmoothL1Loss(beta=0.5), numbers),
    "Huber": (nn.HuberLoss(), numbers),
    "logits": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), numbers),
    "divergence": (nn.KLDivLoss(reduction="mean"), numbers),
    "divergence by samples": (nn.KLDivLoss(reduction="batchmean"), numbers),
    "Poisson": (nn.PoissonNLLLoss(), numbers),
    "margins": (nn.MultiMarginLoss(), lambda n: classes(n).clamp(min=0)),
    "soft margins": (nn.SoftMarginLoss(), signs),
    "a function": (lambda output, target: F.mse_loss(output, target), numbers),
    "a total and a count": (lambda o, t: (F.cross_entropy(o, t, reduction="sum"), (t != -100).sum()), classes),
    "a function of each sample": (lambda output, target: (output - target).square().sum(1), numbers),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.fixture
def net(root):
    torch.manual_seed(0)
    return Net().double().to(root)


def rows_of(count: int, root: Any) -> Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)


def moved(criterion: Any, root: Any) -> Any:
    return copy.deepcopy(criterion).to(root) if isinstance(criterion, nn.Module) else criterion


def on_one_device(criterion: Any, output: Tensor, target: Any) -> Tensor:
    loss = criterion(output, target)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def check(model: nn.Module, net: nn.Module, criterion: Any, x: Tensor, target: Any) -> None:
    """Loss and gradients, on the wrapped model and on one device."""
    results = []
    for loss in (lambda: model(x, target=target), lambda: on_one_device(criterion, net(x), target)):
        net.zero_grad()
        found = loss()
        found.sin().sum().backward()
        results.append([found.detach(), *(parameter.grad.clone() for parameter in net.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def with_reductions() -> list[tuple[str, str | None]]:
    """Each loss with each of its reductions; ``None``: the only one."""
    found: list[tuple[str, str | None]] = []
    for name, (criterion, _) in LOSSES.items():
        has_one = not isinstance(criterion, nn.Module) or criterion.reduction == "batchmean"
        found += [(name, reduction) for reduction in ([None] if has_one else ["mean", "sum", "none"])]
    return found


@pytest.mark.slots(2, 3, long=[8])
@pytest.mark.parametrize(("name", "reduction"), with_reductions())
def test_each_loss(name, reduction, slots, root, net):
    criterion, targets = LOSSES[name]
    criterion = moved(criterion, root)
    if reduction is not None:
        criterion.reduction = reduction
    rows = 2 * len(slots) + 1
    check(DataParallel(net, slots, loss=criterion), net, criterion, rows_of(rows, root), targets(rows).to(root))


@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3), name=st.sampled_from(sorted(LOSSES)))
def test_uneven_chunks(sizes, name, slots, root):
    torch.manual_seed(0)
    net, (criterion, targets), rows = Net().double().to(root), LOSSES[name], sum(sizes)
    criterion = moved(criterion, root)
    model = DataParallel(net, slots, chunk_sizes=sizes, loss=criterion)
    check(model, net, criterion, rows_of(rows, root), targets(rows).to(root))


class TestWhatIsIgnored:
    def test_a_chunk_of_which_nothing_counts(self, slots, root, net):
        target = torch.tensor([-100, -100, 1, 2, -100, 0], device=root)
        criterion = nn.CrossEntropyLoss()
        check(DataParallel(net, slots, loss=criterion), net, criterion, rows_of(6, root), target)

    def test_a_batch_of_which_nothing_counts_is_nan_as_on_one_device(self, slots, root, net):
        target = torch.full((6,), -100, device=root)
        loss = DataParallel(net, slots, loss=nn.CrossEntropyLoss())(rows_of(6, root), target=target)
        assert loss.isnan()


class TestCalls:
    def test_outputs_are_gathered_only_if_asked_for(self, slots, root, net):
        gathered = []

        class Watched(DataParallel):
            def gather(self, outputs, output_device):
                gathered.append([output.shape for output in outputs])
                return super().gather(outputs, output_device)

        model = Watched(net, slots, loss=nn.MSELoss())
        x, target = rows_of(6, root), numbers(6).to(root)
        loss = model(x, target=target)
        assert gathered == []
        again, outputs = model(x, target=target, outputs=True)
        assert gathered == [[torch.Size([2, 5])] * 3]
        assert torch.equal(loss, again)
        assert torch.equal(outputs, model(x))
        assert isinstance(model(x), Tensor)

    def test_targets_may_be_a_structure(self, slots, root, net):
        def criterion(output: Tensor, target: dict[str, Any]) -> Tensor:
            return (output - target["values"]).square().mean() * target["factor"]

        target = {"values": numbers(7).to(root), "factor": 3.0}
        check(DataParallel(net, slots, loss=criterion), net, criterion, rows_of(7, root), target)

    def test_fewer_samples_than_slots(self, slots, root, net):
        criterion = nn.CrossEntropyLoss()
        check(DataParallel(net, slots, loss=criterion), net, criterion, rows_of(2, root), classes(2).clamp(0).to(root))

    @pytest.mark.parametrize("count", [0, 1])
    def test_without_replicas(self, count, net, root):
        criterion, alone = nn.CrossEntropyLoss(), net.cpu()
        model = DataParallel(alone, ["cpu"] * count or ["cpu"], loss=criterion)
        if count == 0:
            model.device_ids = []
        check(model, alone, criterion, rows_of(3, "cpu"), classes(3).clamp(0))
        assert len(model(rows_of(3, "cpu"), target=classes(3).clamp(0), outputs=True)) == 2

    def test_without_gradients_under_autocast_and_frozen(self, slots, root, net):
        model, target = DataParallel(net, slots, loss=nn.CrossEntropyLoss()), classes(6).clamp(0).to(root)
        with torch.no_grad():
            plain = model(rows_of(6, root), target=target)
            with model.options.frozen():
                assert torch.equal(model(rows_of(6, root), target=target), plain)
        net.float()
        with torch.autocast(torch.device(root).type, torch.bfloat16):
            loss = model(rows_of(6, root).float(), target=target)
        loss.backward()
        torch.testing.assert_close(loss.double(), plain, rtol=3e-2, atol=3e-2)

    def test_compiled_replicas(self, slots, root, net):
        criterion = nn.CrossEntropyLoss()
        model = DataParallel(net, slots, compile={"backend": "eager"}, loss=criterion)
        check(model, net, criterion, rows_of(6, root), classes(6).clamp(0).to(root))

    def test_collectives_in_the_loss(self, slots, root, net):
        def criterion(output: Tensor, target: Tensor) -> Tensor:
            return (output - peers.all_gather(target).mean(0)).square().mean()

        x, target = rows_of(7, root), numbers(7).to(root)
        found = DataParallel(net, slots, loss=criterion)(x, target=target)
        torch.testing.assert_close(found, criterion(net(x), target), rtol=1e-12, atol=1e-12)

    def test_second_derivatives(self, slots, root, net):
        target = classes(5).clamp(0).to(root)
        results = []
        for loss in (
            lambda: DataParallel(net, slots, loss=nn.CrossEntropyLoss())(rows_of(5, root), target=target),
            lambda: F.cross_entropy(net(rows_of(5, root)), target),
        ):
            grads = torch.autograd.grad(loss(), [*net.parameters()], create_graph=True)
            results.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), [*net.parameters()]))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class TestTensorsOfTheCriterion:
    def test_parameters_get_gradients_and_are_not_part_of_the_wrapper(self, slots, root, net):
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

            def forward(self, output: Tensor, target: Tensor) -> Tensor:
                return (self.scale * output - target).square().mean()

        criterion = Scaled().to(root)
        model = DataParallel(net, slots, loss=criterion)
        assert [*model.state_dict()] == [f"module.{key}" for key in net.state_dict()]
        x, target = rows_of(7, root), numbers(7).to(root)
        model(x, target=target).backward()
        found, criterion.scale.grad = criterion.scale.grad, None
        criterion(net(x), target).backward()
        torch.testing.assert_close(found, criterion.scale.grad, rtol=1e-9, atol=1e-12)

    @pytest.mark.devices("sim", "cuda")
    def test_on_another_device_is_an_error(self, slots, root, net):
        model = DataParallel(net, slots, loss=nn.CrossEntropyLoss(weight=WEIGHT))
        with pytest.raises(RuntimeError, match="weight"):
            model(rows_of(6, root), target=classes(6).to(root))


class TestErrors:
    def test_bad_arguments(self, slots, net):
        class Targeted(nn.Module):
            def forward(self, x: Tensor, target: Tensor) -> Tensor:
                return x

        with pytest.raises(TypeError, match="a module or a function"):
            DataParallel(net, slots, loss="mse")
        with pytest.raises(ValueError, match="'target'"):
            DataParallel(Targeted(), slots, loss=nn.MSELoss())
        with pytest.raises(ValueError, match="'target'"):
            replicate(Targeted(), devices=slots, loss=nn.MSELoss())
