"""A module tree seen once: its tensors, children, ties, what hangs on its instances, classes with rules of their own.

A plan is made at the start of a call from the tree as it is then, and read once for every replica, so that making a
replica asks the source nothing. It also says which trees cannot be replicated, and why. It copies nothing;
``replicate`` and the rooms that keep replicas use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.comm.buckets import PLAIN_TYPES
from dataparallel.modules.references import ATOMIC, behind_proxy, compiled_over, reached

__all__ = [
    "REFUSAL",
    "STANDS_FOR",
    "ModuleEntry",
    "ModulePlan",
    "StandsFor",
    "check_replicatable",
    "dotted",
    "instance_slots",
]

TABLES = frozenset({dict, OrderedDict, list, tuple, set})
"""Types of containers that lead nowhere while they are empty."""

NOTHING = -1
"""The position of ``None``."""

MADE = "_dataparallel_made"
"""Attribute of a replica's root: objects made for its attributes. It belongs to that replica only."""

STANDS_FOR = "_dataparallel_stands_for"
"""Attribute of a root that stands for another module: a `StandsFor`. Replicas do not have it."""

REFUSAL = "_dataparallel_refusal"
"""Method of modules of which there can be no replicas: called with the name in the tree, it returns a sentence."""


@dataclass(frozen=True, eq=False)
class StandsFor:
    """What has to be known of a root that stands for a module, with the same children and tensors.

    ``source`` is that module's id: what refers to it refers to the replica. Modules in ``ignored_modules`` below the
    root and parameters whose ids are in ``ignored_parameters`` are handed to every replica as they are.
    """

    source: int
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_parameters: frozenset[int] = frozenset()


class ModuleEntry:
    """One module: positions of its tensors and children in the plan, and attributes that refer to the tree.

    A name that is registered for ``None`` has the position `NOTHING`; positions below count from the end of
    ``[*plan.as_they_are, None]``. ``attributes`` is a copy of its ``__dict__``,
    registries included; ``proxied`` names children that are weak proxies of a module.
    """

    __slots__ = (
        "attributes",
        "buffers",
        "children",
        "cls",
        "has_hooks",
        "has_own_rule",
        "is_script",
        "module",
        "name",
        "parameters",
        "proxied",
        "references",
        "slots",
    )

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.cls = type(module)
        self.attributes = vars(module).copy()
        self.attributes.pop(MADE, None)
        self.parameters: dict[str, int] = {}
        self.buffers: dict[str, int] = {}
        self.children: dict[str, int] = {}
        self.references: list[str] = []
        self.proxied: list[str] = []
        self.slots: tuple[str, ...] = ()
        self.has_hooks = any(map(self.attributes.get, HOOK_TABLES))
        self.has_own_rule = False
        self.is_script = isinstance(module, torch.jit.ScriptModule)


