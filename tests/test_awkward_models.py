"""Models as people write them: with the wrapper they do what they do on one device.

Each case failed, or computed something else, in some parallelisation of modules; what they need is spread over several
rooms, so they are tested through the wrapper.
"""

import collections
import dataclasses
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel
from dataparallel.testing.parity import Perturbation, perturbed_slots
from memory import WITHOUT_LOCK


def batch(root: torch.device, size: int = 6) -> Tensor:
    return torch.randn(size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(root)


class Holder(nn.Module):
    """Finds its layer in a plain attribute."""

    def __init__(self, hide: Callable[["Holder"], Any], find: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        object.__setattr__(self, "hidden", hide(self))
        self.find = find

    def forward(self, x: Tensor) -> Tensor:
        return self.find(self.hidden)(x)


def by_wraps(model: Holder) -> Callable:
    @functools.wraps(model.layer.forward)
    def wrapper(x: Tensor) -> Tensor:
        return wrapper.__wrapped__(x)

    return wrapper


HIDING_PLACES = {
    "UserDict": (lambda m: collections.UserDict(layer=m.layer), lambda held: held["layer"]),
    "dict keys": (lambda m: {m.layer: "it"}, lambda held: next(iter(held))),
    "default argument": (lambda m: lambda x, layer=m.layer: layer(x), lambda held: held),
    "proxy": (lambda m: weakref.proxy(m.layer), lambda held: held),
    "cache": (lambda m: functools.lru_cache(m.layer.forward), lambda held: held),
    "wraps": (by_wraps, lambda held: held),
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_module_in_a_plain_attribute_is_the_replicas(place: str, slots: list, root: torch.device) -> None:
    model = Holder(*HIDING_PLACES[place]).double().to(root)
    perturbation = Perturbation(seed=0, scale=0.1)
    x = batch(root)
    wrapped = DataParallel(model, slots)
    with perturbed_slots(wrapped, perturbation):
        found = wrapped(x)

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model.layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    direct = DataParallel(Direct(), slots)
    with perturbed_slots(direct, perturbation):
        expected = direct(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found, model(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_the_wrapper_recomputes_with_the_same_draws(
    reentrant: bool, slots: list, root: torch.device
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double().to(root)
    wrapped = DataParallel(model, [slots[0]] * 3)
    for seed in range(20):
        gradients = []
        for call in (wrapped, functools.partial(checkpoint, wrapped, use_reentrant=reentrant)):
            torch.manual_seed(seed)
            x = batch(root).requires_grad_()
            model.zero_grad()
            call(x).sum().backward()
            gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        for expected, found in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_an_embedding_that_renormalises_its_weight_in_forward(slots: list, root: torch.device) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 2, max_norm=1.0)
            self.out = nn.Linear(2, 5, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, index: Tensor) -> Tensor:
            return self.out(self.embedding(index))

    index = torch.zeros(6, dtype=torch.long, device=root)
    models = [Tied().double().to(root) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, call in zip(models, (models[0], DataParallel(models[1], slots)), strict=True):
        call(index).square().sum().backward()
        assert model.embedding.weight.grad is not None
    torch.testing.assert_close(models[1].embedding.weight.grad, models[0].embedding.weight.grad)


def test_a_forward_that_turns_recording_on_again(slots: list, root: torch.device) -> None:
    class Slope(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(super().forward(x).square().sum(), self.weight)[0].detach().unsqueeze(0)

    model = Slope(2, 2).double().to(root)
    x = batch(root)
    with torch.no_grad():
        torch.testing.assert_close(DataParallel(model, slots)(x).sum(0), model(x)[0])


def test_a_dataclass_with_a_cached_property(slots: list, root: torch.device) -> None:
    @dataclasses.dataclass
    class Samples:
        x: Tensor

        @functools.cached_property
        def count(self) -> int:
            return len(self.x)

    class Counting(nn.Module):
        def forward(self, samples: Samples) -> Samples:
            assert samples.count == len(samples.x)
            return samples

    samples = Samples(batch(root))
    assert samples.count == 6
    gathered = DataParallel(Counting(), slots)(samples)
    assert gathered.count == len(gathered.x) == 6


def test_an_exception_that_refuses_attributes_keeps_its_type(slots: list, root: torch.device) -> None:
    @dataclasses.dataclass(frozen=True)
    class Refusal(Exception):
        code: int

    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise Refusal(3)

    for arguments in ({}, {"serial": True}):
        with pytest.raises(Refusal) as caught:
            DataParallel(Refusing(), slots, **arguments)(batch(root))
        assert caught.value.code == 3


def test_an_error_without_words_does_not_hide_the_first(slots: list, root: torch.device) -> None:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    together = threading.Barrier(3, timeout=20)

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            together.wait()
            raise KeyError("first") if x[0, 0] == 0 else Speechless

    x = torch.arange(12.0, device=root).view(6, 2)
    with pytest.raises(KeyError, match="first"):
        DataParallel(Failing(), slots, workers=3)(x)


@pytest.mark.skipif(
    WITHOUT_LOCK and sys.version_info < (3, 14), reason="Python 3.13 without the lock keeps every class for ever"
)
def test_classes_of_dropped_models_are_dropped(slots: list, root: torch.device) -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).double().to(root)
    DataParallel(model, slots)(batch(root))
    alive = weakref.ref(type(model))
    del model
    gc.collect()
    assert alive() is None


def test_a_proxy_of_the_parent_registered_as_a_child(slots: list, root: torch.device) -> None:
    class Child(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.parent.scale

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Made where it is used: torch cannot move a tree with such a child.
            self.scale = nn.Parameter(torch.tensor(3.0, dtype=torch.float64, device=root))
            self.child = Child(2, 2, dtype=torch.float64, device=root)
            self.child.parent = weakref.proxy(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    model, x = Parent(), batch(root)
    torch.testing.assert_close(DataParallel(model, slots)(x), model(x))


def test_what_cannot_be_split_or_joined_is_named(slots: list, root: torch.device) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor, meta: bool = False) -> Any:
            return {"y": x.to("meta") if meta else x}

    wrapped = DataParallel(Same(), slots)
    with pytest.raises(ValueError, match=r"args\[0\] .* is on the meta device"):
        wrapped(torch.zeros(6, 2, device="meta"))
    with pytest.raises(ValueError, match=r'output\["y"\].*meta device'):
        wrapped(batch(root), meta=True)
    with pytest.raises(ValueError, match=r"args\[0\] cannot be split: its layout is torch.sparse_csc"):
        wrapped(batch(root).to_sparse_csc())


def test_tensors_that_are_more_than_data_stay_so_in_chunks(slots: list, root: torch.device) -> None:
    class Image(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert type(x) is Image
            assert x.colour == "grey"
            return x.detach()

    image = batch(root).as_subclass(Image)
    image.colour = "grey"
    assert DataParallel(Asking(), slots)(image).shape == (6, 2)
