"""Random programs around a model in each form give what one device gives, in float64 to 1e-9.

A program is a list of what users do: forwards and backwards in any order, gradients that wait, optimizers, writes to
parameters, layers that are frozen, loaded values, every setter, layers that fail. Beside the model its twin does the
same on one device; after each step outputs, gradients (also which are `None`), values and buffers are compared. On
simulated devices and the stand-in the clocks look at all of it. At the end of a program a simulated device has as many
bytes as it has for a new model, and none once the model is gone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loops import wait_for_the_engine
from torch import Tensor, nn
from torch.futures import Future

from dataparallel import DataParallel
from dataparallel.composable import CPUOffloadPolicy, fully_shard, replicate
from dataparallel.testing.cases import seeded
from dataparallel.testing.steps import assert_equal
from fragile import MARK, Fragile
from memory import allocated
from nogpu.pytest import settle
from sharded_steps import on_device, sharded, whole

WIDTH, LAYERS = 6, 3
UNITS = LAYERS + 3


class Net(nn.Module):
    """An embedding and layers that are units, one that only some samples take, layers of the model's own, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Fragile(WIDTH) for _ in range(LAYERS))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.register_buffer("calls", torch.zeros(()))

    def units(self) -> list[Any]:
        return [self.embedding, *self.layers, self.branch]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x + self.embedding((x[:, 1].detach() * 3).long() % 5)
        for layer in self.layers:
            y = layer(y)
        if (x[:, 0] > 1).any():
            y = torch.where(x[:, :1] > 1, y + self.branch(y), y)
        return self.last(y if self.training else y.sin())


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


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


sizes = st.sampled_from([8, 9, 7, 6, 5, 4, 3, 2, 1])
units = st.integers(0, UNITS - 1)
takes = st.sampled_from([0, 0, 1, 2, 256, 511]) | st.integers(0, 511)


