"""Random numbers of simulated devices and of a stand-in for CUDA: one generator for each, whose state is saved and set.

Those of simulated devices are the CPU's from the same seed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.devices("sim", "cuda")

DRAWS = {
    "rand": lambda device: torch.rand(3, device=device),
    "randn": lambda device: torch.randn(20, device=device),
    "randint": lambda device: torch.randint(100, (5,), device=device),
    "randperm": lambda device: torch.randperm(10, device=device),
    "normal": lambda device: torch.normal(torch.zeros(3, device=device), torch.ones(3, device=device)),
    "multinomial": lambda device: torch.ones(5, device=device).multinomial(3),
    "bernoulli": lambda device: torch.full((9,), 0.5, device=device).bernoulli(),
    "exponential_": lambda device: torch.empty(3, device=device).exponential_(),
    "geometric_": lambda device: torch.empty(3, device=device).geometric_(0.5),
    "poisson": lambda device: torch.poisson(torch.full((3,), 4.0, device=device)),
    "binomial": lambda device: torch.binomial(*torch.tensor([[9.0, 9.0], [0.5, 0.1]], device=device)),
    "gamma": lambda device: torch.distributions.Gamma(torch.ones(3, device=device), 2.0).sample(),
    "dropout": lambda device: F.dropout(torch.ones(20, device=device)),
    "rrelu": lambda device: F.rrelu(torch.full((9,), -1.0, device=device), training=True),
}
every_draw = pytest.mark.parametrize("name", DRAWS)


@pytest.fixture
def of_kind(root: torch.device) -> Any:
    """``torch.sim`` or ``torch.cuda``."""
    return torch.get_device_module(root)


@pytest.fixture
def device(root: torch.device) -> torch.device:
    """The last one."""
    return torch.device(root.type, torch.accelerator.device_count() - 1)


def draw(device: Any, count: int = 5) -> Tensor:
    return torch.rand(count, device=device)


@pytest.mark.devices("sim")
@every_draw
def test_a_simulated_device_draws_the_numbers_of_the_cpu(name: str, device: torch.device) -> None:
    torch.manual_seed(7)
    expected = [DRAWS[name]("cpu"), DRAWS[name]("cpu")]
    torch.manual_seed(7)
    for each in expected:
        assert torch.equal(DRAWS[name](device).cpu(), each)


@every_draw
def test_draws_on_a_device_move_no_other_generator(name: str, of_kind: Any, device: torch.device) -> None:
    other = torch.device(device.type, 0)
    if other == device:
        pytest.skip("for several devices")

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), of_kind.get_rng_state(other), of_kind.get_rng_state(device)]

    before = states()
    DRAWS[name](device)
    assert [*map(torch.equal, states(), before)] == [True, True, False]


def test_a_seed_repeats_the_numbers_on_every_device(of_kind: Any, root: torch.device) -> None:
    devices = [torch.device(root.type, index) for index in range(torch.accelerator.device_count())]
    of_kind.manual_seed_all(7)
    first = [draw(device) for device in devices]
    of_kind.manual_seed_all(7)
    assert all(torch.equal(draw(device), numbers) for device, numbers in zip(devices, first, strict=True))
    assert all(torch.equal(first[0].cpu(), numbers.cpu()) for numbers in first)
    assert not torch.equal(draw(devices[0]), first[0])


def test_a_state_is_saved_and_set(of_kind: Any, device: torch.device) -> None:
    draw(device)
    state = of_kind.get_rng_state(device)
    first = [each(device) for each in DRAWS.values()]
    of_kind.set_rng_state(state, device)
    assert all(map(torch.equal, first, [each(device) for each in DRAWS.values()]))


def test_a_generator_of_ones_own(of_kind: Any, device: torch.device) -> None:
    default = of_kind.get_rng_state(device)
    generator = torch.Generator(device).manual_seed(11)
    assert generator.device == device
    assert generator.initial_seed() == 11
    first = torch.randn(4, device=device, generator=generator)
    state, copied = generator.get_state(), copy.deepcopy(generator) if device.type == "sim" else None
    second = torch.randn(4, device=device, generator=generator)
    assert not torch.equal(first, second)
    generator.set_state(state)
    for each in filter(None, [generator, copied]):
        assert each.device == device
        assert torch.equal(torch.randn(4, device=device, generator=each), second)
    assert torch.equal(torch.randn(4, device=device, generator=torch.Generator(device).manual_seed(11)), first)
    assert torch.equal(of_kind.get_rng_state(device), default)


@pytest.mark.devices("sim")
def test_a_generator_of_the_cpu_is_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="expected a generator of a simulated device; got one of cpu"):
        torch.empty(3, device=device).uniform_(generator=torch.Generator())
