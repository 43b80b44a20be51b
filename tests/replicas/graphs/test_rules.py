"""What a capture may not do: each test compares with the same steps as they are without graphs."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dataparallel import whole
from dataparallel.replicas.graphs.calls import MOST_CAPTURES, MOST_NEW_KINDS, WARM_UP
from each_form import Form, by_wrapper, graphing_forms, replicated
from graphed_nets import SETTLE, build, captured, gradients, graphed, inputs, reasons, step

pytestmark = [pytest.mark.devices("cuda"), graphing_forms]

STEPS = SETTLE + 3


class Head(nn.Module):
    """``run`` is called with the module and its arguments."""

    def __init__(self, run: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.lin, self.other, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(32.0).reshape(8, 4))
        vars(self).update(attributes)
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def compare(
    form: Form, slots: list, root: torch.device, net: Callable[[], nn.Module], steps: Callable[[Any, Any], Any]
) -> Any:
    """Runs ``steps(network, module)`` without graphs and with them. What they return, and gradients, are the same."""
    found: list[Any] = []
    for graphs in (False, True):
        module = build(root, net)
        network = form(module, slots, graphs=graphs)
        torch.manual_seed(1)
        torch.cuda.manual_seed_all(1)
        found.append((steps(network, module), gradients(module)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    return network


def losses(network: Any, module: nn.Module) -> list[Tensor]:
    found = []
    for _ in range(STEPS):
        module.zero_grad()
        output = network(inputs(module.lin.weight.device))
        output.square().mean().backward()
        found.append(output.detach())
    return found


class TestOutputs:
    @pytest.mark.parametrize("kind", [lambda y: SimpleNamespace(y=y), lambda y: lambda: y], ids=["object", "closure"])
    def test_of_another_kind_are_not_captured(self, kind: Any, form: Form, slots: list, root: torch.device) -> None:
        def steps(network: Any, module: Any) -> Any:
            outputs = [network(inputs(root)) for _ in range(STEPS)]
            return [each() if callable(each) else each.y for each in outputs]

        network = compare(form, slots[:1], root, lambda: Head(lambda self, x: kind(self.lin(x))), steps)
        assert captured(network) == 0
        (reason,) = reasons(network)
        assert reason.startswith("its output is a ")

    def test_may_be_changed_by_the_user(self, form: Form, slots: list, root: torch.device) -> None:
        def steps(network: Any, module: Any) -> Any:
            found = []
            for _ in range(STEPS):
                module.zero_grad()
                output = network(inputs(root))
                output["y"] = output["y"].mul_(2)
                output["all"].append(1)
                output["y"].sum().backward()
                found.append((output["y"].detach(), len(output["all"])))
            return found

        def run(self: Head, x: Tensor) -> Any:
            y = self.lin(x).tanh()
            return {"y": y * 1, "all": [y]}

        assert captured(compare(form, slots[:1], root, lambda: Head(run), steps))


class TestTensors:
    def test_have_the_attributes_that_users_set(self, form: Form, slots: list, root: torch.device) -> None:
        def steps(network: Any, module: Any) -> Any:
            found = []
            for scale in [1.0] * STEPS + [5.0] * STEPS:
                module.zero_grad()
                module.lin.weight.scale = scale
                output = network(inputs(root))
                output.square().mean().backward()
                found.append(output.detach())
            return found

        def run(self: Any, x: Tensor) -> Tensor:
            return self.lin(x) * self.lin.weight.scale

        assert captured(compare(form, slots, root, lambda: Head(run), steps))


class TestArguments:
    def test_a_list_that_the_forward_changes_is_not_captured(self, form: Form, slots: list, root: torch.device) -> None:
        def run(self: Head, x: Tensor, notes: dict[str, Any]) -> Tensor:
            notes["y"] = self.lin(x)
            return notes["y"]

        def steps(network: Any, module: Any) -> Any:
            notes: list[dict[str, Any]] = [{} for _ in range(STEPS)]
            for each in notes:
                network(inputs(root), each).sum().backward()
            return notes

        network = compare(form, slots, root, lambda: Head(run), steps)
        assert captured(network) == 0
        assert reasons(network) == {"its forward writes into a dict or list among its arguments"}

    @pytest.mark.parametrize("kind", [list, deque, UserList, dict, OrderedDict, UserDict, Counter])
    def test_nor_is_one_that_is_global(self, kind: Any, form: Form, slots: list, root: torch.device) -> None:
        notes: Any = kind()

        class Notes(Head):
            def forward(self, x: Tensor) -> Tensor:
                if hasattr(notes, "append"):
                    notes.append(1)
                else:
                    notes[len(notes)] = 1
                return self.lin(x)

        def steps(network: Any, module: Any) -> Any:
            notes.clear()
            return losses(network, module), len(notes)

        network = compare(form, slots, root, lambda: Notes(print), steps)
        assert captured(network) == 0
        assert reasons(network) == {"its forward writes into a list or dict that is global or enclosed"}

    @pytest.mark.parametrize("kind", ["nested", "quantised"])
    def test_a_tensor_of_another_kind_is_not_captured(
        self, kind: str, form: Form, slots: list, root: torch.device
    ) -> None:
        def other() -> Tensor:
            if kind == "nested":
                return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=root)
            return torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8).to(root)

        def run(self: Head, x: Tensor, other: Tensor) -> Tensor:
            return self.lin(x) + (other.to_padded_tensor(0.0).sum() if other.is_nested else other.int_repr().sum())

        def steps(network: Any, module: Any) -> Any:
            return [network(inputs(root), whole(other())) for _ in range(STEPS)]

        network = compare(form, slots[:1], root, lambda: Head(run), steps)
        assert captured(network) == 0
        (reason,) = reasons(network)
        assert kind in reason

    def test_a_number_that_differs_in_each_call_is_named(self, form: Form, slots: list, root: torch.device) -> None:
        def steps(network: Any, module: Any) -> Any:
            return [network(inputs(root), scale=1.0 + number) for number in range(MOST_NEW_KINDS + 2)]

        network = compare(form, slots, root, lambda: Head(lambda self, x, scale: self.lin(x) * scale), steps)
        assert reasons(network) == {'kwargs["scale"] is another one in each call'}

    def test_one_tensor_may_come_twice(self, form: Form, slots: list, root: torch.device) -> None:
        def run(self: Head, q: Tensor, k: Tensor) -> Tensor:
            return self.lin(q) if q is k else self.other(k)

        def steps(network: Any, module: Any) -> Any:
            found = []
            for _ in range(STEPS):
                x, y = inputs(root).requires_grad_(), inputs(root).requires_grad_()
                network(x, x).sum().backward()
                network(x, y).sum().backward()
                found += [x.grad, y.grad]
            return found

        assert captured(compare(form, slots[:1], root, lambda: Head(run), steps))


class Recomputed(torch.autograd.Function):
    """What a reversible layer does: its backward runs the layer again, and a backward of its own through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grad)
        return x.grad, None


