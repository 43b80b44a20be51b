"""What a managed module is: the first base of its class, where its form and state are kept, what replicas are made of.

A form (``forms.contract``) makes modules managed. This file knows no form.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import nn

from dataparallel._torch import HOOK_TABLES
from dataparallel.replicas.build import bare_module, give_attributes
from dataparallel.replicas.plan import TWIN_INFO, TwinInfo, dotted, instance_slots

KEY = "_dataparallel_form"
"""The attribute of a managed module that holds its form and the form's state."""


class ManagedModule:
    """The first base of every class that a form gives to a module.

    A managed module cannot be copied or pickled. Its class makes instances of the original class: a slice of a
    managed ``Sequential`` is a plain ``Sequential``, for example.
    """

    # Ends of messages: why there is no copy, what to do instead, and what to do instead of a wrapper.
    _why_no_copy = "it stands for replicas on several devices"
    _instead_of_a_copy = "Save or copy its state_dict() and load that into a new module with load_state_dict()"
    _instead_of_a_wrapper = "apply one form, once, to the outermost module only"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the original class."""
        return original_class(cls)(*args, **kwargs)

    def __copy__(self) -> NoReturn:
        self._refuse("copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def _dataparallel_run(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a method that runs on the slots (``on_slots.Method``)."""
        return vars(self)[KEY][1].run(method, args, kwargs)

    def _dataparallel_refusal(self, path: str) -> str:
        """The error message for a tree that has this module at ``path``, or as its root (``""``). Plans raise it."""
        name, own = name_of_form(self), original_class(type(self)).__name__
        what = f"{path!r}, a {own}" if path else f"the {own}"
        return (
            f"cannot replicate {what}: it is managed by `{name}` already, which runs replicas of it. Put no wrapper "
            f"around it or its parents; {self._instead_of_a_wrapper}"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        # Other libraries call this, and know no path.
        raise RuntimeError(self._dataparallel_refusal(""))

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"cannot {what} a module that is managed by `{name_of_form(self)}`: {self._why_no_copy}. "
            f"{self._instead_of_a_copy}"
        )


class Twin:
    """The twin of one module: the object that replicas are made from in its place, the same one at each call.

    It has all attributes of the module, so the same children and tensors. Only its class and its hooks may differ.

    Args:
        cls: its class, that of the replicas.
        info: what plans are told about it.

    Attributes:
        module: the twin itself. It has no attributes until `update` is called.
    """

    def __init__(self, cls: type[nn.Module], info: TwinInfo) -> None:
        self.module = bare_module(cls)
        self._info = info
        self._no_hooks: dict[str, Any] = {name: OrderedDict() for name in HOOK_TABLES}

    def update(self, source: nn.Module, method: str) -> nn.Module:
        """The twin with the current attributes of ``source``, for a call of ``method``.

        For ``forward`` it has no hooks: the module's hooks run around the call on the whole batch. Another method may
        call the replica itself, and then they run in the replica.
        """
        hooks = self._no_hooks if method == "forward" else {}
        own = {**vars(source), **hooks, TWIN_INFO: self._info}
        return give_attributes(self.module, own, source, instance_slots(type(self.module)))


def original_class(cls: type) -> type[Any]:
    """The class that a module had before a form gave it the class ``cls``."""
    order = cls.__mro__
    return order[order.index(ManagedModule) + 1]


def held_by(module: Any, name: str) -> Any:
    """The attribute that the module would have without the form: its own, or else that of its original class.

    Raises:
        AttributeError: it has none of this name.
    """
    own = vars(module)
    return own[name] if name in own else getattr(super(ManagedModule, module), name)


def own_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of these trees without those that are managed by themselves, with their trees. Each comes once.

    ``modules`` themselves are among them, managed or not. With each comes its name in the tree; in a list of several
    modules the name begins with the number in the list.
    """
    roots = {id(module) for module in modules}
    seen: set[int] = set()
    waiting = [(str(i) if len(modules) > 1 else "", module) for i, module in reversed([*enumerate(modules)])]
    while waiting:  # depth first, in the order of `Module.named_modules`
        name, module = waiting.pop()
        if id(module) in seen or (KEY in vars(module) and id(module) not in roots):
            continue
        seen.add(id(module))
        yield name, module
        children = [(dotted(name, key), child) for key, child in module._modules.items() if child is not None]
        waiting += reversed(children)


def own_parameters(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of `own_modules`, with their names. A parameter with several names comes once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, module in own_modules(modules):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (dotted(name, key), parameter))
    return [*found.values()]


def name_of_form(module: Any) -> str:
    """The name of the form that manages the module, for messages."""
    form, _ = vars(module).get(KEY, (None, None))
    return "a composable form" if form is None else form.__name__
