"""`ManagedModule` is the base class that a form (``forms.form``) gives to a module; its methods run on the slots.

`SlotsMethod` is such a method, `StateOnSlots` makes the calls, and replicas are made from a `Twin` of the module.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.fx
from torch import nn

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.batches.gather import Pad, checked_pad
from dataparallel.call.engine import Method, ReplicaMaker, run_on_slots, run_without_slots
from dataparallel.call.options import CallOptions
from dataparallel.devices import resolve_slots
from dataparallel.replicas.build import bare_module, give_attributes
from dataparallel.replicas.plan import (
    FORM_ATTRIBUTE,
    TWIN_INFO,
    UNIT_MODULE,
    TwinInfo,
    dotted,
    instance_slots,
    original_class,
)

if TYPE_CHECKING:
    from dataparallel.machines.peer_rounds import PeerCall, PeerRounds


class ManagedModule:
    """The first base of every class that a form gives to a module.

    A managed module cannot be copied or pickled. Calling its class makes an instance of the original class: a slice of
    a managed ``Sequential`` is a plain ``Sequential``, for example.
    """

    # Parts of error messages: why there is no copy, what to do instead, and what to do instead of wrapping the module.
    _why_no_copy = "it stands for replicas on several devices"
    _instead_of_a_copy = "Save or copy its state_dict() and load that into a new module with load_state_dict()"
    _instead_of_a_wrapper = "apply one form, once, to the outermost module only"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a module that ``__init__`` turns into one of the original class. Some programs call both themselves."""
        original = original_class(cls)
        made = original.__new__(original, *args, **kwargs)
        if type(made) is not original:
            return original(*args, **kwargs)
        object.__setattr__(made, "__class__", cls)  # otherwise Python calls no ``__init__``
        return made

    def __copy__(self) -> NoReturn:
        self._refuse("copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        with names_explained(self, state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def _dataparallel_refusal(self, path: str) -> str:
        """The message of the error that a plan raises if its tree has this module at ``path``; ``""`` is the root."""
        form_name, class_name = name_of_form(self), original_class(type(self)).__name__
        what = f"{path!r}, a {class_name}" if path else f"the {class_name}"
        return (
            f"cannot replicate {what}: it is managed by `{form_name}` already, which runs replicas of it. Put no "
            f"wrapper around it or its parents; {self._instead_of_a_wrapper}"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        # Other libraries call this, and know no path.
        raise RuntimeError(self._dataparallel_refusal(""))

    def _refuse(self, action: str) -> NoReturn:
        raise TypeError(
            f"cannot {action} a module that is managed by `{name_of_form(self)}`: {self._why_no_copy}. "
            f"{self._instead_of_a_copy}"
        )


class Twin:
    """Holds the twin of one module: another object that replicas are made from, the same one at each call."""

    def __init__(self, cls: type[nn.Module], info: TwinInfo) -> None:
        self.module = bare_module(cls)
        self._info = info
        self._no_hooks: dict[str, Any] = {name: OrderedDict() for name in _torch.HOOK_TABLES}

    def update(self, source: nn.Module, method: str, left_out: str = "") -> nn.Module:
        """Gives the twin the current attributes of ``source``, and so the same children and tensors.

        Until its replicas are made no other thread may update the twin.

        For ``forward`` the twin has no hooks: the module's hooks run around the call on the whole batch. Another method
        may call the replica itself, and then the hooks run in the replica.
        """
        hooks = self._no_hooks if method == "forward" else {}
        attributes = {**vars(source), **hooks, TWIN_INFO: self._info}
        attributes.pop(left_out, None)
        return give_attributes(self.module, attributes, source, instance_slots(type(self.module)))


def original_attribute(module: Any, name: str) -> Any:
    attributes = vars(module)
    return attributes[name] if name in attributes else getattr(super(ManagedModule, module), name)


def own_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and module for each module in these trees, once, except subtrees whose root is managed separately.

    ``modules`` themselves come too, managed or not. A name is the path in the tree; if there are several trees, it
    begins with the tree's number.
    """
    roots = {id(module) for module in modules}
    seen: set[int] = set()
    waiting = [(str(i) if len(modules) > 1 else "", module) for i, module in reversed([*enumerate(modules)])]
    while waiting:  # depth first, in the order of `Module.named_modules`
        name, module = waiting.pop()
        if id(module) in seen or (FORM_ATTRIBUTE in vars(module) and id(module) not in roots):
            continue
        seen.add(id(module))
        yield name, module
        children = [(dotted(name, key), child) for key, child in module._modules.items() if child is not None]
        waiting += reversed(children)


def own_parameters(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of `own_modules` with their names. A parameter with several names comes once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, module in own_modules(modules):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (dotted(name, key), parameter))
    return [*found.values()]


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def check_runs(module: nn.Module, do: str) -> None:
    """Checks that a call runs a ``forward`` of the module, and no wrapper's. ``do``: what the form does, for errors."""
    name = type(module).__name__
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"the module is wrapped already, in a {name}; {do} its .module instead: forms do not nest")
    if not has_forward(module):
        raise TypeError(
            f"a {name} has no forward of its own, so there is no call that could run on the slots; {do} each of its "
            "modules, or the module that holds it"
        )


@_torch.leave_alone
def form_and_state(module: Any) -> tuple[Any, Any]:
    found: tuple[Any, Any] = vars(module).get(FORM_ATTRIBUTE, (None, None))
    return found


def name_of_form(module: Any) -> str:
    form, _ = form_and_state(module)
    return "a composable form" if form is None else form.__name__


# ---- methods that run on the slots -----------------------------------------------------------------------------------


def state_of(module: Any) -> Any:
    """Returns the state of a managed module. A copy of one has none."""
    form, state = form_and_state(module)
    if form is None:
        raise RuntimeError(
            f"this {type(module).__name__} was not made by a composable form, but copied from one that was"
        )
    return state


class StateOnSlots(ReplicaMaker):
    """The state that a form keeps for modules whose methods run on slots. It refers to the modules weakly.

    Attributes:
        options: the options of the calls, which may be assigned between calls.
        slots: where replicas run; empty if there is no accelerator.
        methods: names of methods that run on replicas, each with its own ``pad``, if it has one.
        peers: makes the calls' collectives across machines, if there are several machines.
    """

    peers: PeerRounds | None = None

    def __init__(self, modules: Sequence[nn.Module], options: CallOptions) -> None:
        self.options = options
        self.slots = resolve_slots(options.slots) if options.slots else []
        self.methods: dict[str, Pad] = {"forward": None}
        self._modules = [weakref.ref(module) for module in modules]

    def modules(self) -> list[nn.Module]:
        return [*map(_resolve, self._modules)]

    def source(self) -> nn.Module:
        return _resolve(self._modules[0])

    def spans_machines(self, method: Method) -> AbstractContextManager[PeerCall | None]:
        if self.peers is None:
            return nullcontext()
        is_recorded = torch.is_grad_enabled()
        mode = method.name, is_recorded, self.source().training
        return self.peers.calling(mode, functools.partial(self.others_wait, is_recorded))

    def others_wait(self, is_recorded: bool) -> bool:
        """True if other machines would wait for a call that has failed here: they are told, and raise too."""
        return False


def _resolve(reference: weakref.ref[nn.Module]) -> nn.Module:
    module = reference()
    if module is None:
        raise RuntimeError("the module of this state is gone")
    return module


class SlotsMethod:
    """A descriptor for a method that runs on the slots. It gives a function or a method with the original signature.

    Python finds a data descriptor before an attribute of the instance. So ``m.forward = f`` stores ``f`` in the
    instance's ``__dict__``, where the replicas find it, and the call is still split.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # The keys are ids of functions. A stand-in keeps its function alive, so nothing else gets the id meanwhile.
        self._stand_ins: weakref.WeakValueDictionary[int, FunctionType] = weakref.WeakValueDictionary()
        self._last: FunctionType | None = None  # held, as a model is called again and again

    @_torch.leave_alone
    def __get__(self, module: Any, cls: type) -> Any:
        if module is None:
            if not issubclass(cls, nn.Module):
                return self  # the class is no module's
            original_cls = original_class(cls)
            if isinstance(inspect.getattr_static(original_cls, self._name), FunctionType):
                return self._stand_in(getattr(original_cls, self._name))
            return getattr(original_cls, self._name)  # for example a static method, which takes no module
        original, state = original_attribute(module, self._name), state_of(module)
        if self._name not in state.methods:
            return original
        if torch.compiler.is_dynamo_compiling():  # the compiler needs no signature
            return functools.partial(self._call, module, original)
        if isinstance(original, MethodType) and original.__self__ is module:
            return MethodType(self._stand_in(original.__func__), module)
        # A lambda on the instance, a partial, a method of another object: all are called without the module. The user
        # may store what is returned, or a wrapper around it, on the module. Then replicas hold it too, and there
        # `module` and `original` are the replica's.
        return functools.update_wrapper(functools.partial(self._call, module, original), original)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if self._name not in vars(module):
            raise AttributeError(self._name)
        del vars(module)[self._name]

    def _stand_in(self, method: Any) -> FunctionType:
        """Returns a function with the signature of ``method``, the same one while somebody holds it.

        So two bound methods that were made one after the other are equal while the first is held, as with any method:
        transformers, accelerate and Lightning compare them, look for ``__func__``, and read ``inspect.signature``.
        """

        def on_slots(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._call(module, functools.partial(method, module), *args, **kwargs)

        if (made := self._stand_ins.get(id(method))) is None:
            made = cast(FunctionType, functools.update_wrapper(_torch.not_compiled(on_slots), method))
            made = self._stand_ins.setdefault(id(method), made)  # several threads may ask first at once
        if method.__closure__ is None:  # else it would keep other objects alive
            self._last = made
        return made

    @_torch.not_compiled
    def _call(self, module: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Splits the call, except in a replica, or while ``torch.fx`` records it and there are no tensors to split.

        In a replica of `fully_shard` the module's unit gathers its parameters around the call.
        """
        _, state = form_and_state(module)
        if state is None or self._name not in state.methods:
            return original(*args, **kwargs)
        if any(isinstance(value, torch.fx.Proxy) for value in (*args, *kwargs.values())):
            return original(*args, **kwargs)
        if (unit := vars(module).get(UNIT_MODULE)) is not None:
            # The slots call `forward` of the outermost replica, because hooks run around the call on the whole batch.
            is_outermost = unit.is_root and not unit.is_running and self._name == "forward"
            compiled = module._compiled_call_impl if is_outermost else None
            return unit.run(compiled or original, *args, **kwargs)
        method = Method(self._name, original, state.methods[self._name])
        if not state.slots:
            return run_without_slots(state, method, args, kwargs)
        return run_on_slots(state, method, args, kwargs)


def register_forward_method(module: nn.Module, name: str, *, pad: Pad = None) -> None:
    """Makes the method ``name`` run as ``forward`` does: scatters its arguments, gathers the outputs of replicas.

    Args:
        module: a module that has a form. In a fully sharded tree the method gathers the parameters of its unit first.
        name: the name of one of its methods.
        pad: fills outputs of the method that differ between replicas, as for `dataparallel.DataParallel`; default: that
            of the form. Registering a method again replaces it.

    Raises:
        TypeError: ``module`` has no form, or its attribute of this name cannot be called, or is a generator function or
            a coroutine function; ``name`` is no string; ``pad`` is no number and no dict of numbers.
        AttributeError: ``module`` has no attribute of this name.
    """
    if not isinstance(module, ManagedModule):
        raise TypeError(
            f"this {type(module).__name__} is not replicated; call replicate(module) before, or fully_shard(module)"
        )
    class_name, name = original_class(type(module)).__name__, checked("name", name, str)
    try:
        original = original_attribute(module, name)
    except AttributeError:
        raise AttributeError(f"a {class_name} has no method {name!r}") from None
    if not callable(original):
        raise TypeError(f"{name!r} of this {class_name} is no method")
    tests = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_one(original) for is_one in tests):
        raise TypeError(
            f"{name!r} of this {class_name} is a generator function or a coroutine function: its code would run when "
            "the call of the replicas has ended. Register a method that returns the values"
        )
    pad = checked_pad(pad)
    cls = type(module)
    if name != "forward" and name not in vars(cls):
        setattr(cls, name, SlotsMethod(name))
    state_of(module).methods[name] = pad