def with_a_loss_of_one_layer(self: Head, x: Tensor) -> Tensor:
    self.other(x).square().sum().backward()
    return self.lin(x)  # type: ignore[no-any-return]


def with_a_seed(self: Head, x: Tensor) -> Tensor:
    torch.cuda.manual_seed(3)
    return self.lin(x) + torch.rand_like(x)


class TestABackwardInside:
    @pytest.mark.parametrize(
        ("run", "words"),
        [
            (with_a_loss_of_one_layer, ""),
            (lambda self, x: Recomputed.apply(self.lin(x), self.other), "a backward inside of it gives its parameters"),
            (with_a_seed, "seed"),
        ],
        ids=["of a layer", "of a function", "a seed"],
    )
    def test_or_a_seed_that_is_set_is_not_captured(
        self, run: Any, words: str, form: Form, slots: list, root: torch.device
    ) -> None:
        network = compare(form, slots, root, lambda: Head(run), losses)
        assert captured(network) == 0
        (reason,) = reasons(network)
        assert words in reason

    def test_of_which_the_call_is_a_part_finds_no_graphs(self, form: Form, slots: list, root: torch.device) -> None:
        """Its thread waits for the call, so the backward of a capture could not run."""

        def steps(network: Any, module: Any) -> list[Tensor]:
            found = []
            for _ in range(STEPS):
                x = inputs(root).requires_grad_()
                checkpoint(network, x, use_reentrant=True).sum().backward()
                found.append(x.grad)
            return found

        compare(form, slots, root, lambda: Head(lambda self, x: self.lin(x)), steps)


