"""What tests of compiled replicas share: models, ways to compile them, and what one device computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel

BACKEND = "aot_eager"


class Net(nn.Module):
    """Two layers and a norm, so that a forward changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


class Breaks(nn.Module):
    """A graph break in its forward, and an attribute that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.last(h)


# Each makes a form of a module whose replicas are compiled.


def compile_argument(net: nn.Module, slots: list, form: Any = DataParallel, **options: Any) -> Any:
    return form(net, slots, compile={"backend": BACKEND, **options})


def compiled_before(net: nn.Module, slots: list, form: Any = DataParallel, **options: Any) -> Any:
    return form(torch.compile(net, **{"backend": BACKEND, **options}), slots)


def compiled_in_place(net: nn.Module, slots: list, form: Any = DataParallel, **options: Any) -> Any:
    net.compile(**{"backend": BACKEND, **options})
    return form(net, slots)


def compiled_after(net: nn.Module, slots: list, form: Any = DataParallel, **options: Any) -> Any:
    made = form(net, slots)
    net.compile(**{"backend": BACKEND, **options})
    return made


def parts_compiled(net: nn.Module, slots: list, form: Any = DataParallel, **options: Any) -> Any:
    for child in net.children():
        child.compile(**{"backend": BACKEND, **options})
    return form(net, slots)


def parts_wrapped(net: nn.Module, slots: list, form: Any = DataParallel, **options: Any) -> Any:
    for name, child in [*net.named_children()]:
        setattr(net, name, torch.compile(child, **{"backend": BACKEND, **options}))
    return form(net, slots)


WAYS = [compile_argument, compiled_before, compiled_in_place, parts_compiled, parts_wrapped]


def build(root: Any, make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make().double().to(root)


def batch(root: Any, count: int = 12) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)


def state_and_gradients(net: nn.Module) -> list[Tensor]:
    return [*net.state_dict().values(), *(p.grad for p in net.parameters() if p.grad is not None)]


def steps(wrapper: nn.Module, net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Losses, then parameters, buffers and last gradients, after a step of AdamW for each batch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = wrapper(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state_and_gradients(net)]


def expected_steps(
    slots: list, root: Any, batches: list[Tensor], make: Callable[[], nn.Module] = Net, form: Any = DataParallel
) -> list[Tensor]:
    """`steps` with replicas that are not compiled."""
    net = build(root, make)
    return steps(form(net, slots), net, batches)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
