"""Builds one replica of a module tree, from a plan and the replica's tensors."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel._torch import HOOK_FLAGS, HOOK_TABLES, OWN_HOOK_TABLES
from dataparallel.comm.streams.arrivals import ExpectedArrivals
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.compiled.calls import CompiledCall
from dataparallel.replicas.plan import (
    HAS_COMPILED,
    NONE_POSITION,
    TWIN_INFO,
    UNIT_MODULE,
    ModuleEntry,
    ModulePlan,
    dotted,
    instance_slots,
    original_class,
)
from dataparallel.replicas.references import CYCLES, Rebinding


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector while replicas are made.

    They are thousands of objects that are all in use, and it would walk through them again and again in vain. The
    switch is for the whole process: garbage of other threads waits for these milliseconds too.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def build_replica(
    plan: ModulePlan, tensors: list[Tensor], record: bool, expected: ExpectedArrivals | None = None
) -> Any:
    """``record``: ``tensors`` are outputs of a recorded broadcast. ``expected``: which may still be on their way."""
    make_parameters(plan, tensors, ReplicaParameter if record else nn.Parameter)
    tensor_table = plan.table(tensors)
    flags: dict[str, Any] = {name: OrderedDict() for name in HOOK_FLAGS}  # shared: each hook has its own number
    modules = [_by_its_own_rule(entry) if entry.has_own_rule else bare_module(entry.cls) for entry in plan.entries]
    module_table = plan.table(modules)
    for entry, module in zip(plan.entries, modules, strict=True):
        if entry.is_script:
            _fill_script(entry, module, module_table, tensor_table)
        else:
            own = _own_attributes(entry, module, flags)
            _add_registries(entry, own, module_table, tensor_table, expected)
            give_attributes(module, own, entry.module, entry.slots)
    if plan.has_references:
        _rebind_attributes(plan, modules, tensors)
    call_compiled(plan, modules, tensors[0].device if tensors else None)
    _give_units(modules)
    return modules[0]


def call_compiled(plan: ModulePlan, modules: list[nn.Module], device: torch.device | None) -> None:
    table = plan.table(modules)
    for entry, module in zip(plan.entries, modules, strict=True):
        if entry.compiled is None:
            continue
        vars(modules[0])[HAS_COMPILED] = True
        functions, attribute, child, _ = entry.compiled
        called = module if child is None else table[entry.children[child]]
        is_managed = child is None and original_class(entry.cls) is not entry.cls
        vars(module)[attribute] = CompiledCall(functions, called, device, _as_written if is_managed else None)


def _as_written(module: Any, attributes: dict[str, Any] | None = None) -> nn.Module:
    """What the compiler traces: a form's class is about what happens around a call, and that is not to be compiled."""
    cls = original_class(type(module))
    return give_attributes(
        bare_module(cls), vars(module) if attributes is None else attributes, module, instance_slots(cls)
    )


def _give_units(modules: list[nn.Module]) -> None:
    """Gives the modules of a replica their own `UNIT_MODULE`, which knows where the replica's registries are."""
    units = [own for own in map(vars, modules) if UNIT_MODULE in own]
    for own in units:
        own[UNIT_MODULE] = own[UNIT_MODULE].for_replica()
    for own in units:
        own[UNIT_MODULE].find_registries(modules)


def make_parameters(plan: ModulePlan, tensors: list[Tensor], cls: type[Tensor]) -> None:
    for i in plan.parameters:
        if type(tensors[i]) is Tensor:
            # The object is still the output of the broadcast, with its graph; only the Python class changes.
            tensors[i].__class__ = cls


def _rebind_attributes(plan: ModulePlan, modules: list[nn.Module], tensors: list[Tensor]) -> None:
    table: dict[int, Any] = {id(entry.module): module for entry, module in zip(plan.entries, modules, strict=True)}
    table[plan.source_id] = modules[0]
    table.update({id(source): tensor for source, tensor in zip(plan.tensors, tensors, strict=True)})
    rebinding = Rebinding(table)
    for entry, module in zip(plan.entries, modules, strict=True):
        attributes = vars(module)
        for key, is_method in entry.references.items():
            if key in attributes:
                try:
                    rebind = rebinding.rebound_method if is_method else rebinding.rebound
                    attributes[key] = rebind(attributes[key])
                except Exception as error:
                    raise RuntimeError(
                        f"cannot replicate {dotted(entry.name, key)!r}: it refers to modules of the tree, and another "
                        f"{type(attributes[key]).__name__} that refers to their replicas could not be built"
                    ) from error
        if plan.cycles is not None and entry.references:
            plan.cycles.add(module, [*entry.references])
    if plan.cycles is not None:
        vars(modules[0])[CYCLES] = plan.cycles


def bare_module(cls: type[nn.Module]) -> nn.Module:
    return object.__new__(cls)  # `cls.__new__` may require arguments


def give_attributes(module: nn.Module, own: dict[str, Any], source: nn.Module, slots: Sequence[str]) -> nn.Module:
    """Makes ``own`` the ``__dict__`` of ``module``, and copies the attributes that ``source`` has in ``slots``."""
    # Past `Module.__setattr__`, which would look for parameters in it.
    object.__setattr__(module, "__dict__", own)
    for name in slots:
        if hasattr(source, name):
            setattr(module, name, getattr(source, name))
    return module