@dataclass
class ModulePlan:
    """A tree: each module and each tensor once, however often it is used. Position 0 is the root.

    ``parameters`` has the positions of those tensors that are parameters; the others are buffers. ``as_they_are`` are
    the modules and parameters that are handed to every replica by reference, ``source`` is the id of the module that
    the root stands for: its own, unless it has a `StandsFor`.
    """

    entries: list[ModuleEntry]
    tensors: list[Tensor]
    parameters: list[int]
    source: int
    ignored_parameters: frozenset[int] = frozenset()
    as_they_are: list[Any] = field(default_factory=list)
    has_references: bool = False
    may_hold_cycles: bool = False

    @classmethod
    def of(cls, network: nn.Module) -> ModulePlan:
        """The plan of ``network`` as it is now.

        Raises:
            RuntimeError: the tree cannot be replicated; the message names the module or parameter.
        """
        stands_for: StandsFor = vars(network).get(STANDS_FOR) or StandsFor(id(network))
        ignored = stands_for.ignored_modules
        entries = [ModuleEntry(module, name) for name, module in network.named_modules(memo={*ignored})]
        check_replicatable(entries)
        position = {id(entry.module): i for i, entry in enumerate(entries)}
        plan = cls(entries, [], [], stands_for.source, stands_for.ignored_parameters)
        position.update((id(module), plan._handed_over(module)) for module in ignored)
        found: dict[int, int] = {}
        # Parameters first: a tensor that is both a parameter and a buffer is a parameter.
        for entry in entries:
            for key, parameter in entry.module._parameters.items():
                entry.parameters[key] = plan._add(parameter, True, found, entry, key)
        for entry in entries:
            for key, buffer in entry.module._buffers.items():
                entry.buffers[key] = plan._add(buffer, False, found, entry, key)
            for key, child in entry.module._modules.items():
                at = NOTHING if child is None else position.get(id(child))
                if at is None:
                    at = position[id(behind_proxy(child))]
                    entry.proxied.append(key)
                entry.children[key] = at
        modules = {id(entry.module) for entry in entries} | {plan.source}
        plan._find_references(modules, found.keys() - plan.ignored_parameters)
        return plan

    @property
    def is_plain(self) -> bool:
        """Whether replicas differ from the source in nothing but tensors and children, so that no rule is needed.

        What they get as it is makes no difference.
        """
        return not self.has_references and not any(
            entry.slots or entry.has_own_rule or entry.proxied or entry.has_hooks for entry in self.entries
        )

    def _add(
        self, tensor: Tensor | None, is_parameter: bool, found: dict[int, int], entry: ModuleEntry, key: str
    ) -> int:
        if tensor is None:
            return NOTHING
        if id(tensor) in found:
            return found[id(tensor)]
        if id(tensor) in self.ignored_parameters:
            found[id(tensor)] = self._handed_over(tensor)
        else:
            if type(tensor) not in PLAIN_TYPES and is_lazy(tensor):
                raise RuntimeError(
                    f"{dotted(entry.name, key)} is not initialised yet; run the module once on a sample batch "
                    "before it is replicated"
                )
            found[id(tensor)] = len(self.tensors)
            if is_parameter:
                self.parameters.append(len(self.tensors))
            self.tensors.append(tensor)
        return found[id(tensor)]

    def _handed_over(self, item: nn.Module | Tensor) -> int:
        """The position of what every replica gets as it is."""
        self.as_they_are.insert(0, item)
        return NOTHING - len(self.as_they_are)

    def _find_references(self, modules: Set[int], tensors: Set[int]) -> None:
        known = modules | tensors
        rules: dict[type, tuple[tuple[str, ...], bool]] = {}
        for entry in self.entries:
            cls = entry.cls
            if cls not in rules:
                has_own_rule = cls._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel
                rules[cls] = instance_slots(cls), has_own_rule
            entry.slots, entry.has_own_rule = rules[cls]
            # Most of what a module holds is atomic or an empty table; this line is run for every attribute there is.
            held = [
                (key, value)
                for key, value in entry.attributes.items()
                if type(value) not in ATOMIC and (type(value) not in TABLES or value)
            ]
            for key, value in held:
                if key in REGISTRIES:  # they are read above
                    continue
                items = reached(value)
                if compiled_over(items, known):
                    raise _compiled(dotted(entry.name, key))
                ids = {id(item) for item in items}
                if not ids.isdisjoint(known):
                    entry.references.append(key)
                    self.has_references = True
                    # Tensors lead nowhere; a module's attribute that leads to a module may lead back to it.
                    self.may_hold_cycles |= not ids.isdisjoint(modules)


def instance_slots(cls: type) -> tuple[str, ...]:
    """Attributes that instances keep in ``__slots__`` and not in their ``__dict__``."""
    names = []
    for base in cls.__mro__:
        declared = vars(base).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(names)


def dotted(module_name: str, key: str) -> str:
    """The name of what the module called ``module_name`` (``""``: the root) holds as ``key``."""
    return f"{module_name}.{key}" if module_name else key


def check_replicatable(entries: list[ModuleEntry]) -> None:
    """Refuses trees whose replicas would not be copies.

    Raises:
        RuntimeError: a ScriptModule holds a Python module, whose code TorchScript keeps; a module is compiled, and its
            compiled code holds the source's weights; or its class says that there can be none. The message names it.
    """
    known = {id(entry.module) for entry in entries}
    for entry in entries:
        module = entry.module
        refusal = getattr(entry.cls, REFUSAL, None)
        if refusal is not None:
            raise RuntimeError(refusal(module, entry.name))
        if entry.is_script:
            for name, child in module.named_modules():
                if not isinstance(child, torch.jit.ScriptModule):
                    raise RuntimeError(
                        f"cannot replicate the ScriptModule {entry.name or 'at the root'!r}: it holds the Python "
                        f"module {name!r} ({type(child).__name__}). Script that one too, or keep it outside"
                    )
        elif compiled_over([module], known) or module._compiled_call_impl is not None:
            raise _compiled(entry.name or type(module).__name__)


def _compiled(name: str) -> RuntimeError:
    return RuntimeError(
        f"cannot replicate {name!r}: it was compiled with torch.compile, and what was compiled computes with the "
        "weights of the source. Wrap the module that is not compiled"
    )
