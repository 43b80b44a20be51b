"""``chunk_sizes=``: numbers of samples, or shares of a batch of any size."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.batches.scatter import Split, split_by_shares

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough

shares = st.lists(st.floats(1e-3, 1e3) | st.integers(1, 50).map(float), min_size=1, max_size=9)
totals = st.integers(0, 3000)


@given(totals, shares)
def test_every_sample_goes_to_one_slot_and_no_slot_is_left_out(total: int, shares: list[float]) -> None:
    sizes = split_by_shares(total, shares)
    assert sum(sizes) == total
    if total >= len(shares):
        assert len(sizes) == len(shares)
        assert min(sizes) >= 1
    else:
        assert sizes == ([1] * total or [0]), "the first slots get one sample each"


@given(totals, shares, st.integers(-20, 20))
def test_only_ratios_count_and_the_answer_is_always_the_same(total: int, shares: list[float], power: int) -> None:
    sizes = split_by_shares(total, shares)
    assert split_by_shares(total, shares) == sizes
    assert split_by_shares(total, [share * 2.0**power for share in shares]) == sizes


@given(totals, shares)
def test_a_slot_is_less_than_one_sample_from_its_quota_unless_small_shares_need_room(
    total: int, shares: list[float]
) -> None:
    quotas = [total * share / sum(shares) for share in shares]
    if min(quotas) < 1:
        return
    for size, quota in zip(split_by_shares(total, shares), quotas, strict=True):
        assert abs(size - quota) < 1 + 1e-9


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([0.5, -1.0, 1.0], ValueError, r"chunk_sizes\[1\]=-1.0: expected a number above 0"),
        ([0.5, math.nan, 1.0], ValueError, r"chunk_sizes\[1\]=nan: expected a number above 0"),
        ([0.5, math.inf, 1.0], ValueError, "a share is a finite number"),
        ([0.0, 0.0, 0.0], ValueError, "leave slots without samples out of device_ids"),
        ([0.5, 0.5], ValueError, "has 2 entries for 3 slots"),
        ([], ValueError, "has 0 entries for 3 slots"),
        ([0.5, True, 1.0], TypeError, r"chunk_sizes\[1\]=True: expected a number"),
        ([0.5, "1", 1.0], TypeError, r"chunk_sizes\[1\]='1': expected a number"),
        (3, TypeError, "chunk_sizes=3: expected a list"),
        ("equal", TypeError, "chunk_sizes='equal': expected a list"),
    ],
)
def test_what_makes_no_sense_is_refused(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Split(given, 3)  # type: ignore[arg-type]