def _by_its_own_rule(entry: ModuleEntry) -> nn.Module:
    """The copy that the class's ``_replicate_for_data_parallel`` makes of the source."""
    is_managed = original_class(entry.cls) is not entry.cls
    source = _as_written(entry.module, entry.attributes.copy()) if is_managed else entry.module
    replica: nn.Module = source._replicate_for_data_parallel()
    if is_managed and type(replica) is type(source):
        object.__setattr__(replica, "__class__", entry.cls)
    own = vars(replica)
    # Attributes that its rule leaves out are added, except methods of a ScriptModule, which are bound to the source.
    left_out = entry.attributes.keys() - own.keys()
    own.update(
        {key: entry.attributes[key] for key in left_out if not isinstance(entry.attributes[key], _torch.ScriptMethod)}
    )
    own.pop(CYCLES, None)
    return replica


def _own_attributes(entry: ModuleEntry, module: nn.Module, flags: dict[str, Any]) -> dict[str, Any]:
    """Without hooks, modules of one replica share ``flags``, the tables of `HOOK_FLAGS`."""
    if entry.has_own_rule:
        own = vars(module)
        for name in (TWIN_INFO, *entry.left_out):
            own.pop(name, None)
        own["_is_replica"] = True
    else:
        own = entry.copied.copy()
    own["_non_persistent_buffers_set"] = entry.attributes["_non_persistent_buffers_set"].copy()
    if entry.has_hooks:
        for name in HOOK_TABLES:
            own[name] = entry.attributes[name].copy()
    else:
        for name in OWN_HOOK_TABLES:
            own[name] = OrderedDict()
        own.update(flags)
    return own


def _add_registries(
    entry: ModuleEntry, own: dict[str, Any], modules: list[Any], tensors: list[Any], expected: ExpectedArrivals | None
) -> None:
    """Puts the replica's tensors and children where the source has its own. Both lists end with ``None``."""
    own["_parameters"] = {key: tensors[i] for key, i in entry.parameters.items()} if entry.parameters else {}
    if expected is not None:
        registry = ParameterRegistry(entry.parameters, expected)
        registry.update(own["_parameters"])
        own["_parameters"] = registry
    own["_buffers"] = {key: tensors[i] for key, i in entry.buffers.items()} if entry.buffers else {}
    own["_modules"] = children = {key: modules[i] for key, i in entry.children.items()} if entry.children else {}
    for key in entry.proxied:
        children[key] = weakref.proxy(children[key])


def _fill_script(entry: ModuleEntry, replica: nn.Module, modules: list[Any], tensors: list[Any]) -> None:
    """Fills a ScriptModule, whose registries are views of a C++ object that is written through attributes."""
    for key, i in (*entry.parameters.items(), *entry.buffers.items()):
        if i != NONE_POSITION:
            setattr(replica, key, tensors[i])
    for key, i in entry.children.items():
        replica._modules[key] = modules[i]


# ---- registries whose lookups wait -----------------------------------------------------------------------------------


_get = dict.__getitem__
_current_stream = _torch.current_stream_at


class ParameterRegistry(dict[str, Any]):
    """The parameters of one module of a replica, by name.

    ``Module.__getattr__`` looks a parameter up as ``_parameters[name]``, and that makes the current stream of the
    replica's device wait for the parameter's bucket, once for each stream and call. To use it on another stream, make
    that stream current before the lookup, or let it wait for this one after the lookup. Every other way to the values
    waits for all parameters of the module; only dict's own methods, called as ``dict.values(registry)``, do not wait.
    Copies and pickles are plain dicts.
    """

    __slots__ = ("_expected", "_positions")

    def __init__(self, positions: Mapping[str, int], expected: ExpectedArrivals) -> None:
        super().__init__()
        self._positions, self._expected = positions, expected

    def __getitem__(self, name: str) -> Any:
        if (position := self._positions.get(name)) is not None:
            self._wait_for(position)
        return _get(self, name)

    def _wait_for(self, position: int) -> None:
        arrival = self._expected.by_position[position]
        if arrival is not None and (stream := _current_stream(self._expected.device_index)) not in arrival.waited:
            arrival.make_wait(stream)

    def wait_for_all(self) -> None:
        for position in self._positions.values():
            self._wait_for(position)

    def __iter__(self) -> Iterator[str]:
        # ``dict(registry)`` and ``**registry`` look every value up because this method exists: see `PyDict_Merge`.
        self.wait_for_all()
        return super().__iter__()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)


def _after_the_wait(name: str) -> Any:
    method = getattr(dict, name)

    def waiting(self: ParameterRegistry, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_all()
        return method(self, *args, **kwargs)

    waiting.__name__, waiting.__doc__ = name, method.__doc__
    return waiting


for _name in (
    *("get", "items", "values", "copy", "pop", "popitem", "setdefault"),
    *("__eq__", "__ne__", "__or__", "__ror__", "__repr__"),
):
    setattr(ParameterRegistry, _name, _after_the_wait(_name))
