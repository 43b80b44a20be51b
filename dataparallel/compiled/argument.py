"""The argument ``compile=`` of wrappers: how the replicas of a module are compiled that is not compiled itself.

``data_parallel`` and the composable forms take it. ``kept.replicas`` and ``composable.compiled_units`` read it for each
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dataparallel.compiled.functions import CompiledFunctions
from dataparallel.compiled.recognise import Compiled, call_of, compiled_here, compiled_in_place

__all__ = ["CompileArgument"]

NAMES = ("backend", "mode", "dynamic", "fullgraph", "options")
"""What a dict may hold: arguments of ``torch.compile``."""


class CompileArgument:
    """How a wrapper compiles its replicas. A copy of it, and an unpickled one, compiles anew.

    Args:
        options: arguments of ``torch.compile``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = dict(options)
        self._call = torch.compile(_nothing, **self.options)  # holds the context, which the functions live as long as

    @classmethod
    def checked(cls, module: nn.Module, compile: Any) -> CompileArgument | None:
        """Reads the argument of a wrapper of ``module``.

        Raises:
            TypeError: it is neither ``True``, ``False`` or ``None`` nor a dict; a name in the dict is none of `NAMES`;
                the module is a ScriptModule.
            ValueError: the module is compiled already.
            Exception: ``torch.compile`` does not take an option.
        """
        if compile is None or compile is False:
            return None
        options = {} if compile is True else compile
        if not isinstance(options, dict):
            raise TypeError(f"compile is True, False or a dict of arguments for torch.compile; got {compile!r}")
        unknown = [name for name in options if name not in NAMES]
        if unknown:
            raise TypeError(f"compile={compile!r}: {unknown[0]!r} is none of {', '.join(NAMES)}")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("compile= is for Python modules: torch.compile takes no ScriptModule")
        if _is_compiled(module):
            raise ValueError(
                f"this {type(module).__name__} is compiled already, and its replicas are compiled in the same way: "
                "leave compile= out, or wrap the module that is not compiled"
            )
        return cls(options)

    def __reduce__(self) -> tuple[type[CompileArgument], tuple[dict[str, Any]]]:
        return CompileArgument, (self.options,)

    def call(self, module: nn.Module) -> Callable[..., Any]:
        """What runs ``module`` itself compiled, where it needs no replicas."""
        root = self.of(module)
        return module if root is None else call_of(module, root)

    def of(self, module: nn.Module, others: Iterable[CompiledFunctions] = ()) -> Compiled | None:
        """How replicas of ``module`` are called. ``None`` if the compiler is switched off.

        ``others``: functions of other modules of its tree, which it may share.
        """
        return None if self._call is _nothing else compiled_in_place(module, self._call, others)


def _is_compiled(module: nn.Module) -> bool:
    try:
        return compiled_here(module) is not None
    except LookupError:
        return True


def _nothing() -> None:
    """What is compiled to get a context."""
