"""`ModulePlan` lists what a replica of a module tree needs: modules, tensors, ties, and attributes that refer to them.

A plan is made from the tree at the start of a call, and read once for each replica: building a replica does not look
at the source again. Making a plan raises an error if the tree cannot be replicated.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from copyreg import _slotnames  # type: ignore[attr-defined]
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dataparallel import _torch
from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.comm.buckets import PLAIN_TYPES, has_strides
from dataparallel.comm.kinds import is_wrapper
from dataparallel.devices import CPU
from dataparallel.replicas.compiled.calls import Compiled, compiled_here
from dataparallel.replicas.references import (
    ATOMIC,
    CYCLES,
    ReferenceCycles,
    behind_proxy,
    compiled_over,
    method_owner,
    reached,
    reached_by_method,
)

TABLES = frozenset({dict, OrderedDict, list, tuple, set})
"""Types of containers that refer to nothing while they are empty."""

# The method of graphs is not called: it would generate the code and a class for each copy.
_USUAL_RULES = (nn.Module._replicate_for_data_parallel, torch.fx.GraphModule._replicate_for_data_parallel)

NONE_POSITION = -1
"""The position of a name that is registered with the value ``None``."""

HAS_COMPILED = "_dataparallel_has_compiled"
"""Attribute of a replica's root: true if a module of the replica calls compiled code."""

TWIN_INFO = "_dataparallel_twin_info"
"""Attribute of a root that is the twin of another module: a `TwinInfo`. Replicas do not have it."""

REFUSAL = "_dataparallel_refusal"
"""Method of modules that cannot be replicated. It takes the module's name in the tree and returns the error message."""

ORIGINAL_CLASS = "_dataparallel_original_class"
"""Attribute of a class that a composable form made: the class that the module had before."""

FORM_ATTRIBUTE = "_dataparallel_form"
"""The attribute of a managed module that holds its form and the form's state."""

UNIT_MODULE = "_dataparallel_unit_module"
"""Attribute of a replica's module: the `UnitModule` that gathers the parameters of the module's unit on the slot."""


@dataclass(frozen=True, eq=False)
class TwinInfo:
    """Describes a twin: a root that has the children and tensors of another module, and is replicated in its place.

    Attributes:
        source_id: the id of the other module. In replicas, references to this module become references to the replica.
        ignored_modules: modules below the root that all replicas share with the source.
        ignored_parameters: ids of parameters that all replicas share with the source.
        allowed: modules of this class may be in the tree, although elsewhere they have a `REFUSAL`.
    """

    source_id: int
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_parameters: frozenset[int] = frozenset()
    allowed: type | None = None