class TestRandomNumbers:
    def test_a_capture_that_fails_leaves_graphs_to_their_generator(
        self, form: Form, slots: list, root: torch.device
    ) -> None:
        """A model captured before follows seeds and states that are set later."""

        def waits(self: Head, x: Tensor) -> Tensor:
            x = self.drop(x)
            return self.lin(x) * (x.detach().sum().item() != 0)

        def steps(network: Any, module: Any) -> Any:
            before = losses(network, module)
            other = form(build(root, lambda: Head(waits)), slots, graphs=bool(graphed(network)))
            found = [step(other, inputs(root)) for _ in range(STEPS)]
            torch.cuda.manual_seed_all(7)
            seeded = losses(network, module)
            state = torch.cuda.get_rng_state(root)
            first = losses(network, module)
            torch.cuda.set_rng_state(state, root)
            return before, found, seeded, first, losses(network, module)

        network = compare(form, slots, root, lambda: Head(lambda self, x: self.lin(self.drop(x))), steps)
        assert captured(network)


class TestSecondDerivatives:
    def test_a_penalty_from_the_beginning_runs_as_it_is(self, form: Form, slots: list, root: torch.device) -> None:
        def steps(network: Any, module: Any) -> Any:
            found = []
            for _ in range(STEPS):
                module.zero_grad()
                x = inputs(root).requires_grad_()
                (grad,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
                (network(x).mean() + grad.norm(dim=1).square().mean()).backward()
                found += [p.grad.clone() for p in module.lin.parameters() if p.grad is not None]
            return found

        network = compare(form, slots, root, lambda: Head(lambda self, x: self.lin(x).tanh()), steps)
        assert reasons(network) == {"its backward is differentiated (create_graph=True)"}

    def test_through_a_capture_raises(self, form: Form, slots: list, root: torch.device) -> None:
        """Whatever the gradients that come in need."""
        network = form(build(root, lambda: Head(lambda self, x: self.lin(x).tanh())), slots, graphs=True)
        for _ in range(SETTLE):
            network(inputs(root).requires_grad_()).sum().backward()
        x = inputs(root).requires_grad_()
        with pytest.raises(RuntimeError, match="a captured backward cannot be differentiated"):
            torch.autograd.grad(network(x).sum(), x, create_graph=True)


@dataclass
class Config:
    scale: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [1])


class Plain:
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def get(self) -> Any:
        return self.kept


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Named(dict[str, float]):
    scale = 1.0


class Late:
    """Gets attributes of its own later."""

    scale = 1.0


