"""`Captured`: one capture of a replica's forward and of its backward, for arguments of one kind.

A launch copies arguments into their places, and outputs and gradients out of theirs. Parameters are read where they
are. The autograd graph of the capture is kept, and each launch of the forward writes the tensors that it has saved. So
a backward runs through it, without a launch, where other gradients come in than those that it was captured for.

The capture follows `torch.cuda.make_graphed_callables` in what it records; it warms up by calls that run as they are.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.autograd.node import Node, saved_instead
from dataparallel.batches.structures import Arguments
from dataparallel.comm.buckets import flatten, plan_buckets, unflatten
from dataparallel.comm.streams.current import (
    Event,
    current_streams,
    drop_capture_stream,
    new_capture_stream,
    streams_set,
)
from dataparallel.replicas.build import collector_paused
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.calls import call_inside, none_compiled
from dataparallel.replicas.graphs.kinds import CannotBeCaptured, Structure
from dataparallel.replicas.graphs.pieces import BackwardPiece, CapturedPieces, Recording
from dataparallel.replicas.plan import UNIT_MODULE
from dataparallel.user_warnings import is_of_user

_one_at_a_time = threading.Lock()

_OTHER_SEED = 2**62 - 57
"""Added to the seed during a capture: torch then refuses a forward that sets it, which draws the same in each call."""


class Late(NamedTuple):
    """Parameters of module ``number`` of a replica that may come late. The current stream waits for them.

    A graph looks no parameters up, so the host waits before it launches the one that uses the module first.
    """

    number: int
    wait: Callable[[], None]


class Pool:
    """The memory of one capture's graphs, and the stream that captures them. When the capture is gone, another has it.

    Raises:
        CannotBeCaptured: there is no stream that no other pool has.
    """

    def __init__(self, device: torch.device) -> None:
        stream = new_capture_stream(device)
        if stream is None:
            gc.collect()  # models that nobody has may still have captures
            stream = new_capture_stream(device)
        if stream is None:
            raise CannotBeCaptured(f"{device} has no stream left for another capture", is_final=False)
        self.stream = stream
        weakref.finalize(self, drop_capture_stream, stream)
        self._handle, self.kept, self._used_on = torch.cuda.graph_pool_handle(), list[Any](), stream

    def order(self, stream: torch.Stream) -> None:
        """Orders what is launched on ``stream`` from now on after earlier uses of the memory."""
        if self._used_on != stream:
            Event(self._used_on).make_wait(stream)
            self._used_on = stream

    def hold(self, device: torch.device) -> None:
        """Captures a small graph that stays: torch cannot use a pool again if all of its graphs have gone."""
        if not self.kept:
            with self.captures(self.kept):
                torch.zeros(1, device=device)

    @contextmanager
    def captures(self, graphs: list[Any]) -> Iterator[None]:
        """What the block launches on the current stream is captured into ``graphs``, and does not run."""
        try:
            self.begin(graphs)  # if it fails, the pool may belong to a capture all the same
            yield
        except BaseException:
            with suppress(RuntimeError):  # it says that the capture has failed
                graphs[-1].capture_end()
            if _torch.free_failed_pool(self.stream.device_index, self._handle):
                self._handle, self.kept = torch.cuda.graph_pool_handle(), []
            raise
        graphs[-1].capture_end()

    def begin(self, graphs: list[Any]) -> None:
        """Begins another one of ``graphs``."""
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=self._handle, capture_error_mode="thread_local")


def _flat_copies(grads: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
    """Leaves gradients in a few flat buffers, inside a capture. Returns what copies those of the last launch out."""
    count, present = len(grads), [i for i, grad in enumerate(grads) if grad is not None]
    tensors = cast("Sequence[Tensor]", grads)
    buckets, singles = plan_buckets(tensors, sys.maxsize, candidates=present, keep_repeats=False)
    if singles:
        raise CannotBeCaptured("a gradient is sparse, or of a class of its own")
    flats = [flatten(bucket, tensors) for bucket in buckets]  # there is one for each dtype

    def taken() -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * count
        for bucket, flat in zip(buckets, flats, strict=True):
            for i, grad in zip(bucket.indices, unflatten(bucket, flat.clone()), strict=True):
                found[i] = grad
        return found

    return taken


def _lent(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients where the last launch has left them, for units: each backward ends after their sums."""
    return [None if grad is None else grad.detach() for grad in grads]


_MOST_PATTERNS = 4
"""How many patterns of incoming gradients a piece of the backward is captured for."""


class _Waiting:
    """Held by an autograd graph until its backward has run or it is gone."""