@dataclass(slots=True, eq=False)
class ModuleEntry:
    """One module: positions of its tensors and children in the plan, and names of attributes that refer to the tree.

    A name that is registered with ``None`` has the position `NONE_POSITION`, which is -1. See `ModulePlan.table` for
    this and lower positions. ``attributes`` is a copy of the module's ``__dict__``, with the registries. Of each of the
    ``references`` it is noted if it has a `method_owner`. ``proxied`` names the children that are weak proxies of a
    module.
    """

    module: nn.Module
    name: str
    cls: type[nn.Module] = field(init=False)
    attributes: dict[str, Any] = field(init=False)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    children: dict[str, int] = field(default_factory=dict)
    references: dict[str, bool] = field(default_factory=dict)
    proxied: list[str] = field(default_factory=list)
    slots: tuple[str, ...] = field(init=False)
    has_hooks: bool = field(init=False)
    has_own_rule: bool = field(init=False)
    is_script: bool = field(init=False)
    compiled: Compiled | None = None
    _copied: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.cls = type(self.module)
        self.attributes = vars(self.module).copy()
        self.attributes.pop(CYCLES, None)  # the module is a replica itself
        self.slots, self.has_hooks = instance_slots(self.cls), any(map(self.attributes.get, HOOK_TABLES))
        self.has_own_rule = original_class(self.cls)._replicate_for_data_parallel not in _USUAL_RULES
        self.is_script = isinstance(self.module, torch.jit.ScriptModule)

    def method_owner(self, key: str, value: Any) -> Any:
        """The `references.method_owner` of an attribute that takes the place of a method of the class, if it has one.

        Other callables, such as tokenizers and hooks, are the same in all replicas.
        """
        return method_owner(value) if callable(getattr(original_class(self.cls), key, None)) else None

    @property
    def copied(self) -> dict[str, Any]:
        """The attributes that each replica starts with. The plan has to be complete."""
        if self._copied is None:
            left_out = {TWIN_INFO, *self.left_out}
            self._copied = {key: value for key, value in self.attributes.items() if key not in left_out}
            self._copied["_is_replica"] = True
        return self._copied

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of attributes that replicas do not copy from the source."""
        return () if self.compiled is None else self.compiled.left_out


@dataclass
class ModulePlan:
    """A module tree. Each module and each tensor has one position, however often it is used. The root is entry 0.

    Attributes:
        parameters: positions of the tensors that are parameters; the others are buffers.
        source_id: the id of the root or, if the root is a twin, of the module that it stands for.
        shared: modules and parameters that all replicas share with the source.
        read_directly: positions of parameters that a replica may read, or slot 0 may write to, without a lookup in a
            registry: by attributes, in ScriptModules, by the class's ``_replicate_for_data_parallel``, or by another
            tensor of the plan on the same storage.
        cycles: breaks reference cycles of the replicas; ``None`` if there are none, or if nothing can tell how long the
            replicas are needed.
    """

    entries: list[ModuleEntry]
    tensors: list[Tensor]
    parameters: list[int]
    source_id: int
    ignored_parameters: frozenset[int] = frozenset()
    shared: list[Any] = field(default_factory=list)
    read_directly: set[int] = field(default_factory=set)
    has_references: bool = False
    cycles: ReferenceCycles | None = None

    @classmethod
    def of(cls, network: nn.Module, root_call: Compiled | None = None) -> ModulePlan:
        """``root_call``: how replicas are compiled, if ``network`` is not compiled itself."""
        twin: TwinInfo = vars(network).get(TWIN_INFO) or TwinInfo(id(network))
        ignored = twin.ignored_modules
        entries = [ModuleEntry(module, name) for name, module in network.named_modules(memo={*ignored})]
        _check_replicatable(entries, twin.allowed)
        if root_call is not None:
            if entries[0].compiled is not None:
                raise RuntimeError(
                    f"this {entries[0].cls.__name__} was compiled, and its wrapper has compile= as well. Compile the "
                    "module, or pass compile= to the wrapper, not both"
                )
            entries[0].compiled = root_call
        module_positions = {id(entry.module): i for i, entry in enumerate(entries)}
        plan = cls(entries, [], [], twin.source_id, twin.ignored_parameters)
        module_positions.update((id(module), plan._share(module)) for module in ignored)
        tensor_positions: dict[int, int] = {}
        # Parameters first: a tensor that is both a parameter and a buffer is a parameter.
        for entry in entries:
            for key, parameter in entry.module._parameters.items():
                entry.parameters[key] = plan._add(parameter, True, tensor_positions, entry, key)
        for entry in entries:
            for key, buffer in entry.module._buffers.items():
                entry.buffers[key] = plan._add(buffer, False, tensor_positions, entry, key)
            for key, child in entry.module._modules.items():
                position = NONE_POSITION if child is None else module_positions.get(id(child))
                if position is None:
                    position = module_positions[id(behind_proxy(child))]
                    entry.proxied.append(key)
                entry.children[key] = position
        modules = {id(entry.module) for entry in entries} | {plan.source_id}
        tensors = {i: p for i, p in tensor_positions.items() if i not in plan.ignored_parameters}
        plan._find_references(modules, tensors)
        plan._find_shared_storages()
        return plan

    @property
    def is_plain(self) -> bool:
        """True if replicas differ from the source in their tensors and children only."""
        return not self.has_references and not any(
            entry.slots or entry.has_own_rule or entry.proxied or entry.has_hooks for entry in self.entries
        )

    def table(self, own: Sequence[Any]) -> list[Any]:
        """Appends to a replica's tensors or modules the objects that positions below zero stand for."""
        return [*own, *self.shared, None]

    def _add(
        self, tensor: Tensor | None, is_parameter: bool, positions: dict[int, int], entry: ModuleEntry, key: str
    ) -> int:
        if tensor is None:
            return NONE_POSITION
        if id(tensor) in positions:
            return positions[id(tensor)]
        if id(tensor) in self.ignored_parameters:
            positions[id(tensor)] = self._share(tensor)
        else:
            if type(tensor) not in PLAIN_TYPES and is_lazy(tensor):
                # As `torch.nn.DataParallel` raises, and also in the words of its successor: people search for both.
                raise ValueError(
                    "Attempted to use an uninitialized parameter. Modules with uninitialized parameters can't be "
                    f"replicated: {dotted(entry.name, key)} is not initialised yet; run the module once on a sample "
                    "batch first"
                )
            positions[id(tensor)] = len(self.tensors)
            if is_parameter:
                self.parameters.append(len(self.tensors))
            self.tensors.append(tensor)
        return positions[id(tensor)]

    def _share(self, item: nn.Module | Tensor) -> int:
        self.shared.insert(0, item)
        return NONE_POSITION - len(self.shared)

    def _find_references(self, modules: Set[int], tensors: Mapping[int, int]) -> None:
        tree_ids = modules | tensors.keys()
        for entry in self.entries:
            if entry.has_own_rule or entry.is_script:
                self.read_directly.update(entry.parameters.values())
            not_looked_at = {*REGISTRIES, *entry.left_out}  # the entry has their positions already
            for key, value in entry.attributes.items():
                if type(value) in ATOMIC or (type(value) in TABLES and not value) or key in not_looked_at:
                    continue
                owner = entry.method_owner(key, value)
                items = reached(value) if owner is None else reached_by_method(owner)
                if compiled_over(items, tree_ids):
                    raise RuntimeError(
                        f"cannot replicate {dotted(entry.name, key)!r}: it was compiled with torch.compile, and the "
                        "compiled code computes with the weights of the source. Compile modules of the tree instead: "
                        "by torch.compile(module) or module.compile()"
                    )
                ids = {id(item) for item in items}
                if not ids.isdisjoint(tree_ids):
                    entry.references[key] = owner is not None
                    self.has_references = True
                    self.read_directly.update(tensors[tensor_id] for tensor_id in ids & tensors.keys())
                    # Tensors refer to nothing. An attribute that refers to a module may close a cycle.
                    if not ids.isdisjoint(modules):
                        self.cycles = self.cycles or ReferenceCycles()

    def _find_shared_storages(self) -> None:
        """Adds parameters that share storage with another tensor: a write to the other tensor changes the parameter."""
        first: dict[int, int] = {}
        parameters = set(self.parameters)
        for i, tensor in enumerate(self.tensors):
            if not has_strides(tensor) or is_wrapper(tensor):  # wrappers have no memory of their own
                continue
            address = tensor.untyped_storage().data_ptr()
            if address and (other := first.setdefault(address, i)) != i:
                self.read_directly |= parameters & {i, other}