class TestWhatAForwardReads:
    @pytest.mark.parametrize(
        ("held", "read", "change"),
        [
            (Config, lambda held: held.scale, lambda held, value: setattr(held, "scale", value)),
            (lambda: {"a": {"b": 1.0}}, lambda held: held["a"]["b"], lambda held, value: held["a"].update(b=value)),
            (Config, lambda held: held.sizes[0], lambda held, value: held.sizes.__setitem__(0, value)),
            (lambda: Plain({}), lambda held: held.kept.get("a", 1.0), lambda held, value: held.kept.update(a=value)),
            (Slotted, lambda held: held.scale, lambda held, value: setattr(held, "scale", value)),
            (Named, lambda held: held.scale, lambda held, value: setattr(held, "scale", value)),
            (lambda: Plain(1.0).get, lambda held: held(), lambda held, value: setattr(held.__self__, "kept", value)),
            (Late, lambda held: held.scale, lambda held, value: setattr(held, "scale", value)),
        ],
        ids=["dataclass", "dicts", "list", "dict in an object", "slots", "a dict's own", "method", "new attribute"],
    )
    def test_values_may_change_wherever_they_lie(
        self, held: Any, read: Any, change: Any, form: Form, slots: list, root: torch.device
    ) -> None:
        def steps(network: Any, module: Any) -> Any:
            found = losses(network, module)
            for value in (2.0, 1.0):
                change(module.held, value)
                found += losses(network, module)
            return found

        run = lambda self, x: self.lin(x) * read(self.held)  # noqa: E731
        network = compare(form, slots[:1], root, lambda: Head(run, held=held()), steps)
        assert captured(network) >= STEPS

    def test_a_tensor_that_comes_later_refuses_from_then_on(self, form: Form, slots: list, root: torch.device) -> None:
        def run(self: Head, x: Tensor) -> Tensor:
            return self.lin(x) * self.held.get("scale", x).sum()

        def steps(network: Any, module: Any) -> Any:
            found = losses(network, module)
            module.held["scale"] = torch.ones(4, dtype=torch.double, device=root)
            for _ in range(2):
                found += losses(network, module)
                module.held["scale"].mul_(2)
            return found

        network = compare(form, slots[:1], root, lambda: Head(run, held={}), steps)
        assert 0 < captured(network) < STEPS
        assert reasons(network) == {'the module.held["scale"] is a Tensor, which is no buffer'}

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (lambda: random.Random(0), "a Random"),
            (lambda: np.random.default_rng(0), "a Generator"),
            (lambda: SimpleNamespace(table=torch.ones(4)), "a Tensor"),
            (lambda: {"deep": [torch.ones(4)]}, "a Tensor"),
            (lambda: iter(range(1, 99)), "a range_iterator, whose state cannot be compared"),
            (lambda: Plain(count(1)), "a count, whose state cannot be compared"),
            (lambda: bytearray(b"abc"), "a bytearray, whose state cannot be compared"),
        ],
        ids=["python", "numpy", "tensor", "deep", "iterator", "count", "bytes"],
    )
    def test_generators_and_tensors_refuse(
        self, value: Any, words: str, form: Form, slots: list, root: torch.device
    ) -> None:
        def read(held: Any) -> Any:
            if isinstance(held, (dict, SimpleNamespace)):
                return (held["deep"][0] if isinstance(held, dict) else held.table).sum().item()
            if isinstance(held, bytearray):
                held.append(7)
                return len(held)
            return held.random() if hasattr(held, "random") else next(getattr(held, "kept", held))

        def run(self: Head, x: Tensor) -> Tensor:
            return self.lin(x) * read(self.held)

        network = compare(form, slots[:1], root, lambda: Head(run, held=value()), losses)
        assert captured(network) == 0
        (reason,) = reasons(network)
        assert "the module.held" in reason
        assert words in reason

    def test_modes_and_hooks_for_all_modules_see_each_operator(
        self, form: Form, slots: list, root: torch.device
    ) -> None:
        class Doubles(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found = func(*args, **(kwargs or {}))
                return found * 2 if func is nn.functional.linear else found

        def steps(network: Any, module: Any) -> Any:
            before = losses(network, module)
            with Doubles():
                doubled = [network(inputs(root)) for _ in range(STEPS)]
            hook = nn.modules.module.register_module_forward_hook(
                lambda module, args, output: output * 3 if isinstance(module, nn.Linear) else None
            )
            try:
                tripled = [network(inputs(root)) for _ in range(STEPS)]
            finally:
                hook.remove()
            return before, doubled, tripled, losses(network, module)

        network = compare(form, slots, root, lambda: Head(lambda self, x: self.lin(x)), steps)
        assert captured(network)
        assert len(reasons(network)) == 2

    def test_the_default_dtype_is_a_kind_of_its_own(self, form: Form, slots: list, root: torch.device) -> None:
        def run(self: Head, x: Tensor) -> Tensor:
            return self.lin(x) * torch.full((), 1 / 3, device=x.device)

        def steps(network: Any, module: Any) -> Any:
            found = losses(network, module)
            torch.set_default_dtype(torch.double)
            try:
                return [*found, *losses(network, module)]
            finally:
                torch.set_default_dtype(torch.float)

        assert captured(compare(form, slots, root, lambda: Head(run), steps))


class TestTogether:
    """With other things of a training loop."""

    def test_a_loss_of_the_replicas(self, form: Form, slots: list, root: torch.device) -> None:
        run = lambda self, x: (self.lin(x) - 1).square().mean()  # noqa: E731
        assert captured(compare(form, slots, root, lambda: Head(run), losses))

    def test_gradients_that_wait_on_the_slots(self, form: Form, slots: list, root: torch.device) -> None:
        if form is by_wrapper:
            pytest.skip("the wrapper has no no_sync")

        def steps(network: Any, module: Any) -> None:
            for _ in range(STEPS):
                module.zero_grad()
                with network.no_sync():
                    step(network, inputs(root))
                step(network, inputs(root))

        assert captured(compare(form, slots, root, lambda: Head(lambda self, x: self.lin(x)), steps))

    def test_a_communication_hook(self, form: Form, slots: list, root: torch.device) -> None:
        if form is not replicated:
            pytest.skip("only replicate has these hooks")

        def hook(state: Any, bucket: Any) -> Any:
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer() * 2)
            return done

        def steps(network: Any, module: Any) -> Any:
            network.register_comm_hook(None, hook)
            return losses(network, module)

        assert captured(compare(form, slots, root, lambda: Head(lambda self, x: self.lin(x)), steps))


class TestMemory:
    @pytest.mark.counts_memory
    def test_changes_of_an_attribute_do_not_grow_it(self, form: Form, slots: list, root: torch.device) -> None:
        module = build(root)
        network, reserved = form(module, slots, graphs=True), []
        for number in range(24):
            module.blocks[0].number = number
            for _ in range(WARM_UP + 2):
                step(network, inputs(root))
            gc.collect()
            reserved.append([torch.cuda.memory_reserved(slot) for slot in {*slots}])
        assert captured(network) > 20
        assert reserved[8:] == [reserved[8]] * 16


