"""Random nestings of units train as on one device, and the clocks see each memory used only while it has its values.

A tree of modules is drawn, and which of them are units, how often each is called, what is recomputed, which parameters
are frozen, what is kept after forward and what is gathered ahead; and which inputs need gradients: none for images and
tokens, as adapters over a frozen base have it, and perhaps a second one that goes to all modules. On simulated devices
a read before its gather, or a free before the last use, is an error of the clocks: at once, or at the end of the
example.
"""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, note, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.composable import CPUOffloadPolicy, FullyShardedModule, MixedPrecisionPolicy, fully_shard
from dataparallel.testing.cases import numbers, seeded
from nogpu.pytest import settle
from sharded_steps import LOOPS, Model, assert_all_sharded, assert_same, batches_of, moved, on_device, train

WIDTH = 4
MOST_NODES = 9
PHASES = [phase for phase in Phase if phase != Phase.explain]  # which would trace each line of a failing example


@dataclass(frozen=True)
class Part:
    """One module of the tree.

    Attributes:
        is_unit: it is sharded by itself. The root always is.
        is_frozen: its first and its last layer need no gradient.
        reshard: ``reshard_after_forward``, but a number is one for `group_size`.
        calls: how often its parent calls it.
        recomputed: ``use_reentrant`` of a checkpoint around its calls, or ``None`` without one.
        works_in_place: its first operator changes its input.
        ahead: ``None``, or which units are gathered ahead of it: numbers that count the units of the tree round and
            round; in forward and in backward.
        below: its children.
    """

    is_unit: bool
    is_frozen: tuple[bool, bool]
    reshard: bool | int | None
    calls: int
    recomputed: bool | None
    works_in_place: bool
    ahead: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    below: tuple["Part", ...] = ()


class Tree(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(not part.is_frozen[0])
        self.below = nn.ModuleList(Tree(child) for child in part.below)
        self.part = part
        self.last = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not part.is_frozen[1])

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        if self.part.works_in_place:
            x = x.mul_(0.5)
        x = 0.5 * torch.tanh(self.linear(x))  # a product with a number needs no values for its backward
        if condition is not None:
            x = x + self.linear(condition)
        for child in self.below:
            for _ in range(child.part.calls):
                if child.part.recomputed is None:
                    x = child(x, condition)
                else:
                    x = checkpoint(child, x, condition, use_reentrant=child.part.recomputed)
        return self.last(x) + 0.5 * x


class Inputs(nn.Module):
    """The root: a tree below what makes its inputs."""

    def __init__(self, part: Part, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.embedding.requires_grad_(kind == "tokens")
        self.condition = nn.Linear(WIDTH, WIDTH) if kind == "conditioned" else None
        self.tree = Tree(part)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else self.embedding(x)
        return self.tree(x, None if self.condition is None else self.condition(x))


KINDS = ["need gradients", "images", "tokens", "frozen tokens", "conditioned"]


def batch_maker(kind: str) -> Any:
    """Makes batches. Where all is frozen and for reentrant checkpoints, inputs have to need gradients."""

    def batch(size: int, seed: int) -> Any:
        (x,), _ = numbers(WIDTH)(size, seed)
        if "tokens" in kind:
            return ((x[:, 0] * 100).long() % 10,), {}
        return (x.requires_grad_(kind == "need gradients"),), {}

    return batch


_frozen = st.sampled_from([False, False, True])
_ahead = st.none() | st.lists(st.integers(0, 8), max_size=3).map(tuple)


def parts(below: st.SearchStrategy[tuple[Part, ...]]) -> st.SearchStrategy[Part]:
    return st.builds(
        Part,
        is_unit=st.booleans(),
        is_frozen=st.tuples(_frozen, _frozen),
        reshard=st.sampled_from([None, True, False, 2, 3]),
        calls=st.sampled_from([1, 1, 1, 2, 0]),
        recomputed=st.sampled_from([None, None, True, False]),
        works_in_place=st.booleans(),
        ahead=st.tuples(_ahead, _ahead),
        below=below,
    )


def count(part: Part) -> int:
    return 1 + sum(map(count, part.below))


roots = st.recursive(
    parts(st.just(())), lambda inner: parts(st.lists(inner, max_size=3).map(tuple)), max_leaves=5
).filter(lambda part: 2 <= count(part) <= MOST_NODES)


def group_size(drawn: bool | int | None, slots: int) -> bool | int | None:
    """What to pass as ``reshard_after_forward``: for a number one that divides the slots, or ``True`` if none does."""
    sizes = [size for size in range(2, slots) if slots % size == 0]
    if drawn is None or isinstance(drawn, bool):
        return drawn
    return sizes[drawn % len(sizes)] if sizes else True


def shard(model: Inputs, slots: list[Any], policies: dict[str, Any]) -> Any:
    """Applies `fully_shard` to the units, children first, and sets what is gathered ahead."""
    parts = [module for module in model.modules() if isinstance(module, (Inputs, Tree))]
    for module in reversed(parts):
        if module is model or module.part.is_unit:
            reshard = group_size(module.part.reshard, len(slots))
            fully_shard(module, devices=slots, reshard_after_forward=reshard, **policies)
    units: list[Any] = [module for module in model.modules() if isinstance(module, FullyShardedModule)]
    for unit in units:
        for ahead, change in zip(
            unit.part.ahead, [unit.set_modules_to_forward_prefetch, unit.set_modules_to_backward_prefetch], strict=True
        ):
            if ahead is not None:
                change([units[number % len(units)] for number in ahead])
    return model


def without_changes_of_checkpoints_inputs(part: Part) -> Part:
    """The same where no checkpoint's function changes its own input: torch could not recompute that on any device."""
    return replace(
        part,
        works_in_place=part.works_in_place and part.recomputed is None,
        below=tuple(map(without_changes_of_checkpoints_inputs, part.below)),
    )


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "cast": {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64)},
}


