"""In which dtypes a unit computes, sums and returns. The form makes one from its policy; it holds values only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Precision"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit; ``None`` means those of the parameters, and for sums those of the gradients."""

    parameters: torch.dtype | None = None
    sums: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: bool = True
