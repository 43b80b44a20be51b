"""Operators on shards run on the current streams of their owners. Where an order is missing, the clocks raise."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dataparallel.comm.streams.current import streams_joined
from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor, order
from sharding import full

pytestmark = pytest.mark.devices("sim", "stand-in")

SHAPES = [(8, 3), (5, 4), (1,), (), (4, 7), (6, 2)]
PLACEMENTS = [Shard(0), Shard(0), Shard(0), Shard(0), Shard(1), Replicate()]


def parameters_on(slots: Sequence[Any]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [
        nn.Parameter(distribute_tensor(torch.randn(shape), slots, placement))
        for shape, placement in zip(SHAPES, PLACEMENTS, strict=True)
    ]


def optimizer_steps(slots: Sequence[Any], **options: Any) -> list[Tensor]:
    """Steps with plain gradients of the first owner, clipping, scaling, averages, and states that are loaded."""
    root = torch.device(slots[0])
    parameters = parameters_on(slots)
    model = nn.Module()
    model.all = nn.ParameterList(parameters)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    scaler = torch.amp.GradScaler(root.type, init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        generator = torch.Generator(root).manual_seed(step)
        factors = [torch.randn(parameter.shape, device=root, generator=generator) for parameter in parameters]
        loss = sum((factor * parameter).sum() for factor, parameter in zip(factors, parameters, strict=True))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        averaged.update_parameters(model)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
        optimizer.load_state_dict(state)
    return [full(parameter) for parameter in [*parameters, *averaged.parameters()]]


def operators(slots: Sequence[Any]) -> list[Tensor]:
    """One operator after the other, each on what the last one has written."""
    root = torch.device(slots[0])
    found: list[Any] = []
    for parameter in parameters_on(slots):
        tensor = parameter.detach()
        assert isinstance(tensor, ShardedTensor)
        torch.manual_seed(0)
        nn.init.normal_(tensor)
        plain = torch.rand(tensor.shape, device=root)
        tensor = tensor * plain + plain.sum()
        tensor.add_(plain).copy_(tensor + torch.rand_like(tensor))
        anew = distribute_tensor(tensor, [*reversed(slots)], Replicate())
        anew.mul_(2)
        tensor.copy_(anew)
        plain.copy_(tensor)
        found += [
            plain,
            tensor,
            tensor.sum(),
            tensor.norm(),
            tensor.amax(),
            tensor.mean(),
            tensor.full_tensor(slots[-1]),
        ]
        torch._foreach_mul_([tensor, anew], torch.full((), 3.0, device=root))
        torch._foreach_add_([tensor], [tensor.sum()])
        found += [*torch._foreach_norm([tensor, anew]), tensor.to("cpu"), copy.deepcopy(anew), tensor.double()]
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        found.append(torch.load(file) + tensor)
    return [full(value) for value in found]


def hooks(slots: Sequence[Any]) -> list[Tensor]:
    """Hooks of a backward that divide a plain gradient, because they read it, and use what their thread has made."""
    parameters = parameters_on(slots)

    def scale_gradient(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, ShardedTensor)
        parameter.grad.mul_(torch.full(parameter.shape, 2.0, device=slots[-1]))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(scale_gradient)
    for _ in range(2):
        for parameter in parameters:
            torch.zeros_like(parameter).add_(1)
            parameter.grad = None
        sum((parameter * 3).sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        for parameter in parameters:
            parameter.grad.mul_(2)  # type: ignore[union-attr]
    return [full(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]


def two_forwards(slots: Sequence[Any]) -> list[Tensor]:
    """One on the current streams, to which gradients belong, and one on others, which are used last."""
    parameters = parameters_on(slots)
    for step in range(3):
        loss = sum((parameter * 3).sum() for parameter in parameters)
        with streams_joined({device: torch.Stream(device) for device in slots}):
            loss = loss + sum((parameter * 2).sum() for parameter in parameters)
        with torch.no_grad():  # no graph, so these are not noted
            for parameter in parameters if step > 0 else ():
                parameter.grad.mul_(2)  # type: ignore[union-attr]
        loss.backward()  # type: ignore[union-attr]
    return [full(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "work",
    [
        operators,
        hooks,
        two_forwards,
        lambda slots: optimizer_steps(slots, foreach=False),
        lambda slots: optimizer_steps(slots, foreach=True),
    ],
    ids=["operators", "hooks", "two forwards", "loop", "foreach"],
)
def test_they_are_ordered_on_any_current_streams(
    slots: list, work: Callable[[Sequence[Any]], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = work(slots)
    for name in ("_used_streams", "_last_stream"):  # other streams that a forward has used would be waited for too
        monkeypatch.setattr(order, name, {})
    for _ in range(2):  # the second time on memory that the first has freed
        with streams_joined({device: torch.Stream(device) for device in slots}):
            got = work(slots)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)
