"""`Form` makes a composable form of a function: `replicate` and `fully_shard`, which change in place how a module runs.

A module, its children and its parents have one form. The module stays the same object with the same parameter names,
and its class becomes a subclass with the same name. The form's state is in the module's ``__dict__``, so it is not in
the state dict.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import Tensor, nn

from dataparallel.arguments import listed
from dataparallel.forks import in_forked_child
from dataparallel.forms.managed import ManagedModule, form_and_state, name_of_form
from dataparallel.nn.sync_batch_norm import SyncBatchNorm
from dataparallel.replicas import replaced_parameters
from dataparallel.replicas.plan import FORM_ATTRIBUTE, ORIGINAL_CLASS
from dataparallel.weak_members import WeakMembers

P = ParamSpec("P")
M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")
S = TypeVar("S")

_lock = threading.RLock()
_managed: WeakMembers[nn.Module] = WeakMembers()


def are_in_one_tree(first: nn.Module | ManagedModule, second: nn.Module | ManagedModule) -> bool:
    return any(_holds(root, first) and _holds(root, second) for root in _managed)


class Form(Generic[P, S]):
    """A form, made from a function.

    Args:
        prepare: takes the module and the arguments of the form, checks them, and returns the state for the module. It
            changes nothing but classes of BatchNorms, which a later error restores. If the form nests, it takes a list
            of modules, and calls `check_unshared`. The state refers to the modules weakly. ``state.manages(parameter)``
            is True for a parameter of the tree that this state handles, and False for parameters of other states.
        base: the first base of the class that modules get.
        nests: if true, the form can be applied to children and then to their parents, and to a list of modules.
        begin: takes the list of modules and their state after the modules have got their class, and changes them. If it
            raises, it has changed nothing, and the modules get their class back.
    """

    __name__: str

    def __init__(
        self,
        prepare: Callable[Concatenate[Any, P], S],
        base: type[ManagedModule],
        nests: bool = False,
        begin: Callable[[list[nn.Module], S], None] | None = None,
    ) -> None:
        functools.update_wrapper(self, prepare)  # type: ignore[arg-type]
        annotation, signature = "nn.Module | Sequence[nn.Module]" if nests else "nn.Module", inspect.signature(prepare)
        module, *others = signature.parameters.values()
        self.__signature__ = signature.replace(
            parameters=[module.replace(annotation=annotation), *others], return_annotation=annotation
        )
        self._prepare, self._form_class, self._nests, self._begin = prepare, base, nests, begin

    def __repr__(self) -> str:
        return f"<composable form {self.__name__}>"

    def __call__(self, module: M, *args: P.args, **kwargs: P.kwargs) -> M:
        """Applies the form to ``module``, or to all modules of a list, and returns it, the same object."""
        modules = self._modules_of(module)
        with _lock:
            for each in modules:
                self._check_tree(each)
            kinds = {child: type(child) for each in modules for child in each.modules()}
            try:
                state: Any = self._prepare(modules if self._nests else module, *args, **kwargs)
                if not self._nests:
                    self.check_unshared([item for item in modules[0].named_parameters() if state.manages(item[1])])
                for each in modules:
                    self._check_names(each)
                for each in modules:
                    self._set_class_and_state(each, state)
                if self._begin is not None:
                    self._begin(modules, state)
            except BaseException:
                for each in modules:
                    if vars(each).pop(FORM_ATTRIBUTE, None) is not None:
                        _set_class(each, kinds[each])
                for child, kind in kinds.items():
                    if type(child) is SyncBatchNorm and kind is not SyncBatchNorm:
                        SyncBatchNorm.revert(child)
                raise
            for each in modules:
                _managed.add(each)
        return module

    def _modules_of(self, given: Any) -> list[nn.Module]:
        if isinstance(given, nn.Module):
            return [given]
        if not (self._nests and isinstance(given, (list, tuple))):
            or_list = " or a list of them" if self._nests else ""
            raise TypeError(f"`{self.__name__}` takes a torch.nn.Module{or_list}; got {type(given).__name__}")
        if not given:
            raise ValueError(f"`{self.__name__}` got an empty list; pass the modules that make one unit")
        modules: list[nn.Module] = listed("module", given, nn.Module)
        for i, module in enumerate(modules):
            below = {id(child): path for path, child in module.named_modules()}
            for j, other in enumerate(modules):
                if i != j and id(other) in below:
                    path = below[id(other)]
                    raise ValueError(
                        f"cannot apply `{self.__name__}` to this list: item {j}, a {type(other).__name__}, is "
                        + (f"{path!r} in item {i}, so leave it out" if path else f"item {i} too")
                    )
        return modules

    def _set_class_and_state(self, module: nn.Module, state: S) -> None:
        cls, names = type(module), _names(module)
        _set_class(module, self._class_for(cls))
        vars(module)[FORM_ATTRIBUTE] = self, state
        if _names(module) != names:
            raise RuntimeError(
                f"`{self.__name__}` would change parameter names of this {cls.__name__}, from {names}; they "
                "depend on the module's class, which becomes a subclass. Let named_parameters give the same names"
            )

    def state(self, module: nn.Module) -> S | None:
        form, state = form_and_state(module)
        return state if form is self else None

    def _class_for(self, cls: type[nn.Module]) -> type[nn.Module]:
        bases = (self._form_class, cls)
        for subclass in type.__subclasses__(cls):  # Python keeps this list, and refers to the classes weakly
            if subclass.__bases__ == bases:
                return subclass
        name = f"{self.__name__.title().replace('_', '')}{cls.__name__}"
        body = {"__module__": cls.__module__, "__doc__": cls.__doc__, ORIGINAL_CLASS: cls, "__init__": _init_of(cls)}
        made = types.new_class(name, bases, exec_body=lambda namespace: namespace.update(body))
        # Programs look at the name of a class to choose how labels are shifted or what a saved configuration says. The
        # first name is what a class that registers its subclasses sees, and it stays in the new class's repr.
        made.__name__ = cls.__name__
        return made

    def _check_tree(self, module: nn.Module) -> None:
        cannot = f"cannot apply `{self.__name__}`"
        for path, child in module.named_modules():
            if FORM_ATTRIBUTE not in vars(child) or (path and self._nests and vars(child)[FORM_ATTRIBUTE][0] is self):
                continue
            what = f"its child {path!r}" if path else f"the {type(child).__name__}"
            if not self._nests:
                do = "apply one form, once, to the outermost module only"
            elif vars(child)[FORM_ATTRIBUTE][0] is self:
                do = "apply it once to each module, to children before their parents"
            else:
                do = "one tree has one form"
            raise RuntimeError(f"{cannot}: {what} is managed by `{name_of_form(child)}` already; {do}")
        for parent in _managed:
            if not _holds(parent, module):
                continue
            path = next(path for path, child in parent.named_modules() if child is module)
            is_nesting = self._nests and vars(parent)[FORM_ATTRIBUTE][0] is self
            raise RuntimeError(
                f"{cannot}: the module is {path!r} in a {type(parent).__name__} that is managed by "
                f"`{name_of_form(parent)}` already, with all its children"
                + (f". Apply `{self.__name__}` to children before their parents" if is_nesting else "")
            )

    def _check_names(self, module: nn.Module) -> None:
        """Refuses attributes of the user's that a method of the form would hide."""
        given = {name for base in self._form_class.__mro__ if issubclass(base, ManagedModule) for name in vars(base)}
        registered = {*module._parameters, *module._buffers, *module._modules, *vars(module)}
        of_class = {name for base in type(module).__mro__ for name in vars(base)}
        hidden = {name for name in given - {*dir(nn.Module)} if not name.startswith("_")} & (registered | of_class)
        if hidden:
            raise ValueError(
                f"cannot apply `{self.__name__}`: this {type(module).__name__} has {sorted(hidden)}, and the form "
                "gives its module methods of these names. Give yours other names"
            )

    def check_unshared(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Checks parameters that the form would manage. ``prepare`` of a form that nests calls it with its own."""
        ours = {id(parameter): (name, parameter) for name, parameter in named}
        for name, parameter in ours.values():
            replaced = replaced_parameters.where(parameter)
            if replaced is not None:
                raise self._error_of_shared(name, f"it was {replaced[0]}", replaced[1])
        for other in _managed:
            form, state = vars(other)[FORM_ATTRIBUTE]
            # Most units share nothing. This shows it without the names, which would take longer.
            if form._nests and not any(state.manages(parameter) for _, parameter in ours.values()):
                continue
            for name, parameter in other.named_parameters():
                if id(parameter) in ours and state.manages(parameter):
                    place = f"it is {name!r} of a {type(other).__name__}"
                    raise self._error_of_shared(ours[id(parameter)][0], place, form.__name__)

    def _error_of_shared(self, name: str, place: str, form: str) -> RuntimeError:
        do = "Apply the form to a module that holds both, or pass it in ignored_params"
        if self._nests and form == self.__name__:
            do = (
                f"Pass the modules that use it as one list, `{self.__name__}([a, b])`, or leave them to a parent of "
                f"both. If one module is used in two places, apply `{self.__name__}` to that module first"
            )
        return RuntimeError(
            f"parameter {name!r} is shared with a module outside: {place} that is managed by `{form}` already. {do}"
        )


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A thread of the parent may have been giving a form."""
    global _lock
    _lock = threading.RLock()


def _holds(root: nn.Module, module: Any) -> bool:
    """True if ``module`` is in the tree of ``root``. With many units `modules` would be several times as slow."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        if each is module:
            return True
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            waiting += each._modules.values()
    return False


def _init_of(cls: type[nn.Module]) -> Callable[..., None]:
    """Returns the ``__init__`` of modules that a subclass of ``cls`` makes: they are of the class ``cls``."""

    @functools.wraps(cls.__init__)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if FORM_ATTRIBUTE not in vars(self):
            _set_class(self, cls)
        cls.__init__(self, *args, **kwargs)

    return init


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    try:
        # Not by `Module.__setattr__`: a class may override it with a stricter one.
        object.__setattr__(module, "__class__", cls)
    except TypeError as error:
        raise TypeError(f"cannot change the class of a {type(module).__name__}: {error}") from error


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]