@contextmanager
def names_explained(model: Any, state_dict: Any) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not (hint := hint_for_names(model, state_dict)):
            raise
        raise RuntimeError(f"{error}\n\t{hint}") from None


def hint_for_names(model: nn.Module, state_dict: Any) -> str:
    """Returns what to do about a state dict with the names of another model; ``""`` if nothing is known."""
    if not isinstance(state_dict, Mapping):
        return ""
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    own = {name for name, _ in every}
    names = [name for name in state_dict if isinstance(name, str)]
    if isinstance(model, nn.DataParallel) and own & {f"module.{name}" for name in names}:
        return (
            "These are the names of the module without its wrapper: write model.module.load_state_dict(state_dict), "
            "which loads what model.module.state_dict() saves"
        )
    for prefix in ("module.", "_orig_mod."):
        if own & {name.removeprefix(prefix) for name in names if name.startswith(prefix)}:
            of = "a DataParallel" if prefix == "module." else "torch.compile"
            return (
                f"The names begin with {prefix!r}, which comes from {of}. To take it off in place: "
                f"torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, {prefix!r})"
            )
    bare = {name.removeprefix("module.") for name in own}
    for key, value in state_dict.items():
        if isinstance(value, Mapping) and bare & {str(name).removeprefix("module.") for name in value}:
            return f"The state dict of the model is an entry of this one: load state_dict[{key!r}]"
    return ""