class Captured:
    """The graphs of one call of ``module``: those of its forward, and if gradients are recorded, of its backward.

    Args:
        module: a replica.
        arguments: of the call.
        free: pools of the slot that no capture has. The capture takes one, and gives it back when it is gone.

    Attributes:
        launches: how often it was launched.

    Raises:
        CannotBeCaptured: the call cannot be captured; the message says why. Nothing has changed then.
    """

    def __init__(self, module: nn.Module, arguments: Structure, device: torch.device, free: list[Pool]) -> None:
        self._device, self._free = device, free
        self._pool = free.pop() if free else Pool(device)
        self._records = torch.is_grad_enabled()
        self._parameters, self._buffers = [*module.parameters()], [*module.buffers()]
        self._where = self._memory_now()
        self._forward: list[Any] = []
        self._pieces: list[BackwardPiece] = []
        self._waiting: weakref.ref[_Waiting] | None = None
        self._unit_module = vars(module).get(UNIT_MODULE)
        self.launches = 0

        has_backward = self._records and any(parameter.requires_grad for parameter in self._parameters)
        pieces = CapturedPieces(module, (lambda: self._cut()) if has_backward else None)
        self._first_graph = pieces.first_graph
        with self._capturing():
            self._capture_forward(pieces, arguments)
            if self._records and any(output.requires_grad for output in self.outputs):
                self._capture_backward(pieces)
        # Each launch would write such gradients to memory of the capture, and none would reach a parameter.
        if any(leaf.grad is not None for _, leaf in pieces.parameter_of.values()):
            raise CannotBeCaptured("a backward inside of it gives its parameters gradients")

    def __del__(self) -> None:
        pool, free = getattr(self, "_pool", None), self._free
        if pool is not None:
            pool.order(pool.stream)  # memory goes back to this stream
        vars(self).clear()  # its graphs die before another capture has the pool
        if pool is not None:
            free.append(pool)

    def _cut(self) -> None:
        self._forward[-1].capture_end()
        self._pool.begin(self._forward)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Inside the block this thread captures. Afterwards the device's generator is as it was."""
        device, stream = self._device, self._pool.stream
        current = current_streams([device])[device]
        torch.cuda.init()  # it makes the list of generators
        generator = torch.cuda.default_generators[device.index]
        with (
            _one_at_a_time,
            torch.inference_mode(False),
            torch.set_grad_enabled(self._records),
            torch.cuda.device(device),
            collector_paused(),  # a graph that is freed in a capture spoils it
        ):
            with suppress(RuntimeError):  # a stand-in for CUDA has no cuBLAS, and needs none
                torch.cuda.current_blas_handle()  # a thread's handle takes memory when it is made: captures forbid that
            # The state is one object, which all graphs with random numbers follow.
            state, seed, offset = generator.graphsafe_get_state(), generator.initial_seed(), generator.get_offset()
            generator.manual_seed((seed + _OTHER_SEED) % 2**63)
            self._pool.order(stream)
            Event(current).make_wait(stream)
            try:
                with streams_set({device: stream}), none_compiled(), ExitStack() as at_end:
                    # A weight that autocast has converted in a capture must not be used by code outside of it, nor the
                    # other way. Compiled code looks whether the cache is on, so it stays on.
                    torch.clear_autocast_cache()
                    at_end.callback(torch.clear_autocast_cache)
                    self._pool.hold(device)
                    yield
            except BaseException as error:
                generator.graphsafe_set_state(state)
                with suppress(RuntimeError), streams_set({device: stream}), self._pool.captures(self._pool.kept):
                    torch.zeros(1, device=device)  # torch leaves the generator in a failed capture until one succeeds
                if not isinstance(error, RuntimeError):
                    raise
                # What the capturing thread may not do is refused in the forward. What others do spoils a capture.
                spoiled = isinstance(error, torch.AcceleratorError) and "not permitted" not in str(error)
                raise CannotBeCaptured(_reason(error), is_final=not spoiled) from error
            finally:
                generator.graphsafe_set_state(state)
                generator.manual_seed(seed)
                generator.set_offset(offset)
                Event(stream).make_wait(current)

    def _capture_forward(self, pieces: CapturedPieces, arguments: Structure) -> None:
        places: dict[int, Tensor] = {}
        # Not inside the capture: with deterministic algorithms torch fills new memory, and each launch would do so too.
        for leaf in arguments.leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                place = torch.empty_like(leaf, requires_grad=False)
                places[id(leaf)] = place.requires_grad_(leaf.requires_grad and self._records)
        with self._pool.captures(self._forward), pieces.capturing():
            given = [places.get(id(leaf), leaf) for leaf in arguments.leaves]
            args, kwargs = arguments.with_leaves(given)
            before = Structure(Arguments((args, kwargs)), "arguments", self._device)
            versions = [*map(_torch.version_of, places.values())]
            output = call_inside(pieces.copy, *args, **kwargs)
        before.check_unwritten()
        if versions != [*map(_torch.version_of, places.values())]:
            raise CannotBeCaptured("it writes to its arguments")
        first = {id(leaf): number for number, leaf in reversed([*enumerate(arguments.leaves)])}
        self._places = [(first[key], place, place.data) for key, place in places.items()]
        self._output = Structure(output, "its output", self._device)
        tensors = {id(leaf): leaf for leaf in self._output.leaves if isinstance(leaf, Tensor)}
        self.outputs = [*tensors.values()]

    def _capture_backward(self, pieces: CapturedPieces) -> None:
        static = [place for _, place, _ in self._places if place.requires_grad]
        outputs = [output for output in self.outputs if output.requires_grad]
        given, have_grads = self.outputs, [output.requires_grad for output in self.outputs]
        places = [torch.empty_like(output, requires_grad=False) for output in outputs]
        for piece in pieces.of_backward(outputs, static):
            piece.outputs, piece.have_grads, piece.grad_outputs = given, have_grads, places
            piece.inputs = [i for i, place in enumerate(static) if any(place is leaf for leaf in piece.leaves)]
            piece.parameters = [pieces.parameter_of[id(leaf)][0] for leaf in piece.leaves[len(piece.inputs) :]]
            left = self._record(piece, (True,) * len(places)).grads_below
            self._pieces.insert(0, piece)
            if piece.below is not None:
                given, have_grads, places = [piece.below[1]], [True], [torch.empty_like(piece.below[1])]
                if left[0] is not None and left[0].stride() == places[0].stride():
                    places = cast("list[Tensor]", left)  # the next piece reads the gradient where this one leaves it

    def _record(self, piece: BackwardPiece, pattern: tuple[bool, ...]) -> Recording:
        """Captures a piece of the backward for gradients that come in as ``pattern`` says."""
        graphs: list[Any] = []
        torch.clear_autocast_cache()  # a checkpoint would find what the forward has converted, which is freed later
        places = [*compress(piece.grad_outputs, pattern)]
        with self._pool.captures(graphs):
            with _NoDraws():
                found = _gradients(piece, places, pattern)
            count = 0 if piece.below is None else 1
            grads, unit_module = found[count:], self._unit_module
            # What is captured later than the pieces below lies where these write: they run before the sums.
            lends = unit_module is not None and not piece.recordings
            taken = partial(_lent, grads) if lends else _flat_copies(grads)
            recording = Recording(graphs, found[:count], taken)
        piece.recordings[pattern] = recording
        return recording

    # ---- launches ----------------------------------------------------------------------------------------------------

    def _memory_now(self) -> list[Any]:
        tensors = [*self._parameters, *self._buffers]
        return [*map(Tensor.data_ptr, tensors), *(tensor.requires_grad for tensor in tensors)]

    def parameters_now(self) -> list[int]:
        """Versions and addresses of the parameters."""
        return [*map(_torch.version_of, self._parameters), *map(Tensor.data_ptr, self._parameters)]

    def still_fits(self) -> bool:
        """True if parameters and buffers are where they were."""
        return self._memory_now() == self._where

    @property
    def is_waiting(self) -> bool:
        """True while an autograd graph needs what the last launch has saved."""
        return self._waiting is not None and self._waiting() is not None

    def record_what_was_missed(self) -> None:
        """Captures pieces of the backward for patterns of gradients that have come in since."""
        for piece in self._pieces:
            pattern, piece.missed = piece.missed, None
            if pattern is not None and pattern not in piece.recordings and len(piece.recordings) < _MOST_PATTERNS:
                piece.recordings[pattern] = None
                with suppress(CannotBeCaptured), self._capturing():
                    self._record(piece, pattern)

    def launch(self, leaves: Sequence[Any], late: Sequence[Late]) -> Any:
        """Returns the module's output for these arguments."""
        self.launches += 1
        self._pool.order(_torch.current_stream_at(self._device.index))
        with torch.no_grad():
            for number, _, data in self._places:  # the data has a version of its own
                data.copy_(leaves[number])
            waits: dict[int, list[Late]] = {}
            for each in late:
                waits.setdefault(self._first_graph.get(each.number, 0), []).append(each)
            for number, graph in enumerate(self._forward):
                for each in waits.get(number, ()):
                    each.wait()
                graph.replay()
            outputs = [] if self._pieces else [output.detach().clone() for output in self.outputs]
        if self._pieces:
            wanted = [leaves[number] for number, place, _ in self._places if place.requires_grad]
            waiting = _Waiting()
            self._waiting = weakref.ref(waiting)
            with saved_instead(waiting):
                for piece in self._pieces:
                    inputs = [wanted[i] for i in piece.inputs]
                    outputs = [*LaunchNode.apply(self, piece, *outputs, *inputs, *piece.parameters)]
        new = {id(output): copied for output, copied in zip(self.outputs, outputs, strict=True)}
        return self._output.with_leaves([new.get(id(leaf), leaf) for leaf in self._output.leaves])

    def launch_piece(self, piece: BackwardPiece, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Launches a piece of the backward. Returns the gradients of what its node has taken."""
        self._pool.order(_torch.current_stream_at(self._device.index))
        pattern = tuple(grad is not None for grad in grads)
        given = [grad for grad in grads if grad is not None]
        if not given:
            return [None] * ((piece.below is not None) + len(piece.leaves))
        recording = piece.recordings.get(pattern)
        if recording is None:
            piece.missed = pattern
            return _gradients(piece, given, pattern)
        for place, grad in zip(compress(piece.grad_outputs, pattern), given, strict=True):
            if grad.data_ptr() != place.data_ptr() or grad.stride() != place.stride():
                place.copy_(grad)
        for graph in recording.graphs:
            graph.replay()
        below = [None if grad is None else grad.detach() for grad in recording.grads_below]
        return [*below, *recording.taken()]


def _gradients(piece: BackwardPiece, grads: Sequence[Tensor], pattern: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of what is below the piece and of its leaves. ``grads``: those that come in, by ``pattern``."""
    begins = [*compress(piece.begins, pattern)]
    wanted: list[Any] = [*([] if piece.below is None else piece.below[:1]), *piece.leaves]
    with torch_compile.compiled_backwards_keep_graphs():
        # The graph is kept: what the forward has saved must keep its memory as long as the forward is launched.
        return [*torch.autograd.grad(begins, wanted, grads, retain_graph=True, allow_unused=True)]


class _NoDraws(_torch.DispatchMode):
    """Refuses operators that draw random numbers: a checkpoint would draw others than its forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention and its backward have the tag too. They draw only if they drop something out, and in the forward.
        if torch.Tag.nondeterministic_seeded in func.tags and "backward" not in func.name():
            names = [argument.name for argument in _torch.schema_of(func).arguments]
            given = {**dict.fromkeys(names, 0), **dict(zip(names, args, strict=False)), **(kwargs or {})}
            rates = [given[name] for name in ("dropout_p", "dropout", "p") if name in names]
            if rates and not any(rates):
                return func(*args, **(kwargs or {}))
            raise CannotBeCaptured("its backward draws random numbers, as dropout in a checkpoint does")
        return func(*args, **(kwargs or {}))


class LaunchNode(Node):
    """The node of one piece of a launch. Its backward launches that piece of the captured backward.

    The nodes of a launch follow each other: each but the first takes what the one below gives.
    """

    @staticmethod
    def forward(ctx: Any, captured: Captured, piece: BackwardPiece, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Called after the forward has been launched. ``tensors``: what needs gradients."""
        ctx.captured, ctx.launch, ctx.piece, ctx.has_run = captured, captured.launches, piece, False
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:1])  # see `saved_instead`
        is_top = piece.outputs is captured.outputs
        ctx.parameters = captured.parameters_now() if is_top else []
        outputs = tuple(each.detach().clone() if is_top else each.detach() for each in piece.outputs)
        ctx.mark_non_differentiable(*compress(outputs, map(not_, piece.have_grads)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launches the piece.

        Raises:
            RuntimeError: it would be differentiated; what the forward has saved was overwritten by a later launch, or
                perhaps by this piece itself, if it is compiled and was launched before; parameters have changed.
        """
        piece: BackwardPiece = ctx.piece
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a captured backward cannot be differentiated, which create_graph=True asks for: leave graphs=True out"
            )
        if ctx.captured.launches != ctx.launch:
            raise RuntimeError(
                "this backward needs what a forward has saved in a captured graph, and the graph was launched again "
                "since. Call backward before the next forward, or leave graphs=True out"
            )
        if piece.outputs is ctx.captured.outputs and ctx.captured.parameters_now() != ctx.parameters:
            raise RuntimeError(
                "a parameter was modified by an inplace operation, or moved, since the forward of a captured replica, "
                "and its backward reads parameters where they were. Call backward first, or leave graphs=True out"
            )
        if ctx.has_run and piece.runs_once:
            raise RuntimeError(
                "this backward is compiled and has run already, and compiled code may write to what the forward has "
                "saved. Call the model again instead of backward with retain_graph=True"
            )
        ctx.has_run = True
        return (None, None, *ctx.captured.launch_piece(piece, [*compress(grads, piece.have_grads)]))


def _reason(error: BaseException) -> str:
    """The error's first line, and the line of the user's program where it happened."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_of_user(frame):
            where = f" ({frame.f_code.co_filename}:{line}, in {frame.f_code.co_name})"
    return f"{str(error).splitlines()[0]}{where}"
