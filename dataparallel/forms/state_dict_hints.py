"""`names_explained` adds to errors of ``load_state_dict`` what to do about a state dict whose names do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn


@contextmanager
def names_explained(model: Any, state_dict: Any) -> Iterator[None]:
    """A context around ``load_state_dict`` of ``model``. Its ``RuntimeError`` gets the `hint_for_names`."""
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
