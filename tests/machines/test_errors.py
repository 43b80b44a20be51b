"""`differences`: nothing where descriptions are equal, and otherwise what differs and on which ranks."""

import hypothesis
import hypothesis.strategies as st
import pytest

from dataparallel.machines.errors import as_text, differences

pytestmark = pytest.mark.devices("cpu")  # nothing is sent: once is enough

WEIGHT = {"shape": (4, 8), "dtype": "half"}

# Few names and values, so that ranks often agree.
NAMES = st.sampled_from(["a", "b.weight", "b.bias", "c"])
VALUES = st.integers(0, 2) | st.dictionaries(st.sampled_from(["shape", "dtype"]), st.integers(0, 2))
DESCRIPTIONS = st.lists(st.tuples(NAMES, VALUES), max_size=4).map(dict)


def of(*descriptions):
    return differences([as_text(each) for each in descriptions], range(len(descriptions)))


def test_shapes_and_names_that_differ():
    found = of(
        {"layers.0.weight": WEIGHT, "head.bias": 1},
        {"layers.0.weight": {**WEIGHT, "shape": (4, 9)}, "head.bias": 1},
        {"layers.0.weight": WEIGHT},
    )
    assert found == [
        "head.bias: 1 on ranks 0 and 1",
        "layers.0.weight: shape (4, 8), dtype half on ranks 0 and 2",
        "layers.0.weight: shape (4, 9), dtype half on rank 1",
    ]


@hypothesis.given(st.lists(DESCRIPTIONS, min_size=1, max_size=4))
def test_something_is_found_exactly_where_something_differs(descriptions):
    texts = [*map(as_text, descriptions)]  # the order of entries, and of their properties, is in it
    assert bool(of(*descriptions)) == any(text != texts[0] for text in texts)