class TestThreads:
    def test_a_capture_is_made_in_a_thread_that_has_warmed_up(
        self, form: Form, slots: list, root: torch.device
    ) -> None:
        calls: list[tuple[bool, threading.Thread]] = []

        def run(self: Head, x: Tensor) -> Tensor:
            calls.append((torch.cuda.is_current_stream_capturing(), threading.current_thread()))
            return self.lin(x)

        network = form(build(root, lambda: Head(run)), slots, graphs=True)
        options = network.options if form is by_wrapper else network._dataparallel_form[1].options
        for serial in [True] * WARM_UP + [False] * STEPS:
            options.serial = serial
            network(inputs(root)).sum().backward()
        captures = [number for number, (is_capture, _) in enumerate(calls) if is_capture]
        assert captures
        assert all((False, calls[number][1]) in calls[:number] for number in captures)

    def test_a_capture_that_another_thread_spoils_is_tried_again(
        self, form: Form, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spoils = iter([True])
        end = torch.cuda.CUDAGraph.capture_end

        def capture_end(self: Any) -> None:
            end(self)
            if next(spoils, False):
                raise torch.AcceleratorError("operation failed due to a previous error during capture")

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", capture_end)
        network = compare(form, slots, root, lambda: Head(lambda self, x: self.lin(x)), losses)
        assert captured(network)
        assert not reasons(network)

    def test_a_model_that_dies_during_a_capture_does_not_spoil_it(
        self, form: Form, slots: list, root: torch.device
    ) -> None:
        held: list[Any] = []

        def run(self: Head, x: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing() and held:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(held.pop).result()
            return self.lin(x)

        def steps(network: Any, module: Any) -> Any:
            other = form(build(root), slots, graphs=True)
            for _ in range(SETTLE):
                step(other, inputs(root))
            held.append(other)
            del other
            return losses(network, module)

        network = compare(form, slots, root, lambda: Head(run), steps)
        assert captured(network)
        assert not reasons(network)


class TestStreams:
    def test_models_that_nobody_has_leave_theirs_to_others(self, form: Form, slots: list, root: torch.device) -> None:
        """A device has 32 streams, and Python may collect such models late."""
        gc.collect()
        gc.disable()
        try:
            for _ in range(33):
                network = form(build(root), slots[:1], graphs=True)
                cycle: list[Any] = [network]
                cycle.append(cycle)
                for _ in range(SETTLE):
                    step(network, inputs(root))
                assert captured(network)
        finally:
            gc.enable()


class TestNumberOfCaptures:
    def test_is_bounded_for_each_kind_alone(self, form: Form, slots: list, root: torch.device) -> None:
        slots = [*dict.fromkeys(slots)]  # a device has 32 streams, which are too few for the captures of three slots
        network = form(build(root), slots, graphs=True)
        for samples in range(2, MOST_CAPTURES + 4):
            for _ in range(SETTLE):
                step(network, inputs(root, samples * len(slots)))
        assert {replica.captures for replica in graphed(network)} == {MOST_CAPTURES}
        before = captured(network)
        step(network, inputs(root, 2 * len(slots)))
        with torch.no_grad():
            for _ in range(SETTLE):
                network(inputs(root))
        assert captured(network) >= before + 2 * len(slots)


class TestAStepWithoutGraphs:
    def test_between_two_with_graphs_does_not_end_them(self, form: Form, slots: list, root: torch.device) -> None:
        def steps(network: Any, module: Any) -> Any:
            found = [step(network, inputs(root)) for _ in range(WARM_UP)]
            with torch.autograd.detect_anomaly():
                found.append(step(network, inputs(root)))
            found += losses(network, module)
            hook = module.lin.register_forward_hook(lambda module, args, output: output * 2)
            found += losses(network, module)
            hook.remove()
            return [*found, *losses(network, module)]

        network = compare(form, slots, root, lambda: Head(lambda self, x: self.lin(x)), steps)
        assert captured(network) >= (2 * STEPS - 2 * WARM_UP - 1) * len(slots)


class TestParameters:
    def test_that_change_before_the_backward_raise_as_they_do_without_graphs(
        self, form: Form, slots: list, root: torch.device
    ) -> None:
        module = build(root)
        network = form(module, slots[:1], graphs=True)
        for _ in range(SETTLE):
            step(network, inputs(root))
        loss = network(inputs(root)).sum()
        with torch.no_grad():
            module.first.weight.mul_(2)
            module.last.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
            loss.backward()
