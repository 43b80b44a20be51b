"""Formulas for the time of a route, tried on machines that need not exist."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.comm import choice
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.comm.choice import MOST_PIECES, fastest, pieces, time_of
from dataparallel.comm.links import ALL_TO_ALL, MAYBE_SHARED, Links

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

BUCKET = DEFAULT_CAP_BYTES
WORK = ["broadcast", "reduce_add"]
ROUTES = {"broadcast": ["star", "tree", "chain"], "reduce_add": ["star", "chain", "shards"]}


@pytest.fixture
def only_bytes(monkeypatch: pytest.MonkeyPatch) -> Links:
    """Links of one byte per second, where nothing else takes time."""
    monkeypatch.setattr(choice, "_LAUNCH_SECONDS", dict.fromkeys(WORK, 0.0))
    monkeypatch.setattr(choice, "_KERNEL_SECONDS", 0.0)
    monkeypatch.setattr(choice, "_MEMORY_BANDWIDTH", float("inf"))
    monkeypatch.setattr(choice, "_HIDDEN_UP_TO_BYTES", 0)  # the time of a sum itself counts
    return Links(True, 0.0, 1.0)


# In units of s/b, for 2, 3, 4 and 8 devices
SUMS = {
    "star": [1, 2, 3, 7],
    "chain": [1 + 1 / 16, 1 + 2 / 16, 1 + 3 / 16, 1 + 7 / 16],
    "shards": [1, 4 / 3, 1.5, 1.75],
}
BROADCASTS = {
    "star": [1, 2, 3, 7],
    "tree": [1, 2, 2, 3],
    "chain": [1, 1 + 1 / 16, 1 + 2 / 16, 1 + 6 / 16],
}
FOLLOWING = {"star": [1, 2, 3, 7], "tree": [1, 2, 2, 3], "chain": [1] * 4}


@pytest.mark.parametrize(("place", "number"), [(0, 2), (1, 3), (2, 4), (3, 8)])
def test_with_many_bytes_the_table_of_the_manual(place: int, number: int, only_bytes: Links) -> None:
    for route, seconds in SUMS.items():
        assert time_of("reduce_add", route, number, 960, only_bytes, count=16) == pytest.approx(960 * seconds[place])
    for route, seconds in BROADCASTS.items():
        found = time_of("broadcast", route, number, 960, only_bytes, count=16)
        assert found == pytest.approx(960 * (seconds[place] + choice._FOLLOWING_BUCKETS * FOLLOWING[route][place]))


@given(st.sampled_from(WORK), st.integers(3, 64), st.integers(0, 2**30), st.booleans(), st.booleans())
def test_the_fastest_is_no_slower_than_any_other(
    work: str, number: int, nbytes: int, all_to_all: bool, widened: bool
) -> None:
    links = ALL_TO_ALL if all_to_all else MAYBE_SHARED
    widened = widened and work == "reduce_add"
    chosen = time_of(work, fastest(work, number, nbytes, links, widened), number, nbytes, links, widened)
    for route in ROUTES[work]:
        if route != "shards" or all_to_all:
            assert chosen <= time_of(work, route, number, nbytes, links, widened)


@given(st.sampled_from(WORK), st.integers(2, 64), st.integers(0, 2**30), st.sampled_from([MAYBE_SHARED, ALL_TO_ALL]))
def test_no_other_number_of_pieces_is_better(work: str, number: int, nbytes: int, links: Links) -> None:
    count = pieces(work, number, nbytes, links)
    assert 1 <= count <= MOST_PIECES
    best = time_of(work, "chain", number, nbytes, links, count=count)
    assert all(best <= time_of(work, "chain", number, nbytes, links, count=k) for k in range(1, MOST_PIECES + 1))


@pytest.mark.parametrize("links", [MAYBE_SHARED, ALL_TO_ALL])
def test_few_bytes_take_few_copies_in_a_row(links: Links) -> None:
    for number in (4, 8):
        assert fastest("broadcast", number, 1, links) == "tree"
        assert fastest("reduce_add", number, 1, links) in ("star", "chain")
    for work in ("broadcast", "reduce_add"):
        assert pieces(work, 8, 1, links) == 1


@pytest.mark.parametrize("links", [MAYBE_SHARED, ALL_TO_ALL])
@pytest.mark.parametrize("work", WORK)
def test_two_devices_need_no_route(work: str, links: Links) -> None:
    assert fastest(work, 2, 2**30, links) == "star"
    assert pieces(work, 1, 2**30, links) == 1


def test_weights_and_hidden_sums_stream_along_a_chain_and_large_tensors_add_by_shards() -> None:
    for links in (MAYBE_SHARED, ALL_TO_ALL):
        assert fastest("broadcast", 8, BUCKET, links) == "chain"
        assert fastest("reduce_add", 8, BUCKET, links) == "chain"
    for number in (4, 8):
        assert fastest("reduce_add", number, 60 * 2**20, ALL_TO_ALL) == "shards"
        assert fastest("reduce_add", number, 60 * 2**20, MAYBE_SHARED) == "chain"


def test_a_hidden_sum_takes_few_launches() -> None:
    """In one more piece it would end sooner, but the host could launch less of the backward meanwhile."""
    assert pieces("reduce_add", 8, BUCKET, ALL_TO_ALL) <= 2
    assert pieces("reduce_add", 8, 60 * 2**20, ALL_TO_ALL) > 8


def test_partial_sums_of_16_bit_floats_travel_in_32_bits() -> None:
    narrow, wide = (time_of("reduce_add", "chain", 8, BUCKET, MAYBE_SHARED, widened, 4) for widened in (False, True))
    assert wide > 1.8 * narrow
    assert time_of("reduce_add", "shards", 8, BUCKET, MAYBE_SHARED, True) == time_of(
        "reduce_add", "shards", 8, BUCKET, MAYBE_SHARED
    )
