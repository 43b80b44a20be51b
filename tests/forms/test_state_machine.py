"""What users do with a model in each form, in any order, gives what one device gives, in float64 to 1e-9.

A tree of layers is drawn, and then steps: forwards and backwards in any order, gradients that wait, penalties,
optimizers, writes to parameters, layers that are frozen, loaded values, every setter, layers that fail, devices without
room. Beside the model its twin does the same on one device, and outputs, gradients (also which are `None`), values and
buffers are compared. On simulated devices and the stand-in the clocks look at all of it, and at the end a device has as
many bytes as it has for a new model, and none once the model is gone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from loops import wait_for_the_engine
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, prefetch
from dataparallel.comm.streams.current import streams_joined
from dataparallel.composable import CPUOffloadPolicy, fully_shard
from dataparallel.composable import replicate as replicate_
from dataparallel.sharded import Shard
from dataparallel.testing.cases import seeded
from dataparallel.testing.steps import assert_equal
from fragile import MARK, Fragile
from memory import allocated
from nogpu.pytest import settle
from sharded_steps import on_device, whole

WIDTH = 6


@dataclass
class Pair:
    left: Tensor
    right: Tensor


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tensor": (lambda y: y, lambda y: y),
    "a tuple": (lambda y: (y, y.sin()), lambda y: y[0] - 0.1 * y[1]),
    "a dict": (
        lambda y: {"a": y, "b": {"c": [y.sin(), None, y.argmax(1)]}},
        lambda y: y["a"] + 0.1 * y["b"]["c"][0],
    ),
    "a dataclass": (lambda y: Pair(y, y.cos()), lambda y: y.left - 0.1 * y.right),
    "views": (lambda y: y.chunk(2, dim=1), lambda y: torch.cat([y[0], y[1]], dim=1)),
    "a view": (lambda y: y.unsqueeze(1), lambda y: y.squeeze(1)),
    "views, one unused": (lambda y: y.unbind(1), lambda y: torch.stack([y[0], y[0], *y[2:]], dim=1)),
    "the same without a graph": (lambda y: (y.detach(), y), lambda y: y[1] + 0.1 * y[0]),
}
"""What a layer makes of its output, and what is made of that again. The last column stays the last."""


@dataclass(frozen=True)
class How:
    """One layer of the tree.

    Attributes:
        is_unit: it is sharded by itself.
        calls: how often what is around it calls it.
        recomputed: ``use_reentrant`` of a checkpoint around its calls, or `None` without one.
        works_in_place: its first operator changes its input.
        output: one of `OUTPUTS`. A reentrant checkpoint takes tensors alone.
        below: its children.
    """

    is_unit: bool = True
    calls: int = 1
    recomputed: bool | None = None
    works_in_place: bool = False
    output: str = "a tensor"
    below: tuple[How, ...] = ()

    @property
    def is_reentrant(self) -> bool:
        """Of units alone. The unit around another layer may be free when that is recomputed in another backward."""
        return bool(self.recomputed) and self.is_unit

    @property
    def packing(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        return OUTPUTS["a tensor" if self.recomputed else self.output]


def all_of(tree: tuple[How, ...]) -> list[How]:
    return [each for how in tree for each in (how, *all_of(how.below))]


class Layer(Fragile):
    def __init__(self, how: How) -> None:
        super().__init__(WIDTH)
        self.how, self.below = how, nn.ModuleList(map(Layer, how.below))

    def forward(self, x: Tensor) -> Any:
        # torch cannot recompute what changes the input of its checkpoint.
        x = x.mul_(0.98) if self.how.works_in_place and self.how.recomputed is None else x
        return self.how.packing[0](run(self.below, super().forward(x)))


def run(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        for _ in range(layer.how.calls):
            how = layer.how
            y = layer(x) if how.recomputed is None else checkpoint(layer, x, use_reentrant=how.is_reentrant)
            y = how.packing[1](y)
            x = y + 0.1 * x if how.works_in_place else y  # what was changed is used
    return x


class Net(nn.Module):
    """An embedding, the tree, a layer that only some samples take, a layer of the model's own, and a buffer.

    ``ties``: the first two layers share a weight, and are one unit.
    """

    def __init__(self, tree: tuple[How, ...], ties: bool) -> None:
        super().__init__()
        self.embedding, self.ties = nn.Embedding(5, WIDTH), ties
        self.layers = nn.ModuleList(map(Layer, tree))
        if ties:
            self.layers[1].linear.weight = self.layers[0].linear.weight
        self.branch, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("calls", torch.zeros(()))

    def units(self) -> list[list[Any]]:
        """The modules of each unit, children first; the net itself is the last."""
        pair = [*self.layers[:2]] if self.ties else []
        alone = [[each] for each in self.below(self) if each.how.is_unit and each not in pair]
        return [[self.embedding], *[pair] * self.ties, *alone, [self.branch], [self]]

    def below(self, module: Any) -> Iterator[Layer]:
        for layer in module.layers if module is self else module.below:
            yield from self.below(layer)
            yield layer

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = run(self.layers, x + self.embedding((x[:, 1].detach() * 3).long() % 5))
        if (x[:, 0] > 1).any():
            y = torch.where(x[:, :1] > 1, y + self.branch(y), y)
        return self.last(y if self.training else y.sin())


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def scaled(factor: float, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else each * factor for each in tensors)


MODULE_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda module: None,
    "forward pre": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,)),
    "forward pre with keywords": lambda m: m.register_forward_pre_hook(
        lambda module, args, kwargs: (scaled(1.1, *args), kwargs), with_kwargs=True
    ),
    "forward": lambda m: m.register_forward_hook(lambda module, args, y: y + 0.1 * args[0].sum(1)[:, None].to(y)),
    "forward, always": lambda m: m.register_forward_hook(
        lambda module, args, y: None if y is None else y * 0.9, always_call=True
    ),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, outputs: scaled(0.5, *outputs)),
    "full backward": lambda m: m.register_full_backward_hook(lambda module, inputs, outputs: scaled(0.5, *inputs)),
}
"""What they return counts. They are on the net, on a unit, on a layer of a unit or of the net."""


def to_shards(copy: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Any], Any]:
    """Writes shard by shard. Without shards it writes to the parameter."""

    def write(parameter: Any, new: Any) -> None:
        for shard, part in zip(getattr(parameter, "shards", [parameter]), getattr(new, "shards", [new]), strict=True):
            copy(shard, part)

    return write


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda parameter, new: parameter.copy_(new),
    "data =": lambda parameter, new: setattr(parameter, "data", new),
    "data.copy_": lambda parameter, new: parameter.data.copy_(new),
    "on lists": lambda parameter, new: torch._foreach_copy_([parameter.data], [new]),
    "shards": to_shards(lambda shard, part: shard.copy_(part)),
    # No counter of torch moves.
    "data of shards": to_shards(lambda shard, part: shard.data.copy_(part)),
    "a view of data": lambda parameter, new: parameter.data[:].copy_(new),
}
UNCOUNTED = ("data of shards", "a view of data")

PENALTIES: dict[str, Callable[[Tensor], Any]] = {
    "square": lambda p: (p * p).sum(),
    "sum": lambda p: 3 * p.sum(),  # its gradient is plain, and sharded when it is accumulated
    "norm": lambda p: p.norm(),
}

sizes = st.sampled_from([8, 9, 7, 6, 5, 4, 3, 2, 1])
counts = st.sampled_from([3, 2, 4, 1])
units = st.integers(0, 11)
streams = st.sampled_from([0, 0, 0, 1, 4])
takes = st.sampled_from([0, 0, 1, 2, 256, 511]) | st.integers(0, 511)
penalties = st.sampled_from([None, None, None, "of the input", *PENALTIES])


def layers(below: st.SearchStrategy[tuple[How, ...]]) -> st.SearchStrategy[How]:
    calls = st.sampled_from([1, 1, 1, 2, 0])
    recomputed = st.sampled_from([None, None, None, True, False])
    outputs = st.sampled_from([*OUTPUTS])
    return st.builds(How, st.booleans(), calls, recomputed, st.booleans(), outputs, below)


trees = st.lists(layers(st.just(()) | st.tuples(layers(st.just(())))), min_size=1, max_size=3).map(tuple)


CHOSEN = [
    "is_offloaded",
    "by_columns",
    "stays_full",
    "has_small_buckets",
    "is_output_elsewhere",
    "is_on_one_device",
    "is_on_two_devices",
]


class Steps(RuleBasedStateMachine):
    """A model of a form and its twin. What is not comparable meanwhile: gradients that wait, and sums on their way."""

    form = ""
    make_slots: Callable[[int], list[Any]]

    @initialize(
        tree=trees,
        ties=st.booleans(),
        count=counts,
        reshard=st.sampled_from([None, True, False, 2]),
        chosen=st.fixed_dictionaries(dict.fromkeys(CHOSEN, st.booleans())),
        has_hooks=st.booleans(),
        hook=st.tuples(st.sampled_from([*MODULE_HOOKS]), st.integers(0, 3)),
    )
    def make(
        self,
        tree: tuple[How, ...],
        ties: bool,
        count: int,
        reshard: Any,
        chosen: dict[str, bool],
        has_hooks: bool,
        hook: tuple[str, int] = ("none", 0),
    ) -> None:
        if ties:  # two layers make one unit, so they are called once, one after the other
            tree = (How(), How(), *tree)
        self.build_plain = seeded(Net, tree, ties)
        self.recomputes = any(each.recomputed is not None for each in all_of(tree))
        self.takes_reentrantly = any(each.is_reentrant for each in all_of(tree))
        self.devices = [*dict.fromkeys(map(torch.device, self.make_slots(4)))]
        self.root = self.devices[0]
        self.reshard, self.chosen, self.has_hooks, self.hook = reshard, chosen, has_hooks, hook
        self.twin = on_device(self.build_plain, self.root)
        self.add_module_hook(self.twin)
        self.without_model = allocated(self.devices)
        self.factors: dict[nn.Module, list[float]] = {modules[-1]: [1.0, 1.0] for modules in self.twin.units()}
        hooked: set[Tensor] = set()
        for factors, modules in zip(self.factors.values(), self.twin.units(), strict=True):
            for parameter in (p for module in modules for p in module.parameters() if p not in hooked):
                parameter.register_hook(lambda gradient, factors=factors: gradient * factors[0] / factors[1])
                hooked.add(parameter)
        if has_hooks:
            self.twin.last.weight.register_hook(lambda gradient: gradient * 0.5)
        self.of_twin = torch.optim.SGD(self.twin.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)
        self.seeds = itertools.count()
        self.build(count)

    def build(self, count: int) -> None:
        """A new model on so many slots. The twin stays."""
        self.count, self.slots = count, self.make_slots(count)
        if self.chosen["is_on_one_device"]:
            self.slots = [self.slots[0]] * count
        elif self.chosen["is_on_two_devices"]:
            self.slots = [self.slots[number % 2] for number in range(count)]
        self.net: Any = on_device(self.build_plain, self.root)
        self.add_module_hook(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)
        options: dict[str, Any] = {"output_device": "cpu" if self.chosen["is_output_elsewhere"] else None}
        if self.is_sharded:
            self.call = self.shard(options)
        else:
            if self.chosen["has_small_buckets"]:
                options |= {"bucket_cap_mb": 600 / 2**20}
                options |= {"first_bucket_mb": 64 / 2**20} if self.form == "replicate" else {}
            self.call = {"replicate": replicate_, "DataParallel": DataParallel}[self.form](
                self.net, devices=self.slots, **options
            )
        self.parameters = dict(self.net.named_parameters())
        if self.is_sharded:  # otherwise one that was made before knows the parameters
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)
        if self.has_hooks:
            self.add_hooks()
        for factors in self.factors.values():
            factors[:] = [1.0, 1.0]
        self.has_comm_hook = self.is_unsharded = False
        self.may_stay_full = self.is_sharded and self.chosen["stays_full"]
        self.pending: list[tuple[Tensor, Tensor, Any, Any]] = []
        self.waits = self.may_be_zeros = False
        self.syncs = True

    def shard(self, options: dict[str, Any]) -> Any:
        of_units: dict[str, Any] = {"devices": self.slots, "reshard_after_forward": self.groups(self.reshard)}
        if self.chosen["is_offloaded"]:
            of_units["offload_policy"] = CPUOffloadPolicy()
        if self.chosen["by_columns"] and WIDTH % self.count == 0:
            of_units["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 else None
        for modules in self.net.units():
            fully_shard(modules, **of_units, **(options if modules == [self.net] else {}))
        self.net.set_reshard_after_backward(not self.chosen["stays_full"])
        return self.net

    def add_hooks(self) -> None:
        """They look at the module, which lists its own parameters whenever other code runs."""

        def lists_its_parameters(*_: Any) -> None:
            found = {} if self.is_unsharded else dict(self.net.named_parameters())
            assert all(own is self.parameters[name] for name, own in found.items())

        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(lists_its_parameters)
        self.net.last.weight.register_hook(lambda gradient: gradient * 0.5)

    def add_module_hook(self, net: Any) -> None:
        kind, place = self.hook
        MODULE_HOOKS[kind]((net, net.branch, net.last, net.layers[0].linear)[place])

    def groups(self, reshard: Any) -> Any:
        return reshard if reshard is None or isinstance(reshard, bool) or self.count == 4 else True

    def both(self) -> tuple[Any, Any]:
        return self.net, self.twin

    @property
    def is_composable(self) -> bool:
        return self.form != "DataParallel"

    @property
    def is_sharded(self) -> bool:
        return self.form == "fully_shard"

    # What is compared. Not after each step: to look is to wait, and nothing that came before could be too early.

    @rule()
    def look(self) -> None:
        twin = dict(self.twin.named_parameters())
        if not self.is_unsharded:
            assert [*map(id, self.net.parameters())] == [*map(id, self.parameters.values())]
        assert_equal(whole(self.parameters), whole(twin), "values", atol=1e-9)
        assert_equal(whole(self.net.calls), whole(self.twin.calls), "buffer", atol=0)
        if self.waits:
            return
        both = [whole({name: p.grad for name, p in table.items()}) for table in (self.parameters, twin)]
        for table in both if self.may_be_zeros else ():
            table.update({name: None for name, grad in table.items() if grad is None or not grad.any()})
        assert_equal(*both, "gradients", atol=1e-9)

    def batch(self, size: int, takes: int, mark: int | None = None) -> Tensor:
        """``takes``: a bit for each sample that takes the branch."""
        x = torch.randn(size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(next(self.seeds)))
        x[:, 0] = x[:, 0].clamp(max=0.9)
        for sample in range(size):
            x[sample, 0] = 1.5 if takes >> sample & 1 else x[sample, 0]
        if mark is not None:
            x[mark, -1] = MARK
        return x.to(self.root)

    # Forwards and backwards.

    @precondition(lambda self: len(self.pending) < 3)
    @rule(
        size=sizes,
        takes=takes,
        needs=st.booleans(),
        with_event=st.booleans(),
        streams=streams,
        penalty=penalties,
        of_some=st.booleans(),
    )
    def forward(
        self,
        size: int,
        takes: int,
        needs: bool,
        with_event: bool,
        streams: int,
        penalty: str | None,
        of_some: bool = False,
    ) -> None:
        """Hooks change gradients. With ``of_some`` some slots have no backward at all."""
        if with_event and self.is_sharded and self.root.type != "cpu":
            events = [torch.accelerator.current_stream(device).record_event() for device in {*self.slots}]
            self.net.set_post_optim_event(events if len(events) > 1 else events[0])
        x = self.batch(size, takes)
        can_penalise = not self.has_comm_hook and all(factors == [1.0, 1.0] for factors in self.factors.values())
        penalty = penalty if can_penalise and not (self.takes_reentrantly and penalty == "of the input") else None
        leaves = [x.clone().requires_grad_(needs or penalty == "of the input") for _ in range(2)]
        with self.on_other_streams(streams):
            found = self.call(leaves[0])
        # Not the twin: torch's gradients of a module with hooks are in memory of the stream of its forward.
        expected = self.twin(leaves[1])
        assert found.requires_grad == expected.requires_grad
        if found.requires_grad:
            for tensor in (found, expected, *(leaf for leaf in leaves if leaf.requires_grad)):
                tensor.register_hook(lambda gradient: gradient * 0.75)
            losses = [loss_of(each[: 1 if of_some else None]) for each in (found, expected)]
            parameters = [self.parameters.values(), [*self.twin.parameters()]]
            losses = [*map(self.penalised, losses, leaves, parameters, [penalty] * 2)]
            self.pending.append((*losses, leaves, penalty))
        else:
            assert_equal(whole(found), whole(expected), "outputs", atol=1e-9)

    def penalised(self, loss: Tensor, leaf: Tensor, parameters: Any, penalty: str | None) -> Tensor:
        """With the square of the input's gradient, or with what parameters bring past the units."""
        if penalty is None:
            return loss
        if penalty == "of the input":
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
            return loss + gradient.square().sum().to(loss.device)
        chosen = [parameter for parameter in parameters if parameter.requires_grad][::2]
        return loss + sum(PENALTIES[penalty](parameter).to(loss.device) for parameter in chosen)

    @precondition(lambda self: not self.pending)
    @rule(batches=st.lists(st.tuples(sizes, takes, st.booleans()), min_size=1, max_size=4), sums=st.booleans())
    def micro_batches(self, batches: list[tuple[int, int, bool]], sums: bool) -> None:
        """The gradients of some wait."""
        for size, takes, quietly in batches:
            self.forward(size, takes, False, False, 0, None)
            if self.pending:
                self.backward(0, False, quietly, 0)
        if sums:
            self.step_that_sums(*batches[0][:2])

    @rule(size=sizes, takes=takes, mode=st.sampled_from([torch.no_grad, torch.inference_mode]), ahead=st.booleans())
    def evaluate(self, size: int, takes: int, mode: Any, ahead: bool = False) -> None:
        x = self.batch(size, takes)
        with mode():
            for sent in prefetch([x.cpu()] * 2, self.call) if ahead else [x]:
                assert_equal(whole(self.call(sent)), whole(self.twin(x)), "outputs", atol=1e-9)

    def run_backward(self, number: int | None, retain: bool = False, asks: bool = False) -> None:
        """Of one of the graphs, or of all together. With ``asks`` some parameters get gradients, and no others."""
        chosen = self.pending if number is None else [self.pending[number % len(self.pending)]]
        asks = asks and not (self.takes_reentrantly or self.has_comm_hook)
        for losses, net in zip(zip(*(graph[:2] for graph in chosen), strict=True), self.both(), strict=True):
            parameters = self.parameters.values() if net is self.net else net.parameters()
            inputs = [parameter for parameter in parameters if parameter.requires_grad][1::2] if asks else None
            sum(losses).backward(retain_graph=retain, inputs=inputs or None)
        if not retain:
            self.pending = [graph for graph in self.pending if not any(graph is each for each in chosen)]
        self.waits = self.waits or not self.syncs
        for *losses, leaves, _ in chosen:
            assert_equal(*map(whole, losses), "losses", atol=1e-9)
            assert_equal(*(whole(leaf.grad) for leaf in leaves), "gradients of the input", atol=1e-9)

    @precondition(lambda self: self.pending)
    @rule(
        number=st.none() | st.integers(0, 2),
        retain=st.booleans(),
        quietly=st.booleans(),
        streams=streams,
        asks=st.booleans(),
    )
    def backward(self, number: int | None, retain: bool, quietly: bool, streams: int, asks: bool = False) -> None:
        with self.on_other_streams(streams):
            if not (quietly and self.is_composable):
                self.run_backward(number, retain, asks)
                if streams:  # which are behind all sums
                    self.look()
                return
            before, self.syncs = self.syncs, False
            with self.net.no_sync():
                self.run_backward(number, retain, asks)
            self.syncs = before

    def on_other_streams(self, count: int) -> Any:
        """On so many of the devices."""
        return streams_joined({} if self.root.type == "cpu" else {d: torch.Stream(d) for d in self.devices[:count]})

    @precondition(lambda self: not self.takes_reentrantly)
    @rule(size=sizes, takes=takes)
    def gradients_of_the_input_alone(self, size: int, takes: int) -> None:
        """No parameter gets one."""
        x = self.batch(size, takes).requires_grad_()
        assert_equal(*(torch.autograd.grad(loss_of(call(x)), x) for call in (self.call, self.twin)), "", atol=1e-9)

    @rule(size=sizes, takes=takes)
    def step_that_sums(self, size: int, takes: int = 1) -> None:
        """What waits is summed, also of a unit that this does not reach. A communication hook has to reach all."""
        if self.is_composable:
            self.net.set_requires_gradient_sync(True)
        self.syncs = True
        x = self.batch(size, takes | self.has_comm_hook)
        for call in (self.call, self.twin):
            output = call(x)
            if output.requires_grad:
                loss_of(output).backward()
        self.waits = False
        self.look()

    # What users do between them.

    @rule(set_to_none=st.booleans(), by_optimizer=st.booleans())
    def zero_grad(self, set_to_none: bool, by_optimizer: bool = False) -> None:
        self.may_be_zeros = (self.may_be_zeros or self.waits) and not set_to_none
        for each in (self.optimizer, self.of_twin) if by_optimizer else self.both():
            each.zero_grad(set_to_none)
        self.waits = False

    @precondition(lambda self: not (self.waits or self.may_be_zeros))
    @rule(clips=st.booleans())
    def optimizer_step(self, clips: bool) -> None:
        if clips:
            norms = [nn.utils.clip_grad_norm_(each, 0.5) for each in (self.parameters.values(), self.twin.parameters())]
            assert_equal(*map(whole, norms), "norms", atol=1e-9)
        self.pending.clear()
        for optimizer in (self.optimizer, self.of_twin):
            optimizer.step()

    @precondition(lambda self: not (self.waits or self.may_be_zeros or self.pending or self.takes_reentrantly))
    @rule(size=sizes, takes=takes)
    def optimizers_in_backward(self, size: int, takes: int) -> None:
        """Each parameter's step happens once, with the complete sum, and frees its gradient."""
        self.zero_grad(True)
        x, self.syncs = self.batch(size, takes | self.has_comm_hook), True
        if self.is_composable:
            self.net.set_requires_gradient_sync(True)
        for call, parameters in ((self.call, self.parameters.values()), (self.twin, [*self.twin.parameters()])):
            taken: list[Tensor] = []

            def step(parameter: Any, taken: list[Tensor] = taken) -> None:
                if parameter.grad is not None:  # torch calls this too where a node has none for one of its inputs
                    parameter.data.add_(parameter.grad, alpha=-0.05)
                    parameter.grad = None
                    taken.append(parameter)

            handles = [p.register_post_accumulate_grad_hook(step) for p in parameters if p.requires_grad]
            if (output := call(x)).requires_grad:
                loss_of(output).backward()
            assert len(taken) == len({*map(id, taken)})
            for handle in handles:
                handle.remove()

    @rule(how=st.sampled_from([*WRITES]), factor=st.sampled_from([0.5, 0.9, -1.0]), which=st.integers(0, 20))
    def write(self, how: str, factor: float, which: int) -> None:
        self.pending.clear()
        chosen = [*zip(self.parameters.values(), self.twin.parameters(), strict=True)]
        chosen = chosen if which > 12 else [chosen[which % len(chosen)]]
        with torch.no_grad():
            for parameter, plain in chosen:
                WRITES[how](parameter, parameter.data * factor)
                plain.data.mul_(factor)
        if how in UNCOUNTED and self.may_stay_full:
            self.reshard_all()

    @rule(factor=st.sampled_from([0.5, 1.0, -0.9]))
    def load_state_dict(self, factor: float) -> None:
        self.pending.clear()
        values = {name: value * factor for name, value in self.build_plain().state_dict().items()}
        values["calls"] = self.twin.calls.clone()
        self.twin.load_state_dict(values)
        if self.is_sharded:
            fully_shard.load_full_state_dict(self.net, values)
        else:
            self.net.load_state_dict(values)

    @precondition(lambda self: not self.waits)
    @rule(count=counts)
    def goes_on_with_other_slots(self, count: int) -> None:
        """In a new model, with an optimizer that has no state yet."""
        self.zero_grad(True)
        flags, mode = [p.requires_grad for p in self.twin.parameters()], self.twin.training
        saved = fully_shard.full_state_dict(self.net, self.optimizer)
        self.build(count)
        fully_shard.load_full_state_dict(self.net, saved, self.optimizer)
        for parameter, flag in zip(self.parameters.values(), flags, strict=True):
            parameter.requires_grad_(flag)
        self.net.train(mode)

    @precondition(lambda self: not self.waits)
    @rule(moves=st.booleans())
    def converts(self, moves: bool) -> None:
        self.pending.clear()
        wait_for_the_engine(self.slots)  # torch swaps no parameter that a graph still holds
        if moves and not self.chosen["is_offloaded"]:
            self.net.cpu().to(self.root.type if self.is_sharded else self.root)
        else:
            for each in self.both():
                each.float().double()

    @precondition(lambda self: not ((self.is_sharded or self.has_comm_hook) and (self.waits or self.pending)))
    @precondition(lambda self: not (self.recomputes and self.pending))  # a checkpoint would save other tensors
    @rule(which=units, flag=st.booleans())
    def freeze(self, which: int, flag: bool) -> None:
        if self.is_sharded:
            self.reshard_all()  # copies that are full take no flag
        for each in self.both():
            chosen = [each.embedding, each.branch, each.last, *each.below(each)]
            chosen[which % len(chosen)].requires_grad_(not flag)

    @rule(mode=st.booleans(), forgets=st.booleans())
    def train_or_eval(self, mode: bool, forgets: bool) -> None:
        """The backward of graphs that are forgotten never comes."""
        for each in self.both():
            each.train(mode)
        if forgets:
            self.pending.clear()

    # Layers that fail, and devices without room.

    @rule(
        kind=st.sampled_from(["forward", "hook", "backward"]),
        layer=st.integers(0, 8),
        size=sizes,
        mark=st.integers(0, 8),
        quietly=st.booleans(),
        at_once=st.booleans(),
        penalty=st.sampled_from([None, *PENALTIES]),
    )
    def a_layer_fails(
        self, kind: str, layer: int, size: int, mark: int, quietly: bool, at_once: bool, penalty: str | None
    ) -> None:
        """The next step may follow at once, though threads of other devices may be in the backward that has failed."""
        called = [each for each in self.net.layers if each.how.calls]
        if not called:
            return
        x = self.batch(size, 0, mark % size).requires_grad_()  # so that backward comes to the layer
        fails, calls = called[layer % len(called)].fails, self.twin.calls.clone()
        fails[0] = kind
        block = self.net.no_sync() if quietly and self.is_composable else nullcontext()
        with pytest.raises(ArithmeticError, match="in forward" if kind == "forward" else "in a"), block:
            self.penalised(loss_of(self.call(x)), x, self.parameters.values(), penalty).backward()
        fails[0] = ""
        self.after_an_error(calls, kind != "forward", at_once and self.is_sharded)

    def after_an_error(self, calls: Tensor, came_to_backward: bool = True, at_once: bool = False) -> None:
        for each in self.both():
            each.calls.copy_(calls)
        # A graph that was recorded keeps full parameters, and says so if a call that fails has gathered them again.
        self.pending = [graph for graph in self.pending if not (self.is_sharded and graph[-1] == "of the input")]
        if came_to_backward:
            if not at_once:
                wait_for_the_engine(self.slots)
            self.zero_grad(True)

    @precondition(lambda self: self.root.type == "sim")
    @rule(size=sizes, spare=st.sampled_from([0, 500, 1000, 2000, 4000, 8000]), which=st.integers(0, 3))
    def a_device_has_no_room(self, size: int, spare: int, which: int) -> None:
        """For a copy, a gather, an activation, a gradient or a sum; or it has enough."""
        x, device, calls = self.batch(size, 1), self.slots[which % self.count], self.twin.calls.clone()
        torch.sim.set_memory_capacity(torch.sim.memory_allocated(device) + spare, device)
        try:
            loss_of(self.call(x)).backward()
        except torch.OutOfMemoryError:
            pass
        finally:
            torch.sim.set_memory_capacity(None, device)
        self.after_an_error(calls)

    # Options and setters.

    @rule(serial=st.sampled_from([None, True, False]), workers=st.sampled_from([None, 1, 2]), shares=st.booleans())
    def options_of_calls(self, serial: bool | None, workers: int | None, shares: bool) -> None:
        options: Any = self.call.options if self.form == "DataParallel" else FORMS[self.form].state(self.net).options
        options.serial, options.workers = serial, workers
        options.chunk_sizes = [0.5, *[1.0] * (self.count - 1)] if shares else None

    @precondition(lambda self: self.is_composable)
    @rule(flag=st.booleans())
    def set_requires_gradient_sync(self, flag: bool) -> None:
        self.net.set_requires_gradient_sync(flag)
        self.syncs = flag

    @precondition(lambda self: self.form == "replicate" and not (self.waits or self.pending or self.has_comm_hook))
    @precondition(lambda self: not self.takes_reentrantly)  # which nests backwards: refused
    @precondition(lambda self: not self.has_hooks)  # they would see what waits twice
    @rule()
    def register_comm_hook(self) -> None:
        def multiplied(state: float, bucket: Any) -> Future:
            future: Future = Future()
            future.set_result(bucket.buffer().mul_(state))
            return future

        self.net.register_comm_hook(2.0, multiplied)
        self.has_comm_hook = True
        for factors in self.factors.values():
            factors[0] = 2.0

    @precondition(lambda self: not self.is_sharded)
    @rule(lengths=st.lists(sizes, max_size=2))
    def frozen(self, lengths: list[int]) -> None:
        calls = self.twin.calls.clone()
        with (self.net if self.form == "replicate" else self.call.options).frozen(), torch.no_grad():
            for size in lengths:
                x = self.batch(size, 1)
                assert_equal(whole(self.call(x)), whole(self.twin(x)), "outputs", atol=1e-9)
        for each in self.both():
            each.calls.copy_(calls)

    def unit(self, which: int, net: Any = None) -> Any:
        found = (self.net if net is None else net).units()
        return found[which % len(found)][-1]

    def parameters_of_unit(self, which: int, net: Any) -> dict[str, Tensor]:
        """Without those of other units, which may be full since before a write."""
        before, (*_, module) = net.units()[: which % len(net.units())], net.units()[which % len(net.units())]
        others = {id(p) for modules in before for each in modules for p in each.parameters()}
        return {name: p for name, p in module.named_parameters() if id(p) not in others}

    def reshard_all(self) -> None:
        for modules in self.net.units():
            modules[0].reshard()
        self.is_unsharded = False

    @precondition(lambda self: self.is_sharded)
    @rule(which=units, asks=st.booleans(), zeroes=st.booleans(), writes=st.booleans(), reshards=st.booleans())
    def unshard(self, which: int, asks: bool, zeroes: bool, writes: bool, reshards: bool) -> None:
        """The module has full parameters until it is resharded, or until a call or a backward frees them."""
        self.may_stay_full = True
        handle = self.unit(which).unshard(async_op=asks)
        if asks:
            handle.wait()
        full, expected = (self.parameters_of_unit(which, each) for each in self.both())
        assert_equal(whole(full), whole(expected), "full parameters", atol=1e-9)
        self.is_unsharded = True
        if zeroes:  # the gradients are those of the sharded parameters
            self.zero_grad(True)
        if writes:
            self.write("copy_", 0.9, 20)
        if reshards:
            self.reshard_all()

    @precondition(lambda self: self.is_sharded)
    @rule(
        which=units,
        setting=st.one_of(
            st.tuples(st.just("reshard_after_forward"), st.sampled_from([True, False, 2]), st.booleans()),
            st.tuples(st.just("reshard_after_backward"), st.booleans(), st.booleans()),
            st.tuples(st.just("requires_all_reduce"), st.booleans(), st.booleans()),
            st.tuples(st.just("is_last_backward"), st.booleans()),
            st.tuples(st.just("modules_to_forward_prefetch"), st.lists(units, max_size=3)),
            st.tuples(st.just("modules_to_backward_prefetch"), st.lists(units, max_size=3)),
        ),
    )
    def settings_of_units(self, which: int, setting: tuple[Any, ...]) -> None:
        name, value, *recurse = setting
        if name == "reshard_after_forward":
            value = self.groups(value)
        elif name == "reshard_after_backward":
            self.may_stay_full |= not value
        elif "prefetch" in name:
            value = [self.unit(other) for other in value]
        getattr(self.unit(which), f"set_{name}")(value, **({"recurse": recurse[0]} if recurse else {}))

    @precondition(lambda self: self.is_sharded and not self.waits)
    @rule(which=units, divisor=st.sampled_from([1.0, 2.0, 4.0]), factor=st.sampled_from([1.0, 2.0]), size=sizes)
    def sums_are_divided_and_hooked(self, which: int, divisor: float, factor: float, size: int) -> None:
        self.pending = [graph for graph in self.pending if graph[-1] is None]
        self.unit(which).set_gradient_divide_factor(divisor)
        self.unit(which).set_all_reduce_hook(lambda shard: shard.mul_(factor))
        self.factors[self.unit(which, self.twin)][:] = [factor, divisor]
        self.net.embedding.set_unshard_in_backward(factor == 1.0)  # its backward reads no weight
        self.step_that_sums(size)

    @precondition(lambda self: self.is_sharded)
    @rule(which=units, size=sizes)
    def a_unit_is_called_alone(self, which: int, size: int) -> None:
        x = self.batch(size, 0)
        both = [[modules[0] for modules in each.units() if isinstance(modules[0], Layer)] for each in self.both()]
        if not both[0] or (self.net.ties and which % len(both[0]) == 0):
            return
        found, expected = ((unit := units[which % len(units)]).how.packing[1](unit(x.clone())) for units in both)
        assert_equal(whole(found), whole(expected), "outputs of a unit", atol=1e-9)
        if found.requires_grad and self.syncs and not self.waits:
            for output in (found, expected):
                loss_of(output).backward()

    # The end.

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            return
        if sys.exc_info()[0] is None:
            self.look()
            if self.root.type == "sim":
                self.bytes_are_those_of_a_new_model()
        self.pending.clear()
        wait_for_the_engine(self.slots)
        settle()

    def bytes_are_those_of_a_new_model(self) -> None:
        """Whatever has happened, and nothing when it is gone."""
        self.pending.clear()
        self.twin.zero_grad()
        del self.of_twin
        if self.is_composable:
            self.net.set_requires_gradient_sync(True)
        if self.is_sharded:
            self.reshard_all()
        self.net.requires_grad_(True).train()
        found = self.bytes_after_steps()
        self.discard()
        left = allocated(self.devices, self.without_model)
        assert all(now <= before for now, before in zip(left, self.without_model, strict=True)), "bytes stay"
        self.build(self.count)
        expected = self.bytes_after_steps(found)
        assert all(ours <= theirs + 64 for ours, theirs in zip(found, expected, strict=True)), (found, expected)
        self.discard()

    def discard(self) -> None:
        del self.net, self.call, self.parameters, self.optimizer

    def bytes_after_steps(self, expected: list[int] | None = None) -> list[int]:
        self.optimizer.state.clear()  # of parameters that only penalties use
        if self.is_sharded:
            self.net.set_reshard_after_forward(True)
            self.net.set_reshard_after_backward(True)
        for _ in range(3):
            self.net.zero_grad()
            loss_of(self.call(self.batch(6, 1))).backward()
            self.optimizer.step()
        self.net.zero_grad()
        return allocated(self.devices, expected)


