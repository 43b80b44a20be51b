"""What a captured graph is good for: the structure of arguments, what a forward reads of its modules, and settings.

``calls`` compares them at each call. What cannot be compared refuses the capture, by `CannotBeCaptured`.
"""

from __future__ import annotations

import enum
import functools
import inspect
import random
import sys
import threading
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.batches.structures import batch_of, children_of, container_of
from dataparallel.comm.buckets import PLAIN_TYPES, has_strides
from dataparallel.replicas.compiled.calls import CALL, CompiledCall, compiled_call
from dataparallel.replicas.compiled.torch_compile import MARK_OF_COMPILER
from dataparallel.replicas.plan import FORM_ATTRIBUTE, UNIT_MODULE, instance_slots
from dataparallel.replicas.references import ATOMIC

_PLAIN = (*ATOMIC, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum)
_NOT_READ = {
    *_torch.REGISTRIES,
    *_torch.HOOK_TABLES,
    "_non_persistent_buffers_set",
    CALL,
    FORM_ATTRIBUTE,
    UNIT_MODULE,
}
_NOT_ENTERED = (nn.Module, type, types.FunctionType, types.ModuleType)
_TRANSPARENT = (set, frozenset, types.MethodType, types.SimpleNamespace, functools.partial, weakref.ref)
"""What is looked into as containers are."""

_WRITABLE = (list, dict, set, deque, UserDict, UserList)
"""What a forward may write into without an assignment."""

