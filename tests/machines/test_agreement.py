"""`differences`: nothing where descriptions are equal, and otherwise what differs and on which ranks."""

import hypothesis
import hypothesis.strategies as st
import pytest

from dataparallel.machines.agreement import MOST, as_text, differences, of_ranks

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough

WEIGHT = {"shape": (4, 8), "dtype": "torch.float32"}

# Few names and values, so that ranks often agree.
NAMES = st.sampled_from(["a", "b.weight", "b.bias", "c"])
VALUES = st.integers(0, 2) | st.dictionaries(st.sampled_from(["shape", "dtype"]), st.integers(0, 2))
DESCRIPTIONS = st.lists(st.tuples(NAMES, VALUES), max_size=4).map(dict)


def of(*descriptions):
    return differences([as_text(each) for each in descriptions], range(len(descriptions)))


def test_shapes_and_names_that_differ():
    found = of(
        {"layers.0.weight": WEIGHT, "head.bias": WEIGHT},
        {"layers.0.weight": {**WEIGHT, "shape": (4, 9)}, "head.bias": WEIGHT},
        {"layers.0.weight": WEIGHT},
    )
    assert found == ["rank 2 lacks head.bias", "layers.0.weight: shape (4, 8) on ranks 0 and 2, (4, 9) on rank 1"]


def test_single_values_that_differ():
    assert of({"bucket_cap_mb": 25}, {"bucket_cap_mb": 10}, {"bucket_cap_mb": 1}) == [
        "bucket_cap_mb: 25 on rank 0, 10 on rank 1, 1 on rank 2"
    ]


def test_what_few_ranks_have():
    assert of({"a": 1, "b": 1}, {"a": 1}, {"a": 1}) == ["only rank 0 has b"]
    assert of({"a": 1, "b": 1}, {"a": 1}) == ["rank 1 lacks b"]
    assert of({"a": 1, "b": {}}, {"b": {}}) == ["rank 1 lacks a"]


def test_a_property_that_only_some_ranks_mention():
    assert of({"a": {"shape": 1}}, {"a": {}}) == ["a: shape 1 on rank 0, not said on rank 1"]


def test_lines_of_other_rounds():
    texts = ["bucket 0: 512 of float32\nbuffers", "bucket 0: 256 of float32\nbuffers"]
    assert differences(texts, [0, 1]) == ["bucket 0: 512 of float32 on rank 0, 256 of float32 on rank 1"]
    assert differences(["buffers", "nothing"], [0, 1]) == ["rank 1 lacks buffers", "rank 0 lacks nothing"]


def test_another_order():
    assert of({"a": 1, "b": 2}, {"b": 2, "a": 1}) == ["the order: number 0 is a on rank 0, b on rank 1"]


def test_many_differences_are_counted():
    found = of({f"p{i}": i for i in range(100)}, {f"p{i}": -i - 1 for i in range(100)})
    assert len(found) == MOST
    assert found[-1] == f"and {100 - MOST + 1} more differences"
    [found] = of({"q": 1, **{f"p{i}": i for i in range(100)}}, {"q": 1})
    assert found.startswith("rank 1 lacks p0, p1, ")
    assert found.endswith(f" and {100 - MOST} more")


def test_numbers_of_ranks():
    assert of_ranks([3]) == "rank 3"
    assert of_ranks([2, 0]) == "ranks 0 and 2"
    assert of_ranks([4, 5]) == "ranks 4 and 5"
    assert of_ranks(range(6)) == "ranks 0-5"
    assert of_ranks([9, 7, *range(6)]) == "ranks 0-5, 7 and 9"


def test_ranks_have_the_numbers_that_are_given():
    assert differences([as_text({"a": 1}), as_text({"a": 2})], [4, 7]) == ["a: 1 on rank 4, 2 on rank 7"]


@hypothesis.given(DESCRIPTIONS, st.integers(1, 5))
def test_equal_descriptions_do_not_differ(description, ranks):
    assert of(*[dict(description) for _ in range(ranks)]) == []


@hypothesis.given(st.lists(DESCRIPTIONS, min_size=1, max_size=4))
def test_something_is_found_exactly_where_something_differs(descriptions):
    texts = [*map(as_text, descriptions)]  # the order of entries, and of their properties, is in it
    assert bool(of(*descriptions)) == any(text != texts[0] for text in texts)


@hypothesis.given(st.lists(st.text("ab:\t\n ", max_size=8), min_size=1, max_size=4))
def test_any_lines_that_differ_are_found(texts):
    assert bool(differences(texts, range(len(texts)))) == any(text != texts[0] for text in texts)


@hypothesis.given(DESCRIPTIONS.filter(bool), st.integers(2, 5), st.data())
def test_one_difference_names_entry_rank_and_both_values(description, ranks, data):
    name = data.draw(st.sampled_from([*description]))
    rank = data.draw(st.integers(0, ranks - 1))
    descriptions = [{**description, name: "here"} for _ in range(ranks)]
    descriptions[rank] = {**description, name: "there"}
    [found] = of(*descriptions)
    assert found.startswith(f"{name}: ")
    assert f"there on rank {rank}" in found
    assert f"here on {of_ranks({*range(ranks)} - {rank})}" in found


@hypothesis.given(DESCRIPTIONS.filter(lambda each: len(each) > 1), st.integers(2, 5), st.data())
def test_an_entry_that_one_rank_lacks(description, ranks, data):
    name = data.draw(st.sampled_from([*description]))
    rank = data.draw(st.integers(0, ranks - 1))
    descriptions = [dict(description) for _ in range(ranks)]
    del descriptions[rank][name]
    assert of(*descriptions) == [f"rank {rank} lacks {name}"]


@hypothesis.given(st.sets(st.integers(0, 20), min_size=1))
def test_ranks_can_be_read_back(ranks):
    read = set()
    for word in of_ranks(ranks).partition(" ")[2].replace(" and ", ", ").split(", "):
        first, _, last = word.partition("-")
        read |= {*range(int(first), int(last or first) + 1)}
    assert read == ranks