FORMS: dict[str, Any] = {"DataParallel": DataParallel, "replicate": replicate_, "fully_shard": fully_shard}
PHASES = [phase for phase in Phase if phase != Phase.explain]  # which would trace each line of a failing example


def steps_of(form: str, make_slots: Callable[[int], list[Any]]) -> type[Steps]:
    return type("StepsOfForm", (Steps,), {"form": form, "make_slots": staticmethod(make_slots)})


def run_steps(form: str, make_slots: Callable[[int], list[Any]], examples: int) -> None:
    options: dict[str, Any] = {"deadline": None, "phases": PHASES, "suppress_health_check": [*HealthCheck]}
    run_state_machine_as_test(
        steps_of(form, make_slots), settings=settings(max_examples=examples, stateful_step_count=50, **options)
    )


@pytest.mark.watchdog(900)  # what fails is made shorter first
@pytest.mark.parametrize("form", FORMS)
def test_random_steps(form: str, make_slots: Callable[[int], list[Any]]) -> None:
    run_steps(form, make_slots, examples=6)


@pytest.mark.long
@pytest.mark.watchdog(7200)
@pytest.mark.parametrize("form", FORMS)
def test_many_random_steps(form: str, make_slots: Callable[[int], list[Any]]) -> None:
    run_steps(form, make_slots, examples=100)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_few_programs_of_a_short_run_may_leave_out(form: str, make_slots: Callable[[int], list[Any]]) -> None:
    program = steps_of(form, make_slots)()
    tree = (How(below=(How(works_in_place=True),)), How(works_in_place=True))
    program.make(tree, False, 3, True, {**dict.fromkeys(CHOSEN, False), "is_offloaded": True}, False)
    for penalty in ("sum", "of the input"):
        program.forward(6, 1, True, False, 0, penalty)
        program.evaluate(6, 1, torch.no_grad)
        program.backward(None, False, False, 4)
        program.look()
    program.micro_batches([(6, 1, True)], True)
    for spare in (0, 1000, 3000) if program.root.type == "sim" else ():
        program.a_device_has_no_room(6, spare, 1)
    program.step_that_sums(6, 1)
    program.teardown()