_BUILT_IN = (list, tuple, dict, set, frozenset)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class CannotBeCaptured(Exception):
    """The reason for which a replica runs as it is. ``is_final``: another try would fail too."""

    def __init__(self, reason: str, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


class ByIdentity:
    """A value that equals itself alone, and stays as long as a key holds it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _plain(value: Any) -> Hashable:
    """Equal for equal values of one type only. 0.0 and -0.0 are other values."""
    return type(value), repr(value) if isinstance(value, (float, complex, tuple)) else value


class Structure:
    """Arguments, or an output, taken apart: leaves, and what holds them.

    Attributes:
        leaves, paths: plain tensors and plain values, and where they are.
        shape: types, keys and plain attributes of the containers.

    Raises:
        CannotBeCaptured: something is neither a container that the library knows, nor a plain value or tensor.
    """

    def __init__(self, value: Any, name: str, device: torch.device) -> None:
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self._value, self._name, self._device = value, name, device
        self._tree, self.shape = self._taken_apart(value, name, ())

    def _taken_apart(self, value: Any, path: str, above: tuple[int, ...]) -> tuple[Any, Hashable]:
        container = None if isinstance(value, Tensor) or batch_of(value) is not None else container_of(value)
        if container is None:
            self._check_leaf(value, path)
            self.leaves.append(value)
            self.paths.append(path)
            return None, None
        children = children_of(value, path) or []
        attributes = {} if isinstance(value, UserDict) else getattr(value, "__dict__", {})
        inside = {id(child) for _, child in children}
        others = {key: each for key, each in attributes.items() if id(each) not in inside}
        if id(value) in above or not all(map(_is_plain, others.values())):
            raise CannotBeCaptured(
                f"{path} is a {type(value).__name__} with attributes beside its fields, or with itself"
            )
        found = [self._taken_apart(child, key, (*above, id(value))) for key, child in children]
        keys = tuple((key, shape) for (key, _), (_, shape) in zip(children, found, strict=True))
        plain = tuple((key, _plain(each)) for key, each in others.items())
        return (container, value, [tree for tree, _ in found]), (type(value), keys, plain)

    def _check_leaf(self, leaf: Any, path: str) -> None:
        if isinstance(leaf, Tensor):
            is_strided = has_strides(leaf) and not leaf.is_quantized
            if type(leaf) not in PLAIN_TYPES or not is_strided or leaf.device != self._device:
                kind = "nested" if leaf.is_nested else "quantised" if leaf.is_quantized else leaf.layout
                raise CannotBeCaptured(f"{path} is a {type(leaf).__name__} on {leaf.device} ({kind})")
            if not all(map(_is_plain, vars(leaf).values())) or leaf.is_conj() or leaf.is_neg():
                raise CannotBeCaptured(f"{path} is a tensor with attributes of its own, or with lazy conjugation")
        elif not _is_plain(leaf):
            raise CannotBeCaptured(f"{path} is a {type(leaf).__name__}")

    def with_leaves(self, leaves: Sequence[Any]) -> Any:
        """Another object of this structure, with new containers."""
        return _rebuilt(self._tree, iter(leaves))

    def check_unwritten(self) -> None:
        """Raises `CannotBeCaptured` unless the containers have the very same leaves still."""
        now = Structure(self._value, self._name, self._device)
        same = len(self.leaves) == len(now.leaves) and all(map(is_, self.leaves, now.leaves))
        if not same or self.shape != now.shape:
            raise CannotBeCaptured("its forward writes into a dict or list among its arguments")

    def kinds(self) -> Iterator[tuple[str, Hashable]]:
        """What a graph depends on: for each leaf its path and its kind."""
        first: dict[int, int] = {}
        yield self._name, self.shape
        for number, (path, leaf) in enumerate(zip(self.paths, self.leaves, strict=True)):
            if isinstance(leaf, Tensor):
                which = first.setdefault(id(leaf), number)  # a forward may ask if two arguments are the same
                kind = (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.is_inference())
                yield path, (*kind, which, *((key, _plain(value)) for key, value in vars(leaf).items()))
            else:
                yield path, _plain(leaf)


def _rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    if tree is None:
        return next(leaves)
    container, like, below = tree
    return container.rebuild(like, [_rebuilt(each, leaves) for each in below])


class HashedTuple(tuple[Any, ...]):
    """Pairs of a path and a value. They are many, and one object is asked for its hash at each call."""

    def __hash__(self) -> int:
        found: int | None = vars(self).get("hash")
        if found is None:
            found = vars(self)["hash"] = super().__hash__()
        return found


class ForwardReads:
    """What the forward of a replica may read of its modules besides tensors, and of the attributes of these.

    Containers are looked into, and so are objects that hang on a module, but no objects that hang on other objects.

    Raises:
        CannotBeCaptured: something there has a state that cannot be compared: a generator, an array, an iterator, a
            tensor that is no buffer.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules: list[tuple[str, Hashable]] = []
        self._attributes: list[tuple[str, Any]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        for name, module in root.named_modules():
            path = name or "the module"
            for registry in ("_parameters", "_buffers"):
                held = dict.items(vars(module)[registry])
                self._tensors += [(f"{path}.{key}", tensor) for key, tensor in held if tensor is not None]
            call = compiled_call(module)
            self._modules.append((path, (type(module), ByIdentity(None if call is None else call.functions))))
            read = [(key, value) for key, value in vars(module).items() if key not in _NOT_READ]
            self._attributes += [(f"{path}.{key}", value) for key, value in read if not isinstance(value, CompiledCall)]
        self._look()
        self._reached = _reached_by(root)

    def _look(self) -> None:
        inside, found, done = list[tuple[Any, list[tuple[str, Any]]]](), [*self._modules], set[int]()
        on_tensors = self._names_and_values()
        for path, tensor in self._tensors:
            given = attributes_of(tensor).items()
            found += [
                (f"{path}.{key}", _plain(value) if _is_plain(value) else ByIdentity(value)) for key, value in given
            ]
        waiting = [(path, value, False) for path, value in self._attributes]
        for path, value, is_on_object in waiting:
            found.append((path, _of_value(path, value)))
            is_object = not isinstance(value, _TRANSPARENT) and container_of(value) is None
            is_end = is_object and (is_on_object or isinstance(value, _NOT_ENTERED))
            if not (is_end or id(value) in done or _is_plain(value)):
                done.add(id(value))
                inside.append((value, items := _items_of(value)))
                waiting += [(path + key, each, is_on_object or is_object) for key, each in items]
        # Not before all has been looked at.
        self._on_tensors, self._inside, self._values = on_tensors, inside, HashedTuple(found)

    def _names_and_values(self) -> list[Any]:
        """Of all attributes of tensors. Every call compares them, so they are taken as they are."""
        attributes = [vars(tensor) for _, tensor in self._tensors]
        return [*chain.from_iterable(attributes), *chain.from_iterable(map(dict.values, attributes))]

    def now(self) -> HashedTuple:
        """What a graph depends on. It is made anew for what can change in place.

        Raises:
            CannotBeCaptured: see the class.
        """
        on_tensors = self._names_and_values()
        is_same = len(on_tensors) == len(self._on_tensors) and all(map(is_, on_tensors, self._on_tensors))
        if not is_same or any(_differ(before, _items_of(value)) for value, before in self._inside):
            self._look()
        return self._values

    def reached(self) -> list[list[ByIdentity]]:
        """What is in global lists, dicts and sets, and in enclosed ones, for a comparison."""
        return [
            [ByIdentity(each) for each in ([*x, *x.values()] if isinstance(x, (dict, UserDict)) else x)]
            for x in self._reached
        ]


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The Python attributes that users have set on a tensor. A class that has others too has a method for these."""
    method = getattr(type(tensor), "user_attributes", None)
    found = vars(tensor) if method is None else method(tensor)
    return {name: value for name, value in found.items() if not name.startswith(MARK_OF_COMPILER)} if found else {}


def _differ(before: list[tuple[str, Any]], items: list[tuple[str, Any]]) -> bool:
    return len(items) != len(before) or any(
        a[0] != b[0] or a[1] is not b[1] for a, b in zip(items, before, strict=True)
    )


def _items_of(value: Any) -> list[tuple[str, Any]]:
    """What hangs on a value: what it contains, what it calls with, and its attributes."""
    found = children_of(value, "") or []
    if isinstance(value, (set, frozenset)):
        found = [(f"[{number}]", each) for number, each in enumerate(sorted(value, key=hash))]
    elif isinstance(value, weakref.ref):
        return [("()", value())]
    elif isinstance(value, types.MethodType):
        return [(".__self__", value.__self__)]
    elif isinstance(value, functools.partial):
        found = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if type(value) in _BUILT_IN:
        return found
    names = [*getattr(value, "__dict__", ()), *instance_slots(type(value))]
    inside = {key for key, _ in found}  # a dataclass has its fields among its attributes
    return [*found, *((f".{each}", getattr(value, each, None)) for each in names if f".{each}" not in inside)]


def _of_value(path: str, value: Any) -> Hashable:
    if _is_plain(value):
        return _plain(value)
    kind = type(value)
    if isinstance(value, _NOT_ENTERED):
        return ByIdentity(value)
    if isinstance(value, (Tensor, random.Random, torch.Generator)) or kind.__module__.partition(".")[0] == "numpy":
        raise CannotBeCaptured(f"{path} is a {kind.__name__}, which is no buffer")
    has_parts = isinstance(value, _TRANSPARENT) or container_of(value) is not None or hasattr(value, "__dict__")
    if not has_parts and not callable(value) and not instance_slots(kind) and kind not in _LOCKS:
        # Such as an iterator, which each call takes on. What has a hash of its own does not change.
        if not isinstance(value, Hashable) or getattr(kind, "__hash__", None) is object.__hash__:
            raise CannotBeCaptured(f"{path} is a {kind.__name__}, whose state cannot be compared")
        return kind, value
    return ByIdentity(value)


def _reached_by(root: nn.Module) -> list[Any]:
    """The global lists, dicts and sets that methods of a tree's modules name, and those that they enclose."""
    classes = {base for module in root.modules() for base in type(module).__mro__}
    own = [cls for cls in classes if cls.__module__.partition(".")[0] not in ("torch", "dataparallel", "builtins")]
    found: dict[int, Any] = {}
    for function in (getattr(each, "__func__", each) for cls in own for each in vars(cls).values()):
        if isinstance(function, types.FunctionType):
            seen = inspect.getclosurevars(function)
            values = [*seen.nonlocals.values(), *seen.globals.values()]
            found |= {id(each): each for each in values if isinstance(each, _WRITABLE)}
    return [*found.values()]


def host_generators() -> list[object]:
    """States of the global generators for the host. A captured graph would do for ever what they draw once."""
    states: list[object] = [torch.get_rng_state().tolist(), random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append([numpy.asarray(each).tobytes() for each in numpy.random.get_state()])
    return states


def settings() -> tuple[tuple[str, Hashable], ...]:
    """Settings that a graph depends on.

    Raises:
        CannotBeCaptured: something is set that sees operators, or that a launch does not have.
    """
    modes = _torch.function_modes()
    if any(not _torch.is_device_context(mode) for mode in modes) or _torch.dispatch_modes():
        raise CannotBeCaptured("a mode for functions or operators of torch is active")
    if any(map(len, _torch.GLOBAL_HOOKS)):
        raise CannotBeCaptured("hooks for all modules are set")
    if torch.is_anomaly_enabled():
        raise CannotBeCaptured("torch.autograd.detect_anomaly is on")
    if torch.is_grad_enabled() and _torch.top_saved_tensors_hooks(True) is not None:
        # A capture would call them once, and launches would read for ever what they have packed then.
        raise CannotBeCaptured("hooks for saved tensors are set, as in a checkpoint")
    if _torch.why_hooks_are_disabled() is not None:
        raise CannotBeCaptured("hooks for saved tensors are disabled")
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found: dict[str, Hashable] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": tuple(mode.device for mode in modes),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    }
    return tuple(found.items())


def difference(old: Sequence[Any], new: Sequence[Any]) -> str:
    """Names what differs between two keys."""
    for before, after in zip(old, new, strict=False):
        if before != after:
            are_hashed = isinstance(before, HashedTuple) and isinstance(after, HashedTuple)
            return difference(before, after) if are_hashed else f"{after[0]} is another one in each call"
    return "its arguments are others in each call"
