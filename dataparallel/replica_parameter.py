"""The class of a replica's parameters while a graph is recorded. ``comm.buckets`` lists it among the plain tensors."""

from __future__ import annotations

from typing import Any

import torch

from dataparallel import _torch


class ReplicaParameter(torch.Tensor):
    """A parameter of a replica: ``isinstance(p, nn.Parameter)`` holds, but it is an output of the broadcast.

    It is no leaf. Operations that only make sense on a model's own parameters raise.
    """

    __torch_function__ = _torch.disabled_torch_function
    _is_param = True

    def requires_grad_(self, requires_grad: bool = True) -> ReplicaParameter:
        """Raises if the value would change."""
        self.requires_grad = requires_grad
        return self

    # Not by a property: torch.compile takes one that reads ``super().requires_grad`` for true.
    def __setattr__(self, name: str, value: Any) -> None:
        if name != "requires_grad":
            super().__setattr__(name, value)
        elif value != self.requires_grad:
            raise RuntimeError(
                f"cannot set requires_grad={value} on a parameter of a replica: it is a copy, not a leaf. Set "
                "it on the source module before its forward. While a module with fully_shard is full, it has such "
                "copies: set it before the forward, after backward() or after reshard()"
            )

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        # That of a fully sharded module has no memory while its unit is not gathered. Reading it would crash the
        # process, and a test runner prints the arguments of a function that has raised.
        if self.layout is torch.strided and self.numel() and not self.untyped_storage().nbytes():
            return f"<freed parameter of shape {[*self.shape]} and {self.dtype} on {self.device}>"
        return str(super().__repr__(**options))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise RuntimeError(
            "cannot deepcopy a parameter of a replica: it is a copy made by the broadcast, not a leaf, and belongs to "
            "one forward. Copy the source module outside forward, or take parameter.detach().clone()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)