def trains_as_on_one_device(part: Part, slots: list[Any], loop: str, policy: str, kind: str) -> None:
    part = replace(without_changes_of_checkpoints_inputs(part), works_in_place=False)
    note(f"{part} on {len(slots)} slots, {loop}, {policy}, {kind}")
    model = Model(seeded(Inputs, part, kind), batch_maker(kind))
    root = torch.device(slots[0])
    several, one = shard(on_device(model.build, root), slots, POLICIES[policy]), on_device(model.build, root)
    (x,), _ = moved(model.batch(1, 0), root)
    assume(one(x).requires_grad)
    options: dict[str, Any] = {"steps": 2, "loop": LOOPS[loop]}
    ours = train(several, batches_of(model, slots), **options)
    assert_all_sharded(several)
    assert_same(ours, train(one, batches_of(model, slots), **options), atol=1e-2 if policy == "cast" else 1e-9)
    settle()


loops = st.sampled_from(["one_backward", *LOOPS])
policies = st.sampled_from(["plain", "plain", *POLICIES])
kinds = st.sampled_from(KINDS)


def chained(*below: Part, **own: Any) -> Part:
    """A root, or a part that is no unit, with these parts one after the other."""
    plain = {"is_unit": False, "is_frozen": (False, False), "reshard": None, "calls": 1, "recomputed": None}
    return Part(**{**plain, "works_in_place": False, "ahead": (None, None), **own}, below=below)


UNIT = chained(is_unit=True)


FROZEN = (True, True)
AROUND = {"is_unit": True}
PLAIN = ("one_backward", "plain", "need gradients")


@example(chained(replace(UNIT, recomputed=True), is_frozen=FROZEN), 3, "one_backward", "plain", "frozen tokens")
@example(chained(UNIT, replace(UNIT, is_frozen=FROZEN)), 3, "one_backward", "plain", "images")
@example(chained(UNIT, chained(UNIT, is_unit=True, is_frozen=FROZEN)), 2, "one_backward", "plain", "tokens")
@example(chained(UNIT, is_frozen=(True, False)), 2, "one_backward", "plain", "images")
@example(chained(UNIT, chained(UNIT, UNIT, recomputed=False)), 3, "last_forward_first", "plain", KINDS[0])
@example(chained(UNIT, chained(UNIT, UNIT, recomputed=True)), 3, "the_last_summed", "plain", KINDS[0])
@example(chained(chained(replace(UNIT, recomputed=False), **AROUND, recomputed=False)), 3, *PLAIN)
@example(chained(chained(replace(UNIT, recomputed=True), **AROUND, recomputed=True)), 3, *PLAIN)
@example(chained(UNIT, replace(UNIT, recomputed=False, calls=2)), 3, *PLAIN)
@given(roots, st.sampled_from([2, 3, 4]), loops, policies, kinds)
@settings(phases=PHASES, suppress_health_check=[*HealthCheck])
def test_random_nestings(make_slots, part, count, loop, policy, kind):
    trains_as_on_one_device(part, make_slots(count), loop, policy, kind)


@pytest.mark.long
@pytest.mark.watchdog(7200)
@given(roots, st.sampled_from([2, 3, 4, 6, 8]), loops, policies, kinds)
@settings(max_examples=10_000, phases=PHASES, suppress_health_check=[*HealthCheck])
def test_ten_thousand_random_nestings(make_slots, part, count, loop, policy, kind):
    trains_as_on_one_device(part, make_slots(count), loop, policy, kind)
