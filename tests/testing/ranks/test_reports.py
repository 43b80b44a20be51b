"""The error of a failed run: which rank is the reason, and how long the error may get."""

import pytest

from dataparallel.testing import RanksFailed
from dataparallel.testing.ranks.reports import STACKS, Ended, conclude

pytestmark = pytest.mark.devices("cpu")


@pytest.mark.parametrize(
    "other",
    [
        Ended(0, "raised", "raised Late", 3.0),
        Ended(0, "stopped", "was stopped", 1.0),
    ],
    ids=["a later error", "a rank that was stopped"],
)
def test_another_rank_is_the_reason(other: Ended) -> None:
    """A death whose peers have noticed it before is in test_processes."""
    with pytest.raises(RanksFailed, match=r"^rank 1 of 2 \(processes\) raised Early, after 1.0 s"):
        conclude("processes", [other, Ended(1, "raised", "raised Early", 2.0)], 1.0)


def test_a_long_error_is_cut() -> None:
    ended = Ended(0, "raised", "raised E\nmore", trace="x" * 10 * STACKS, output="y" * 10 * STACKS)
    with pytest.raises(RanksFailed) as raised:
        conclude("processes", [ended], 1.0)
    assert len(str(raised.value)) < 2 * STACKS
