"""The operators of the manual's table, checked over all placements: on sharded tensors, and on DTensors of four ranks.

``PYTHONPATH=. python tests/swept_operators.py`` writes the table anew. ``tests/testing/sharding/test_table.py``
compares it with what operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dataparallel.testing import check_op
from dataparallel.testing.ranks import Rank, on_threads
from dataparallel.testing.sharding import Checked, OperatorDiffers

TABLE = Path(__file__).parents[1] / "docs" / "api" / "sharded_operators.rst"
BEGIN, END = ".. begin of the table\n", ".. end of the table\n"
RANKS = 4
COUNTS = ("right", "refused", "wrong")


class Swept(NamedTuple):
    """An operator of the table, and what it is called with."""

    kind: str
    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool


def swept() -> list[Swept]:
    """All of them. One dimension of the tensors is cut into parts of 2, 2, 1 and 0 rows, the other one evenly."""
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int, requires_grad: bool = True) -> Tensor:
        values = torch.randn(shape or (5, 8), generator=made, dtype=torch.float64)
        return values.requires_grad_(requires_grad)

    def positive() -> Tensor:
        return (normal(requires_grad=False).abs() + 0.5).requires_grad_()

    def plain() -> Tensor:
        return normal(requires_grad=False)

    numbers = torch.arange(40).reshape(5, 8) - 20
    mask = normal().detach() > 0
    found: list[Swept] = []

    def add(kind: str, name: str, op: Callable[..., Any], *args: Any, gradients: bool = True, **kwargs: Any) -> None:
        found.append(Swept(kind, name, op, args, kwargs, gradients))

    for name in ("neg", "abs", "exp", "sin", "tanh", "sigmoid", "erf", "relu", "clone"):
        add("pointwise", f"torch.{name}", getattr(torch, name), normal(), gradients=name in ("exp", "relu"))
    for name in ("sqrt", "log", "reciprocal"):
        add("pointwise", f"torch.{name}", getattr(torch, name), positive(), gradients=name == "sqrt")
    for name in ("silu", "gelu", "softplus", "leaky_relu"):
        add("pointwise", f"F.{name}", getattr(F, name), normal(), gradients=name == "gelu")
    for name in ("add", "mul", "maximum"):
        add("pointwise", f"torch.{name}", getattr(torch, name), normal(), normal(), gradients=name == "mul")
    add("pointwise", "torch.div", torch.div, normal(), positive(), gradients=False)
    add("pointwise", "torch.pow", torch.pow, positive(), 1.5, gradients=False)
    add("pointwise", "torch.add, broadcast", torch.add, normal(), normal(8))
    add("pointwise", "torch.lerp", torch.lerp, normal(), normal(), 0.25, gradients=False)
    add("pointwise", "torch.clamp", torch.clamp, normal(), -0.5, 0.5, gradients=False)
    for name in ("eq", "isnan"):
        args = (plain(), plain()) if name == "eq" else (plain(),)
        add("pointwise", f"torch.{name}", getattr(torch, name), *args, gradients=False)
    add("pointwise", "torch.logical_not", torch.logical_not, mask, gradients=False)
    add("pointwise", "torch.bitwise_and", torch.bitwise_and, numbers, 6, gradients=False)
    add("pointwise", "torch.where", torch.where, mask, normal(), 0.0, gradients=False)
    add("pointwise", "Tensor.masked_fill", Tensor.masked_fill, normal(), mask, 1.0, gradients=False)
    for name in ("add_", "mul_", "copy_"):
        add("pointwise", f"Tensor.{name}", getattr(Tensor, name), plain(), plain(), gradients=False)
    add("pointwise", "Tensor.zero_", Tensor.zero_, plain(), gradients=False)
    add("pointwise", "torch.exp, out=", torch.exp, plain(), gradients=False, out=torch.empty(5, 8, dtype=torch.float64))
    add("pointwise", "torch.zeros_like", torch.zeros_like, plain(), gradients=False)

    for name in ("sum", "mean", "amax", "linalg.vector_norm"):
        op = torch.linalg.vector_norm if "." in name else getattr(torch, name)
        add("reduction", f"torch.{name}", op, normal())
        add("reduction", f"torch.{name}, dim=1", op, normal(), dim=1)
    add("reduction", "torch.var", torch.var, normal())
    add("reduction", "torch.prod, dim=0", torch.prod, normal(), dim=0)
    add("reduction", "torch.max, dim=1", torch.max, normal(), dim=1)
    add("reduction", "torch.argmax, dim=1", torch.argmax, plain(), dim=1, gradients=False)
    add("reduction", "torch.all", torch.all, mask, gradients=False)
    add("reduction", "torch.any, dim=0", torch.any, mask, dim=0, gradients=False)
    add("reduction", "torch.logsumexp, dim=1", torch.logsumexp, normal(), dim=1)
    add("reduction", "torch.cumsum, dim=0", torch.cumsum, normal(), dim=0)
    add("reduction", "F.softmax, dim=1", F.softmax, normal(), dim=1)

    add("matmul", "torch.mm", torch.mm, normal(5, 8), normal(8, 6))
    add("matmul", "torch.matmul", torch.matmul, normal(5, 8), normal(8))
    add("matmul", "torch.bmm", torch.bmm, plain().unsqueeze(0), plain().unsqueeze(0).mT.contiguous(), gradients=False)
    add(
        "matmul",
        "torch.addmm",
        torch.addmm,
        plain()[0, :6].contiguous(),
        plain(),
        normal(8, 6, requires_grad=False),
        gradients=False,
    )
    add("matmul", "F.linear", F.linear, normal(5, 8), normal(6, 8))
    add("matmul", "torch.dot", torch.dot, normal(8), normal(8))

    for name in ("neg", "exp"):
        add(
            "foreach",
            f"torch._foreach_{name}",
            getattr(torch, f"_foreach_{name}"),
            [positive(), positive()],
            gradients=name == "exp",
        )
    add("foreach", "torch._foreach_add, scalar", torch._foreach_add, [normal(), normal()], 1.0, gradients=False)
    add("foreach", "torch._foreach_add", torch._foreach_add, [normal()], [normal()], gradients=False)
    add("foreach", "torch._foreach_mul", torch._foreach_mul, [normal()], [normal()])
    add("foreach", "torch._foreach_div", torch._foreach_div, [plain()], [positive().detach()], gradients=False)
    add("foreach", "torch._foreach_add_", torch._foreach_add_, [plain()], [plain()], gradients=False)
    add("foreach", "torch._foreach_mul_, scalar", torch._foreach_mul_, [plain(), plain()], 0.5, gradients=False)
    add("foreach", "torch._foreach_zero_", torch._foreach_zero_, [plain(), plain()], gradients=False)
    add("foreach", "torch._foreach_norm", torch._foreach_norm, [plain(), plain()], gradients=False)
    add("foreach", "torch._foreach_lerp_", torch._foreach_lerp_, [plain()], [plain()], 0.1, gradients=False)
    return found


def checked(one: Swept, devices: Any) -> Checked:
    """The counts; right or wrong, nothing is raised."""
    try:
        return check_op(one.op, *one.args, devices=devices, gradients=one.gradients, **one.kwargs)
    except OperatorDiffers as error:
        return error.checked


def on_sharded_tensors(devices: Sequence[Any] = ("cpu",) * RANKS) -> dict[str, Checked]:
    """What each operator does on sharded tensors with four owners."""
    return {one.name: checked(one, devices) for one in swept()}


def on_dtensors(every: int = 1) -> dict[str, Checked]:
    """What it does on DTensors, with a rank in each of four threads. ``every=3``: each third operator."""
    results: dict[str, Checked] = on_threads(_on_mesh, every, ranks=RANKS, timeout=200.0)[0]
    return results


def _on_mesh(rank: Rank, every: int) -> dict[str, Checked]:
    mesh = rank.mesh()
    return {one.name: checked(one, mesh) for one in swept()[::every]}


def rows(sharded: dict[str, Checked], dtensors: dict[str, Checked]) -> list[list[str]]:
    """The table's rows, without its header."""
    return [
        [
            f"``{one.name}``" + (" with gradients" if one.gradients else ""),
            one.kind,
            *(str(getattr(counts[one.name], what)) for counts in (sharded, dtensors) for what in COUNTS),
        ]
        for one in swept()
    ]


def read_table() -> list[list[str]]:
    """The rows of the table in the manual."""
    _, _, rest = TABLE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, _ = rest.partition(END)
    listed = [row.strip().split("\n") for row in table.split("   * - ")[1:]]
    return [[cell.strip().removeprefix("- ") for cell in row] for row in listed][1:]


def write_table(found: list[list[str]]) -> None:
    """Puts these rows into the manual."""
    head = ["operator", "kind", *(f"{name}: {what}" for name in ("ShardedTensor", "DTensor") for what in COUNTS)]
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for first, *others in [head, *found]:
        lines += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
    text = TABLE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    TABLE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    write_table(rows(on_sharded_tensors(), on_dtensors()))
