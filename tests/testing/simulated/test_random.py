"""Each simulated device has a generator, which draws the numbers that the CPU draws from the same seed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from like_the_cpu import DEVICE, OTHER

pytestmark = pytest.mark.devices("sim")

DRAWS = {
    "rand": lambda device: torch.rand(3, device=device),
    "randn": lambda device: torch.randn(20, device=device),
    "randn_like": lambda device: torch.randn_like(torch.empty(3, device=device)),
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
    "dropout2d": lambda device: F.dropout2d(torch.ones(2, 5, 2, 2, device=device)),
    "alpha_dropout": lambda device: F.alpha_dropout(torch.ones(9, device=device), training=True),
    "rrelu": lambda device: F.rrelu(torch.full((9,), -1.0, device=device), training=True),
    "gumbel_softmax": lambda device: F.gumbel_softmax(torch.ones(4, device=device)),
    "trunc_normal_": lambda device: nn.init.trunc_normal_(torch.empty(5, device=device)),
    "kaiming_uniform_": lambda device: nn.init.kaiming_uniform_(torch.empty(3, 3, device=device)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_gives_the_same_numbers_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(7)
    expected = [DRAWS[name]("cpu"), DRAWS[name]("cpu")]
    torch.manual_seed(7)
    drawn = [DRAWS[name](DEVICE), DRAWS[name](DEVICE)]
    assert drawn[0].device == DEVICE
    for one, other in zip(drawn, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_on_a_device_move_no_other_generator(name: str) -> None:
    before = torch.get_rng_state(), torch.sim.get_rng_state(OTHER), torch.sim.get_rng_state(DEVICE)
    DRAWS[name](DEVICE)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.sim.get_rng_state(OTHER), before[1])
    assert not torch.equal(torch.sim.get_rng_state(DEVICE), before[2])


def test_generators_of_ones_own() -> None:
    generator = torch.Generator(device=DEVICE)
    assert generator.device == DEVICE
    generator.manual_seed(5)
    on_cpu = torch.Generator().manual_seed(5)
    default = torch.sim.get_rng_state(DEVICE)
    for shape in ((3,), (20,)):
        drawn = torch.randn(shape, generator=generator, device=DEVICE)
        assert torch.equal(drawn.cpu(), torch.randn(shape, generator=on_cpu))
    state = generator.get_state()
    first = torch.empty(3, device=DEVICE).uniform_(generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.empty(3, device=DEVICE).uniform_(generator=generator), first)
    assert torch.equal(torch.sim.get_rng_state(DEVICE), default)
    assert generator.initial_seed() == 5


def test_a_generator_of_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected a generator of a simulated device; got one of cpu"):
        torch.empty(3, device=DEVICE).uniform_(generator=torch.Generator())


def test_dropout_scales_what_it_keeps_and_masks_the_gradient() -> None:
    x = torch.ones(50, device=DEVICE, requires_grad=True)
    y = F.dropout(x, 0.2)
    y.sum().backward()
    assert isinstance(x.grad, Tensor)
    assert torch.equal(x.grad, y.detach())
    assert sorted(set(y.tolist())) == [0.0, 1.25]


def test_a_copied_generator_goes_on_where_it_was():
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    torch.rand(5, device=DEVICE, generator=generator)
    copied = copy.deepcopy(generator)
    assert copied.device == DEVICE
    first, second = (torch.rand(5, device=DEVICE, generator=each) for each in (generator, copied))
    assert torch.equal(first, second)
