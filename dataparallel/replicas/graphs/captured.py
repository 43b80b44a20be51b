"""`Captured`: one capture of a module's forward and of its backward, for arguments of one kind.

Arguments, outputs and gradients have fixed places. A launch copies arguments in, unless they are in their places, and
hands out the outputs where they are. Parameters are read where they are; those that are gathered for a call come to the
same addresses each time (``sharded.units.buffers``). The next launch writes over gradients, so they are copied
out. Only the gradient of another capture's output is left where that capture reads it.

The capture follows `torch.cuda.make_graphed_callables` in what it records; it warms up by calls that run as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.autograd.node import saved_instead
from dataparallel.comm.streams.current import Event, current_streams, kept_stream, streams_set
from dataparallel.replicas.build import ParameterRegistry, collector_paused
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.calls import call_inside
from dataparallel.replicas.compiled.functions import none_compiled
from dataparallel.replicas.graphs.copied import copy_for_capture
from dataparallel.replicas.graphs.launch import BackwardStage, LaunchNode, Waiting, reads
from dataparallel.replicas.graphs.pieces import BackwardPiece, CapturedPieces, capturing
from dataparallel.replicas.graphs.places import CapturePlace, FlatGrads
from dataparallel.replicas.graphs.pools import CapturedGraphs, ForwardPool, Pools
from dataparallel.replicas.plan import UNIT_MODULE

_one_at_a_time = threading.Lock()


class CannotBeCaptured(Exception):
    """The reason for which a module runs as it is."""


class Captured:
    """The graphs of one call of ``module``: those of its forward, and if gradients are recorded, of its backward.

    Args:
        module: a module of a replica.
        leaves, spec: the arguments, flattened.
        place: the device, and what has a fixed place there.
        pool, pools: the pool for the forward, and the memory of the slot.

    Attributes:
        is_waiting: true while an autograd graph needs what the last launch has saved.
        launches: how often it was launched.
        outputs: the places of outputs.
        misses: how often in a row it was not, because gathered parameters were elsewhere.

    Raises:
        CannotBeCaptured: the call cannot be captured; the message says why. Nothing has changed then.
    """

    def __init__(
        self, module: nn.Module, leaves: Sequence[Any], spec: Any, place: CapturePlace, pool: ForwardPool, pools: Pools
    ) -> None:
        self._place, self._pool = place, pool
        self._records = torch.is_grad_enabled()
        unit = vars(module).get(UNIT_MODULE)
        self._fixed = None if unit is None else unit.runner.fixed_addresses()
        gathered = set() if self._fixed is None else {*map(id, self._fixed.tensors)}
        # These lookups also make the current stream wait for parameters that are on their way.
        tensors = [*module.parameters(), *module.buffers()]
        self._tensors = [tensor for tensor in tensors if id(tensor) not in gathered]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]
        self._stages: list[BackwardStage] = []
        self._first_graph: Mapping[int, int] = {}
        self.is_waiting = False
        self.launches = self.misses = 0
        self._launched_on: set[torch.Stream] = set()
        self._memory = pools.for_backward(_torch.current_stream_at(place.device.index)) if self._records else None
        with (
            _one_at_a_time,
            torch.inference_mode(False),
            torch.set_grad_enabled(self._records),
            torch.cuda.device(place.device),
            collector_paused(),  # a graph that is freed in a capture spoils it
        ):
            self._inputs = [self._static(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
            self._capture(module, leaves, spec)

    def _static(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            static = tensor.detach() if self._place.holds(tensor) else tensor.detach().clone()
        return static.requires_grad_(tensor.requires_grad and self._records)

    def _capture(self, module: nn.Module, leaves: Sequence[Any], spec: Any) -> None:
        device = self._place.device
        current, stream = current_streams([device])[device], kept_stream(device, "captures")
        torch.cuda.init()  # it makes the list of generators
        with suppress(RuntimeError):  # a stand-in for CUDA has no cuBLAS, and needs none
            torch.cuda.current_blas_handle()  # a thread's handle takes memory when it is made, which captures forbid
        generator = torch.cuda.default_generators[device.index]
        before = generator.clone_state()  # a capture that fails may leave the generator in it
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._forward = CapturedGraphs(self._pool.pool)

        def is_here() -> bool:
            return _torch.current_stream_at(device.index) == stream

        has_backward = self._records and bool(parameters)
        pieces = CapturedPieces(module, parameters, self._forward.cut if has_backward else None, is_here)
        Event(current).make_wait(stream)
        try:
            with (
                streams_set({device: stream}),
                capturing(pieces),
                self._place.capturing(),
                _cleared_autocast_cache(),
                none_compiled(),
            ):
                self._capture_forward(copy_for_capture(module, pieces), leaves, spec)
                if any(output.requires_grad for output in self.outputs):
                    self._capture_backward(leaves, pieces)
        except BaseException as error:
            generator.graphsafe_set_state(before)
            if not isinstance(error, (RuntimeError, CannotBeCaptured)):
                raise
            raise CannotBeCaptured(_reason(error)) from error
        finally:
            pieces.forget_boundaries()
            Event(stream).make_wait(current)
        self._place.note_outputs(self.outputs, self)
        self._pool.add(self)

    def _capture_forward(self, copy: nn.Module, leaves: Sequence[Any], spec: Any) -> None:
        places = [leaf if place is None else place for leaf, place in zip(leaves, self._inputs, strict=True)]
        args, kwargs = _torch.pytree.tree_unflatten(places, spec)
        versions = [_torch.version_of(place) for place in self._inputs if place is not None]
        with self._forward.runs():
            output = call_inside(copy, *args, **kwargs)
        if versions != [_torch.version_of(place) for place in self._inputs if place is not None]:
            raise CannotBeCaptured("it writes to its arguments")
        self._output_leaves, self._output_spec = _torch.pytree.tree_flatten(output)
        self.outputs = [leaf for leaf in self._output_leaves if isinstance(leaf, Tensor)]
        if any(tensor.device != self._place.device for tensor in self.outputs):
            raise CannotBeCaptured("it returns tensors on another device")

    def _capture_backward(self, leaves: Sequence[Any], pieces: CapturedPieces) -> None:
        memory = self._memory
        assert memory is not None  # gradients are recorded
        self._first_graph = pieces.first_graph
        static = [place for place in self._inputs if place is not None and place.requires_grad]
        given = [leaf for place, leaf in zip(self._inputs, leaves, strict=True) if place is not None]
        wanted = [leaf for leaf in given if leaf.requires_grad]
        outputs = [output for output in self.outputs if output.requires_grad]
        grad_outputs = [torch.zeros_like(output) for output in outputs]
        self._place.note_grads(outputs, grad_outputs, self)
        for piece in pieces.of_backward(outputs, static):
            is_top = not self._stages
            inputs = [i for i, place in enumerate(static) if any(place is leaf for leaf in piece.leaves)]
            leaves_of_parameters = piece.leaves[len(inputs) :]
            stage = BackwardStage(
                outputs=self.outputs if is_top else [*piece.outputs],
                have_grads=[output.requires_grad for output in self.outputs] if is_top else [True],
                grad_outputs=grad_outputs,
                inputs=inputs,
                parameters=[pieces.parameter_of[id(leaf)][0] for leaf in leaves_of_parameters],
                targets=[self._place.claim_grad(wanted[i]) for i in inputs],
                recording=CapturedGraphs(memory.pool),
                runs_once=piece.runs_once,
            )
            self._capture_stage(stage, piece, memory.buffers_for(piece.leaves))
            self._stages.insert(0, stage)
            grad_outputs = [*stage.grads_below]

    def _capture_stage(self, stage: BackwardStage, piece: BackwardPiece, buffers: Mapping[torch.dtype, Tensor]) -> None:
        below = [] if piece.below is None else [piece.below]
        wanted: list[Any] = [*(boundary.edge for boundary in below), *piece.leaves]
        # Not in the pool of backwards: another one may be launched before the piece below, and would write over them.
        stage.grads_below = [torch.empty_like(boundary.tensor) for boundary in below]
        torch.clear_autocast_cache()  # a checkpoint would find what the forward has converted, which is freed later
        with stage.recording.runs(), torch_compile.compiled_backwards_keep_graphs():
            # The graph is kept: what the forward has saved must keep its memory as long as the forward is launched.
            found = torch.autograd.grad(piece.begins, wanted, stage.grad_outputs, retain_graph=True, allow_unused=True)
            for place, grad in zip(stage.grads_below, found, strict=False):
                place.zero_() if grad is None else place.copy_(grad)
            stage.grads = FlatGrads(found[len(below) :], [*stage.targets, *[None] * len(stage.parameters)], buffers)

    # ---- launches ----------------------------------------------------------------------------------------------------

    def still_fits(self) -> bool:
        """True if parameters and buffers are where they were, or come there again if they are gathered."""
        stay = [*map(Tensor.data_ptr, self._tensors)] == self._addresses
        return stay and (self._fixed is None or self._fixed.are_valid())

    def may_be_launched(self) -> bool:
        """True if no backward needs what a launch writes over, and gathered parameters are where they were.

        Call it once for each launch: it counts `misses`.
        """
        is_in_place = self._fixed is None or self._fixed.are_current()
        self.misses = 0 if is_in_place else self.misses + 1
        return is_in_place and not self.is_waiting and self._pool.may_launch(self)

    def launch(self, leaves: Sequence[Any], late: Sequence[tuple[int, ParameterRegistry]]) -> Any:
        """Returns the module's output for these arguments.

        Without a node in autograd's graph nothing says how long the output is needed, so it is a copy.

        ``late``: registries of the module whose lookups wait for parameters, each with its module's number.
        """
        inputs = [(place, leaf) for place, leaf in zip(self._inputs, leaves, strict=True) if place is not None]
        self.launches += 1
        with torch.no_grad():
            for place, given in inputs:
                if given.data_ptr() != place.data_ptr():
                    place.copy_(given)
            self._launch_forward(late)
            outputs: Sequence[Tensor] = [] if self._stages else [output.clone() for output in self.outputs]
        if self._stages:
            self.is_waiting = True
            wanted = [leaf for place, leaf in inputs if place.requires_grad]
            with saved_instead(Waiting(self)):
                for stage in self._stages:
                    tensors = [wanted[i] for i in stage.inputs]
                    direct = {i for i, leaf in enumerate(tensors) if reads(leaf.grad_fn, stage.targets[i])}
                    outputs = LaunchNode.apply(self, stage, direct, *outputs, *tensors, *stage.parameters)
        found = iter(outputs)
        return _torch.pytree.tree_unflatten(
            [next(found) if isinstance(leaf, Tensor) else leaf for leaf in self._output_leaves], self._output_spec
        )

    def _launch_forward(self, late: Sequence[tuple[int, ParameterRegistry]]) -> None:
        waits: dict[int, list[ParameterRegistry]] = {}
        for number, registry in late:
            waits.setdefault(self._first_graph.get(number, 0), []).append(registry)
        for number, graph in enumerate(self._forward.graphs):
            for registry in waits.get(number, ()):
                registry.wait_for_all()
            self._replay(graph)

    def launch_stage(
        self, stage: BackwardStage, grads: Sequence[Tensor | None], direct: Collection[int]
    ) -> list[Tensor | None]:
        """Launches a piece of the backward. Returns the gradients of what its node has taken.

        ``direct``: see `LaunchNode`.
        """
        for place, grad in zip(stage.grad_outputs, grads, strict=True):
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != place.data_ptr() or grad.stride() != place.stride():
                place.copy_(grad)
        with nullcontext() if self._fixed is None else self._fixed.restored():
            for graph in stage.recording.graphs:
                self._replay(graph)
        assert stage.grads is not None
        return [*(grad.detach() for grad in stage.grads_below), *stage.grads.taken(direct)]

    def _replay(self, graph: Any) -> None:
        self._launched_on.add(_torch.current_stream_at(self._place.device.index))
        graph.replay()

    def __del__(self) -> None:
        # The memory goes back to the capturing stream, which has to come after the launches.
        if not self._place.is_capturing:
            stream = kept_stream(self._place.device, "captures")
            for launched_on in getattr(self, "_launched_on", ()):
                Event(launched_on).make_wait(stream)


@contextmanager
def _cleared_autocast_cache() -> Iterator[None]:
    """A weight that autocast has converted in a capture must not be used by code outside of it, nor the other way.

    Compiled code looks whether the cache is on, so it stays on.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _reason(error: BaseException) -> str:
    """The error's first line, and the line of the user's program where it happened."""
    frame, where = error.__traceback__, ""
    while frame is not None:
        code = frame.tb_frame.f_code
        if "/torch/" not in code.co_filename and "/dataparallel/" not in code.co_filename:
            where = f" ({code.co_filename}:{frame.tb_lineno}, in {code.co_name})"
        frame = frame.tb_next
    return f"{str(error).splitlines()[0]}{where}"
