"""The contract of composable forms, which are functions that change in place how a module runs.

A form (``replicate``) is applied to a module once, and to no child or parent of a module that has any form: both forms
would run it. Two managed modules share no parameter. The module stays the same object with the same parameter names,
and its class becomes a subclass. A form's state is in the module's ``__dict__`` under `KEY`, so it is no parameter and
not in the state dict. How the module runs then is up to the form; this file knows no devices.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from torch import Tensor, nn

__all__ = ["KEY", "Form", "FormState", "ManagedModule", "held_by", "original_class"]

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound="FormState")

KEY = "_dataparallel_form"
"""The attribute of a managed module that holds its form and the form's state."""

_lock = threading.RLock()
_managed: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


class FormState(Protocol):
    """The state that a form keeps for one module. It may refer to the module only weakly."""

    def manages(self, parameter: Tensor) -> bool:
        """True if the form handles this parameter of the module's tree."""


class ManagedModule:
    """The first base of every class that a form gives to a module.

    A managed module cannot be copied or pickled. Its class makes instances of the original class: a slice of a
    managed ``Sequential`` is a plain ``Sequential``, for example.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the original class."""
        return original_class(cls)(*args, **kwargs)

    def __copy__(self) -> NoReturn:
        self._refuse("copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def _dataparallel_refusal(self, path: str) -> str:
        """The error message for a tree that has this module at ``path``, or as its root (``""``). Plans raise it."""
        name, own = _name_of(self), original_class(type(self)).__name__
        what = f"{path!r}, a {own}" if path else f"the {own}"
        return (
            f"cannot replicate {what}: it is managed by `{name}` already, which runs replicas of it. Put no wrapper "
            "around it or its parents; apply one form, once, to the outermost module only"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        # Other libraries call this, and know no path.
        raise RuntimeError(self._dataparallel_refusal(""))

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"cannot {what} a module that is managed by `{_name_of(self)}`: it stands for replicas on several devices. "
            "Save or copy its state_dict() and load that into a new module with load_state_dict()"
        )


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


class Form(Generic[P, S]):
    """A form, made from a function.

    Args:
        prepare: takes the module and the arguments of the form, checks them, and returns the state for the module. It
            changes nothing.
        base: the first base of the class that modules get.
    """

    __name__: str

    def __init__(self, prepare: Callable[Concatenate[nn.Module, P], S], base: type[ManagedModule]) -> None:
        functools.update_wrapper(self, prepare)  # type: ignore[arg-type]
        self.__signature__ = inspect.signature(prepare).replace(return_annotation="nn.Module")
        self._prepare, self._base = prepare, base

    def __repr__(self) -> str:
        return f"<composable form {self.__name__}>"

    def __call__(self, module: M, *args: P.args, **kwargs: P.kwargs) -> M:
        """Applies the form to ``module`` and returns it, the same object.

        Raises:
            TypeError: it is no module, or its class cannot be changed.
            RuntimeError: it, a parent, a child or one of its parameters has a form already; the message names it.
            Exception: the form's function raised it.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"`{self.__name__}` takes a torch.nn.Module; got {type(module).__name__}")
        with _lock:
            _check_tree(module, self.__name__)
            state = self._prepare(module, *args, **kwargs)
            _check_parameters(module, state)
            before, names = type(module), _names(module)
            _set_class(module, self._class_for(before))
            vars(module)[KEY] = self, state
            if _names(module) != names:
                _set_class(module, before)
                del vars(module)[KEY]
                raise RuntimeError(
                    f"`{self.__name__}` would change parameter names of this {before.__name__}, from {names}; they "
                    "depend on the module's class, which becomes a subclass. Let named_parameters give the same names"
                )
            _managed[id(module)] = module
        return module

    def state(self, module: nn.Module) -> S | None:
        """This form's state for ``module``, or ``None`` if this form is not applied to it."""
        form, state = vars(module).get(KEY, (None, None))
        return state if form is self else None

    def _class_for(self, cls: type[nn.Module]) -> type[nn.Module]:
        """The subclass for modules of the class ``cls``, made when it is first needed."""
        bases = (self._base, cls)
        for known in type.__subclasses__(cls):  # Python refers to them weakly there
            if known.__bases__ == bases:
                return known
        name = f"{self.__name__.title().replace('_', '')}{cls.__name__}"
        body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        made = types.new_class(name, bases, exec_body=lambda namespace: namespace.update(body))
        # Programs look at the name of a class to choose how labels are shifted or what a saved configuration says. A
        # class that registers its subclasses by name has seen the other name, which also shows in the class's repr.
        made.__name__ = cls.__name__
        return made


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    try:
        # Not by `Module.__setattr__`: a class may override it with a stricter one.
        object.__setattr__(module, "__class__", cls)
    except TypeError as error:
        raise TypeError(f"cannot change the class of a {type(module).__name__}: {error}") from error


def _name_of(module: Any) -> str:
    form, _ = vars(module).get(KEY, (None, None))
    return "a composable form" if form is None else form.__name__


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _check_tree(module: nn.Module, name: str) -> None:
    """Raises if a module of the tree is managed, or a tree that contains the module."""
    for path, child in module.named_modules():
        if KEY in vars(child):
            what = f"its child {path!r}" if path else f"the {original_class(type(child)).__name__}"
            raise RuntimeError(
                f"cannot apply `{name}`: {what} is managed by `{_name_of(child)}` already; apply one form, once, to "
                "the outermost module only"
            )
    for parent in list(_managed.values()):
        for path, child in parent.named_modules():
            if child is module:
                raise RuntimeError(
                    f"cannot apply `{name}`: the module is {path!r} in a {original_class(type(parent)).__name__} that "
                    f"is managed by `{_name_of(parent)}` already, with all its children"
                )


def _check_parameters(module: nn.Module, state: FormState) -> None:
    """Raises if a parameter is managed in another module."""
    ours = {id(parameter): name for name, parameter in module.named_parameters() if state.manages(parameter)}
    for other in list(_managed.values()):
        form, others = vars(other)[KEY]
        for name, parameter in other.named_parameters():
            if id(parameter) in ours and others.manages(parameter):
                raise RuntimeError(
                    f"parameter {ours[id(parameter)]!r} is shared with a module outside: it is {name!r} of a "
                    f"{original_class(type(other)).__name__} that is managed by `{form.__name__}` already. Apply the "
                    "form to a module that holds both, or pass it in ignored_params"
                )