def names_of(plan: ModulePlan) -> dict[int, str]:
    """Returns the name of each tensor by its position. A tied tensor has the first of its names."""
    names: dict[int, str] = {}
    for entry in plan.entries:
        for key, position in (*entry.parameters.items(), *entry.buffers.items()):
            names.setdefault(position, dotted(entry.name, key))
    return names


def instance_slots(cls: type) -> tuple[str, ...]:
    """Returns the names of attributes that instances keep in ``__slots__`` instead of their ``__dict__``."""
    return tuple(_slotnames(cls))  # as `copy` and `pickle` find them


def original_class(cls: type) -> type[Any]:
    """Returns the class that a module had before a form changed its class to ``cls``, or else ``cls``."""
    original: type[Any] = getattr(cls, ORIGINAL_CLASS, cls)
    return original


def dotted(module_name: str, key: str) -> str:
    return f"{module_name}.{key}" if module_name else key


def _check_replicatable(entries: list[ModuleEntry], allowed: type | None) -> None:
    """Raises ``RuntimeError`` if the tree cannot be replicated. Notes in each entry how the module is compiled."""
    for entry in entries:
        module = entry.module
        refusal = getattr(entry.cls, REFUSAL, None)
        if refusal is not None and not (allowed is not None and issubclass(entry.cls, allowed)):
            raise RuntimeError(refusal(module, entry.name))
        if entry.is_script:
            for name, child in module.named_modules():
                if not isinstance(child, torch.jit.ScriptModule):
                    raise RuntimeError(
                        f"cannot replicate the ScriptModule {entry.name or 'at the root'!r}: it holds the Python "
                        f"module {name!r} ({type(child).__name__}). Script that one too, or keep it outside"
                    )
            continue
        try:
            entry.compiled = compiled_here(module, (other.compiled for other in entries))
        except LookupError:
            raise RuntimeError(
                f"cannot replicate {entry.name or type(module).__name__!r}: it was compiled, and torch does not say "
                "how, so its replicas cannot be compiled likewise. Wrap the module that is not compiled, and pass "
                "compile=... to the wrapper"
            ) from None