class RandomSteps(RuleBasedStateMachine):
    """A model of a form and its twin. What is not comparable meanwhile: gradients that wait, and sums on their way."""

    form = ""
    make_slots: Callable[[int], list[Any]]

    @initialize(
        count=st.sampled_from([3, 2, 4, 1]),
        reshard=st.sampled_from([None, True, False, 2]),
        offloads=st.booleans(),
        small_buckets=st.booleans(),
        has_hooks=st.booleans(),
    )
    def make(
        self, count: int, reshard: bool | int | None, offloads: bool, small_buckets: bool, has_hooks: bool
    ) -> None:
        self.slots = self.make_slots(count)
        self.root = torch.device(self.slots[0])
        self.count = count
        options: dict[str, Any] = {}
        if self.form == "fully_shard":
            options = {"reshard_after_forward": self.groups(reshard)}
            options |= {"offload_policy": CPUOffloadPolicy()} if offloads else {}
        elif small_buckets:
            options = {"bucket_cap_mb": 600 / 2**20}
            options |= {"first_bucket_mb": 64 / 2**20} if self.form == "replicate" else {}
        self.options = options
        self.twin = on_device(seeded(Net), self.root)
        self.without_model = allocated(self.slots)
        self.build()
        self.has_hooks = has_hooks
        if has_hooks:
            self.add_hooks()
        self.factors: dict[nn.Module, list[float]] = {unit: [1.0, 1.0] for unit in [*self.twin.units(), self.twin]}
        for unit, factors in self.factors.items():
            own = unit.last if unit is self.twin else unit
            for parameter in own.parameters():
                parameter.register_hook(lambda gradient, factors=factors: gradient * factors[0] / factors[1])
        self.has_hook = self.may_stay_full = self.is_unsharded = False
        self.seeds = itertools.count()
        self.pending: list[tuple[Tensor, Tensor, Any]] = []
        self.waits = self.on_their_way = self.may_be_zeros = False
        self.syncs, self.is_last = True, True

    def build(self) -> None:
        self.net: Any = on_device(seeded(Net), self.root)
        if self.form == "fully_shard":
            self.call = sharded(self.net, self.slots, **self.options)
        elif self.form == "replicate":
            self.call = replicate(self.net, devices=self.slots, **self.options)
        else:
            self.call = DataParallel(self.net, self.slots, **self.options)
        self.parameters = dict(self.net.named_parameters())
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)
            for each in (self.net, self.twin)
        ]

    def add_hooks(self) -> None:
        """They look at the module, which lists its own parameters whenever other code runs."""

        def lists_its_parameters(*_: Any) -> None:
            found = {} if self.is_unsharded else dict(self.net.named_parameters())
            assert all(own is self.parameters[name] for name, own in found.items())

        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(lists_its_parameters)
        for parameter in (self.net.last.weight, self.twin.last.weight):
            parameter.register_hook(lambda gradient: gradient * 0.5)

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
        assert_equal(whole(self.parameters), whole(twin), "values", atol=1e-9)
        assert_equal(whole(self.net.calls), whole(self.twin.calls), "buffer", atol=0)
        if self.waits or self.on_their_way:
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
    @rule(size=sizes, takes=takes, input_needs_gradient=st.booleans(), with_event=st.booleans())
    def forward(self, size: int, takes: int, input_needs_gradient: bool, with_event: bool) -> None:
        if with_event and self.is_sharded and self.root.type != "cpu":
            self.net.set_post_optim_event([torch.accelerator.current_stream(d).record_event() for d in {*self.slots}])
        x = self.batch(size, takes)
        leaves = [x.clone().requires_grad_(input_needs_gradient) for _ in range(2)]
        found, expected = (call(leaf) for call, leaf in zip((self.call, self.twin), leaves, strict=True))
        self.on_their_way = False
        assert found.requires_grad == expected.requires_grad
        if found.requires_grad:
            self.pending.append((loss_of(found), loss_of(expected), leaves))
        else:
            assert_equal(whole(found), whole(expected), "outputs", atol=1e-9)

    @precondition(lambda self: not self.pending)
    @rule(batches=st.lists(st.tuples(sizes, takes, st.booleans()), min_size=1, max_size=4), sums=st.booleans())
    def micro_batches(self, batches: list[tuple[int, int, bool]], sums: bool) -> None:
        """The gradients of some wait."""
        for size, takes, quietly in batches:
            self.forward(size, takes, False, False)
            if self.pending:
                self.backward(0, False, quietly)
        if sums:
            self.step_that_sums(*batches[0][:2])

    @rule(size=sizes, takes=takes, mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def evaluate(self, size: int, takes: int, mode: Any) -> None:
        x = self.batch(size, takes)
        with mode():
            assert_equal(whole(self.call(x)), whole(self.twin(x)), "outputs", atol=1e-9)
        self.on_their_way = False

    def run_backward(self, number: int | None, retain: bool = False) -> None:
        """Of one of the graphs, or of all together."""
        chosen = self.pending if number is None else [self.pending[number % len(self.pending)]]
        for losses in zip(*(graph[:2] for graph in chosen), strict=True):
            sum(losses).backward(retain_graph=retain)
        if not retain:
            self.pending = [graph for graph in self.pending if not any(graph is each for each in chosen)]
        self.on_their_way = self.is_sharded and not self.is_last
        self.waits = self.waits or not self.syncs
        for *losses, leaves in chosen:
            assert_equal(*map(whole, losses), "losses", atol=1e-9)
            assert_equal(*(whole(leaf.grad) for leaf in leaves), "gradients of the input", atol=1e-9)

    @precondition(lambda self: self.pending)
    @rule(number=st.none() | st.integers(0, 2), retain=st.booleans(), quietly=st.booleans())
    def backward(self, number: int | None, retain: bool, quietly: bool) -> None:
        if quietly and self.is_composable:
            before, self.syncs = self.syncs, False
            with self.net.no_sync():
                self.run_backward(number, retain)
            self.syncs = before
        else:
            self.run_backward(number, retain)

    @rule(size=sizes, takes=takes)
    def step_that_sums(self, size: int, takes: int = 1) -> None:
        """What waits is summed, also of a unit that this does not reach. A communication hook has to reach all."""
        if self.is_composable:
            self.net.set_requires_gradient_sync(True)
        if self.is_sharded:
            self.net.set_is_last_backward(True)
        self.syncs = self.is_last = True
        x = self.batch(size, takes | self.has_hook)
        for call in (self.call, self.twin):
            output = call(x)
            if output.requires_grad:
                loss_of(output).backward()
        self.waits = self.on_their_way = False
        self.look()

    # What users do between them.

    @rule(set_to_none=st.booleans(), by_optimizer=st.booleans())
    def zero_grad(self, set_to_none: bool, by_optimizer: bool = False) -> None:
        self.may_be_zeros = (self.may_be_zeros or self.waits) and not set_to_none
        for each in self.optimizers if by_optimizer else self.both():
            each.zero_grad(set_to_none)
        self.waits = self.on_their_way = False

    @rule(clips=st.booleans())
    def optimizer_step(self, clips: bool) -> None:
        if self.waits or self.on_their_way or self.may_be_zeros:
            return
        if clips:
            norms = [nn.utils.clip_grad_norm_(each, 0.5) for each in (self.parameters.values(), self.twin.parameters())]
            assert_equal(*map(whole, norms), "norms", atol=1e-9)
        self.pending.clear()
        for optimizer in self.optimizers:
            optimizer.step()

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

    @rule(factor=st.sampled_from([0.5, 1.0, -0.9]), fully=st.booleans())
    def load_state_dict(self, factor: float, fully: bool) -> None:
        self.pending.clear()
        values = {name: value * factor for name, value in seeded(Net)().state_dict().items()}
        values["calls"] = self.twin.calls.clone()
        self.twin.load_state_dict(values)
        if self.is_sharded:
            fully_shard.load_full_state_dict(self.net, values)
        else:
            self.net.load_state_dict(values)

    @rule()
    def converts(self) -> None:
        self.pending.clear()
        if self.waits or self.on_their_way:
            return
        for each in self.both():
            each.float().double()

    @precondition(lambda self: not ((self.is_sharded or self.has_hook) and (self.waits or self.pending)))
    @rule(which=st.integers(0, LAYERS + 2), flag=st.booleans())
    def freeze(self, which: int, flag: bool) -> None:
        if self.is_sharded:
            self.reshard_all()  # copies that are full take no flag
        for each in self.both():
            [*each.units(), each.last][which].requires_grad_(not flag)

    @rule(mode=st.booleans(), forgets=st.booleans())
    def train_or_eval(self, mode: bool, forgets: bool) -> None:
        """The backward of graphs that are forgotten never comes."""
        for each in self.both():
            each.train(mode)
        if forgets:
            self.pending.clear()

    # Layers that fail.

    @rule(
        kind=st.sampled_from(["forward", "hook", "backward"]),
        layer=st.integers(0, LAYERS - 1),
        size=sizes,
        mark=st.integers(0, 8),
        quietly=st.booleans(),
        at_once=st.booleans(),
    )
    def a_layer_fails(self, kind: str, layer: int, size: int, mark: int, quietly: bool, at_once: bool) -> None:
        """The next step may follow at once, though threads of other devices may be in the backward that has failed."""
        x = self.batch(size, 0, mark % size).requires_grad_()  # so that backward comes to the layer
        fails, calls = self.net.layers[layer].fails, self.twin.calls.clone()
        fails[0] = kind
        block = self.net.no_sync() if quietly and self.is_composable else nullcontext()
        with pytest.raises(ArithmeticError, match="in forward" if kind == "forward" else "in a"), block:
            loss_of(self.call(x)).backward()
        fails[0] = ""
        for each in self.both():
            each.calls.copy_(calls)
        self.on_their_way = False
        if kind != "forward":
            if not (at_once and self.is_sharded):
                wait_for_the_engine(self.slots)
            self.zero_grad(True)

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

    @precondition(lambda self: self.form == "replicate" and not (self.waits or self.pending or self.has_hook))
    @precondition(lambda self: not self.has_hooks)  # they would see what waits twice
    @rule()
    def register_comm_hook(self) -> None:
        def multiplied(state: float, bucket: Any) -> Future:
            future: Future = Future()
            future.set_result(bucket.buffer().mul_(state))
            return future

        self.net.register_comm_hook(2.0, multiplied)
        self.has_hook = True
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

    def unit(self, which: int) -> Any:
        return [*self.net.units(), self.net][which]

    def reshard_all(self) -> None:
        for which in range(UNITS):
            self.unit(which).reshard()
        self.is_unsharded = False

    @precondition(lambda self: self.is_sharded)
    @rule(which=units, asks=st.booleans(), zeroes=st.booleans(), reshards=st.booleans())
    def unshard(self, which: int, asks: bool, zeroes: bool, reshards: bool) -> None:
        """The module has full parameters until it is resharded, or until a call or a backward frees them."""
        self.may_stay_full = True
        unit = self.unit(which)
        handle = unit.unshard(async_op=asks)
        if asks:
            handle.wait()
        if which < UNITS - 1:  # the last is the model, whose children have units of their own
            full, expected = (dict(each.named_parameters()) for each in (unit, self.twin.units()[which]))
            assert_equal(whole(full), whole(expected), "full parameters", atol=1e-9)
        self.is_unsharded = True
        if zeroes:  # the gradients are those of the sharded parameters
            self.zero_grad(True)
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
        if name == "is_last_backward":
            self.is_last = value
        elif name == "reshard_after_forward":
            value = self.groups(value)
        elif name == "reshard_after_backward":
            self.may_stay_full |= not value
        elif "prefetch" in name:
            value = [self.unit(other) for other in value]
        unit = self.net if name == "is_last_backward" else self.unit(which)
        getattr(unit, f"set_{name}")(value, **({"recurse": recurse[0]} if recurse else {}))

    @precondition(lambda self: self.is_sharded and not self.waits and not self.on_their_way)
    @rule(which=units, divisor=st.sampled_from([1.0, 2.0, 4.0]), factor=st.sampled_from([1.0, 2.0]), size=sizes)
    def sums_are_divided_and_hooked(self, which: int, divisor: float, factor: float, size: int) -> None:
        self.unit(which).set_gradient_divide_factor(divisor)
        self.unit(which).set_all_reduce_hook(lambda shard: shard.mul_(factor))
        self.factors[[*self.twin.units(), self.twin][which]][:] = [factor, divisor]
        self.net.embedding.set_unshard_in_backward(factor == 1.0)  # its backward reads no weight
        self.step_that_sums(size)

    @precondition(lambda self: self.is_sharded)
    @rule(which=st.integers(1, LAYERS), size=sizes)
    def a_unit_is_called_alone(self, which: int, size: int) -> None:
        x = self.batch(size, 0)
        found, expected = (model.layers[which - 1](x) for model in self.both())
        assert_equal(whole(found), whole(expected), "outputs of a unit", atol=1e-9)
        if found.requires_grad and self.syncs and self.is_last and not self.waits:
            for output in (found, expected):
                loss_of(output).backward()

    # The end.

    def teardown(self) -> None:
        if not hasattr(self, "twin"):
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
        del self.optimizers[1]
        if self.is_composable:
            self.net.set_requires_gradient_sync(True)
        if self.is_sharded:
            self.reshard_all()
            self.net.set_is_last_backward(True)
            self.net.set_reshard_after_backward(True)
        self.net.requires_grad_(True).train()
        found = self.bytes_after_steps()
        self.discard()
        assert allocated(self.slots, self.without_model) == self.without_model
        self.build()
        del self.optimizers[1]
        expected = self.bytes_after_steps(found)
        assert all(ours <= theirs + 64 for ours, theirs in zip(found, expected, strict=True)), (found, expected)
        self.discard()

    def discard(self) -> None:
        del self.net, self.call, self.parameters, self.optimizers

    def bytes_after_steps(self, expected: list[int] | None = None) -> list[int]:
        if self.is_sharded:
            self.net.set_reshard_after_forward(True)
        for _ in range(3):
            self.net.zero_grad()
            loss_of(self.call(self.batch(6, 1))).backward()
            self.optimizers[0].step()
        self.net.zero_grad()
        return allocated(self.slots, expected)


FORMS: dict[str, Any] = {"DataParallel": DataParallel, "replicate": replicate, "fully_shard": fully_shard}
PHASES = [phase for phase in Phase if phase != Phase.explain]  # which would trace each line of a failing example


def programs_of(form: str, make_slots: Callable[[int], list[Any]]) -> type[RandomSteps]:
    """What makes programs for this form."""
    return type("Programs", (RandomSteps,), {"form": form, "make_slots": staticmethod(make_slots)})


def run_programs(form: str, make_slots: Callable[[int], list[Any]], programs: int, steps: int) -> None:
    options: dict[str, Any] = {"deadline": None, "phases": PHASES, "suppress_health_check": [*HealthCheck]}
    run_state_machine_as_test(
        programs_of(form, make_slots), settings=settings(max_examples=programs, stateful_step_count=steps, **options)
    )


@pytest.mark.watchdog(900)  # a program that fails is made shorter first
@pytest.mark.parametrize("form", FORMS)
def test_random_programs(form: str, make_slots: Callable[[int], list[Any]]) -> None:
    run_programs(form, make_slots, programs=6, steps=50)


@pytest.mark.long
@pytest.mark.watchdog(7200)
@pytest.mark.parametrize("form", FORMS)
def test_many_random_programs(form: str, make_slots: Callable[[int], list[Any]]) -> None:
    run_programs(form, make_slots, programs=100, steps=50)


FOUND: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "hooks on parameters see gradients that wait when replicas are made anew": (
        "replicate",
        [("micro_batches", {"batches": [(8, 511, True)], "sums": False}), ("frozen", {"lengths": []})],
    ),
    "gradients that were zeroed while others waited stay so when the model is converted": (
        "fully_shard",
        [
            ("micro_batches", {"batches": [(8, 511, True)], "sums": False}),
            ("zero_grad", {"set_to_none": False}),
            ("converts", {}),
        ],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_random_programs_have_found(name: str, make_slots: Callable[[int], list[Any]]) -> None:
    form, steps = FOUND[name]
    program = programs_of(form, make_slots)()
    program.make(2, None, False, True, True)
    program.step_that_sums(8)
    for step, arguments in steps:
        getattr(program, step)(**arguments)
    program.step_that_sums(8)
    program.teardown()
