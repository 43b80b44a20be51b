"""Random numbers of CUDA's generators: one for each device, whose state can be saved and set."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.devices("cuda")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.device_count() - 1)


def draw(device: torch.device, count: int = 5) -> torch.Tensor:
    return torch.rand(count, device=device)


def test_a_seed_repeats_the_numbers_on_every_device():
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    torch.cuda.manual_seed_all(7)
    first = [draw(device) for device in devices]
    torch.cuda.manual_seed_all(7)
    assert all(torch.equal(draw(device), numbers) for device, numbers in zip(devices, first, strict=True))
    assert all(torch.equal(first[0].cpu(), numbers.cpu()) for numbers in first)
    assert not torch.equal(draw(devices[0]), first[0])


def test_manual_seed_of_torch_is_one_of_all_devices(device):
    torch.manual_seed(3)
    first = draw(device)
    torch.manual_seed(3)
    assert torch.equal(draw(device), first)


def test_devices_draw_for_themselves(device):
    torch.cuda.manual_seed_all(7)
    expected = [draw(device), draw(device)]
    torch.cuda.manual_seed_all(7)
    found = [draw(device)]
    torch.rand(3)
    if torch.cuda.device_count() > 1:
        torch.rand(3, device="cuda:0")
    assert torch.equal(draw(device), expected[1])
    assert torch.equal(found[0], expected[0])


def test_a_state_is_saved_and_set(device):
    draw(device)
    state = torch.cuda.get_rng_state(device)
    first = draw(device), torch.randn(3, device=device), torch.randperm(8, device=device)
    torch.cuda.set_rng_state(state, device)
    again = draw(device), torch.randn(3, device=device), torch.randperm(8, device=device)
    assert all(map(torch.equal, first, again))


def test_the_states_of_all_devices():
    states = torch.cuda.get_rng_state_all()
    assert len(states) == torch.cuda.device_count()
    first = [draw(torch.device("cuda", index)) for index in range(len(states))]
    torch.cuda.set_rng_state_all(states)
    assert all(torch.equal(draw(torch.device("cuda", index)), numbers) for index, numbers in enumerate(first))


def test_forked_numbers_leave_no_trace(device):
    torch.manual_seed(5)
    expected = draw(device)
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[device]):
        draw(device, 100)
    assert torch.equal(draw(device), expected)


def test_a_generator_of_its_own(device):
    torch.manual_seed(5)
    expected = draw(device)
    torch.manual_seed(5)
    generator = torch.Generator(device).manual_seed(11)
    first = torch.randn(4, device=device, generator=generator)
    assert torch.equal(draw(device), expected)
    state = generator.get_state()
    second = torch.randn(4, device=device, generator=generator)
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device=device, generator=generator), second)
    assert torch.equal(torch.randn(4, device=device, generator=torch.Generator(device).manual_seed(11)), first)


DRAWS = {"dropout": lambda x: nn.functional.dropout(x, 0.5), "bernoulli": torch.bernoulli, "normal": torch.normal}


@pytest.mark.parametrize("name", DRAWS)
def test_other_numbers_are_repeated_too(device, name):
    draws = DRAWS[name]
    x = torch.full((200,), 0.5, device=device)
    torch.manual_seed(1)
    first = draws(x)
    torch.manual_seed(1)
    assert torch.equal(draws(x), first)
    assert not torch.equal(draws(x), first)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_drops_the_same_again(device, use_reentrant):
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8), nn.Dropout(0.5)).to(device)
    x = torch.randn(4, 8, device=device)

    def gradients(run) -> list[torch.Tensor]:
        net.zero_grad()
        torch.manual_seed(2)
        run(x.clone().requires_grad_()).square().sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    expected = gradients(net)
    found = gradients(lambda x: checkpoint(net, x, use_reentrant=use_reentrant))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
