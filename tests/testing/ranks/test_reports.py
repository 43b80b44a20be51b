"""The error of a failed run: which rank is the reason, and how long the error may get."""

import pytest

from dataparallel.testing import RanksFailed
from dataparallel.testing.ranks.reports import STACKS, Ended, conclude

pytestmark = pytest.mark.devices("cpu")


def failed(*ended: Ended) -> RanksFailed:
    with pytest.raises(RanksFailed) as raised:
        conclude("processes", list(ended), 1.0)
    return raised.value


def test_the_first_failure_is_the_reason():
    late = Ended(0, "raised", "raised Late", 2.0)
    early = Ended(1, "raised", "raised Early", 1.0)
    assert failed(late, early).rank == 1
    assert str(failed(late, early)).startswith("rank 1 of 2 (processes) raised Early, after 1.0 s")


def test_a_death_is_the_reason_even_if_a_peer_has_noticed_it_before():
    noticed = Ended(0, "raised", "raised RuntimeError: Connection closed by peer", 2.0)
    assert failed(noticed, Ended(1, "died", "was killed by SIGKILL", 2.5)).rank == 1


def test_a_rank_that_was_stopped_is_never_the_reason():
    assert failed(Ended(0, "stopped", "was stopped", 1.0), Ended(1, "raised", "raised Late", 2.0)).rank == 1


def test_what_ranks_have_in_common_is_told_once():
    text = str(failed(*(Ended(number, "raised", "raised E", 1.0 + number, trace="the trace") for number in range(3))))
    assert text.count("the trace") == 1
    assert text.count("the same as rank 0") == 2


def test_a_long_error_is_cut():
    text = str(failed(Ended(0, "raised", "raised E\nmore", trace="x" * 10 * STACKS, output="y" * 10 * STACKS)))
    assert len(text) < 2 * STACKS
    assert text.partition("\n")[0] == "rank 0 of 1 (processes) raised E, after 1.0 s"
