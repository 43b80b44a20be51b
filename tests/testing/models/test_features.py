"""The zoo is what its users assume: the same weights every time, and the features it names."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dataparallel.testing.cases import Case
from dataparallel.testing.models import CASES, DROPOUT_CASES
from dataparallel.testing.steps import run_step


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES + DROPOUT_CASES, ids=lambda case: case.name)
def test_builders_and_batches_repeat_themselves_and_leave_the_generator_alone(case: Case) -> None:
    before = torch.get_rng_state()
    first, second = case.build().state_dict(), case.build().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0)
        assert value.dtype in (torch.float64, torch.complex128, torch.int64)
    for one, two in zip(tree_leaves(case.batch(5, 1)), tree_leaves(case.batch(5, 1)), strict=True):
        assert one.shape[case.dim] == 5
        assert torch.equal(one, two)


def test_special_gradients_are_there() -> None:
    cases = {case.name: case for case in CASES}

    def gradients(name: str, size: int, seed: int) -> dict[str, Tensor | None]:
        return run_step(cases[name].build(), cases[name].batch(size, seed)).gradients

    assert gradients("sparse_embedding", 3, 0)["0.weight"].is_sparse
    assert gradients("unused", 3, 0)["unused.weight"] is None
    assert gradients("complex", 3, 0)["mix"].is_complex()
    assert "head.weight" not in gradients("gpt", 3, 0)
    # Single samples are the chunks of a batch as large as the number of slots.
    sometimes = [gradients("sometimes_used", 1, seed)["sometimes.weight"] for seed in range(10)]
    assert None in [None if g is None else "some" for g in sometimes]
    assert any(g is not None for g in sometimes)