def check_placement(
    module: nn.Module,
    root: torch.device,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[int] = (),
) -> None:
    """Checks every parameter and buffer, except ``ignored_parameters`` (ids) and tensors of ``ignored_modules``.

    For a module that runs without replicas. Where replicas are made, `KeptReplicas` checks the tensors of their plan.
    """
    # Not by `named_modules`, which takes three times as long: this runs at each call.
    seen, modules = {*map(id, ignored_modules)}, [module]
    for submodule in modules:
        if id(submodule) not in seen:
            seen.add(id(submodule))
            tensors = (*submodule._parameters.values(), *submodule._buffers.values())
            check_tensors(
                (each for each in tensors if each is not None and id(each) not in ignored_parameters), root, module
            )
            modules += (child for child in submodule._modules.values() if child is not None)


def check_tensors(tensors: Iterable[Tensor], root: torch.device, module: nn.Module) -> None:
    """Checks some of the tensors of ``module``."""
    elsewhere = next((tensor for tensor in tensors if tensor.device != root), None)
    if elsewhere is None:
        return
    named = ("parameter", module.named_parameters()), ("buffer", module.named_buffers())
    name = next(f"{kind} {name!r}" for kind, each in named for name, tensor in each if tensor is elsewhere)
    # People search for torch.nn.DataParallel's message, so this one begins in the same words.
    first_sentence = (
        f"module must have its parameters and buffers on device {root} (device_ids[0]) but found one of them "
        f"on device: {elsewhere.device}. "
    )
    if elsewhere.device.type == "meta":
        raise RuntimeError(
            f"{first_sentence}It is {name}, which has no values there; materialise it first: call "
            f"module.to_empty(device={str(root)!r}), then load a state dict or initialise all parameters and buffers"
        )
    raise RuntimeError(f"{first_sentence}It is {name}; call module.to({str(root)!r}) before the forward")


# ---- code with devices as constants ----------------------------------------------------------------------------------

_constants: weakref.WeakKeyDictionary[Any, dict[torch.device, str]] = weakref.WeakKeyDictionary()
"""For each ScriptModule, and each ``forward`` that torch.fx has generated, the devices of the constants in its code,
with a description of one such constant. torch.fx makes a new ``forward`` when a graph is recompiled."""


def refuse_constants(plan: ModulePlan, slots: Sequence[torch.device]) -> None:
    """Tracing and exporting bake the device of the example inputs, and tensors on it, into the code."""
    inside: set[int] = set()  # ids of modules whose code has been checked as part of their parent's
    for entry in plan.entries:
        if id(entry.module) in inside or not (entry.is_script or isinstance(entry.module, torch.fx.GraphModule)):
            continue
        key: Any = entry.module if entry.is_script else entry.cls.forward
        if entry.is_script:
            inside.update(map(id, entry.module.modules()))
        if key not in _constants:
            found = _constants_of_script(entry.module) if entry.is_script else _constants_of_graph(entry.module)
            _constants[key] = dict(reversed([*found]))
        for device, constant in _constants[key].items():
            other = next((slot for slot in slots if slot != device), None)
            if other is not None and device != CPU:
                what = "ScriptModule" if entry.is_script else "graph"
                raise RuntimeError(
                    f"cannot replicate the {what} {entry.name or 'at the root'!r} to {other}: {constant} on {device} "
                    "is a constant of its code, because it was traced, frozen or exported there. Wrap the module of "
                    f"which the {what} was made, or make the tensor a buffer of that module before"
                )


def _constants_of_script(module: Any) -> Iterator[tuple[torch.device, str]]:
    graph = getattr(module, "inlined_graph", None)  # ``None`` for a module without forward
    for node in [] if graph is None else graph.findAllNodes("prim::Constant"):
        kind = node.output().type().kind()
        if kind == "TensorType" and node.hasAttribute("value"):
            yield node.t("value").device, "a tensor"
        elif kind == "DeviceObjType" and node.hasAttribute("value"):
            yield torch.device(node.s("value")), "the name of a device"


def _constants_of_graph(module: Any) -> Iterator[tuple[torch.device, str]]:
    for node in module.graph.nodes:
        for leaf in _torch.pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, torch.device):
                yield leaf, f"the name of a device in {node.name!r}"
    for node in module.graph.find_nodes(op="get_attr"):
        holder, _, key = str(node.target).rpartition(".")
        value = vars(module.get_submodule(holder)).get(key)  # a parameter or buffer is in a registry
        if isinstance(value, Tensor):
            yield value.device, f"the tensor {node.target!r}"
