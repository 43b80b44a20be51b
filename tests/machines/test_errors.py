"""`differences`: nothing where descriptions are equal, and otherwise what differs and on which ranks."""

import hypothesis
import hypothesis.strategies as st
import pytest

from dataparallel.machines.errors import differences

pytestmark = pytest.mark.devices("cpu")  # nothing is sent: once is enough

# Few names and values, so that ranks often agree.
LINES = st.sampled_from([f"{name}: {value}" for name in ("a", "b.weight", "b.bias") for value in (0, 1)])
TEXTS = st.lists(LINES, max_size=4).map("\n".join)


@hypothesis.given(st.lists(TEXTS, min_size=1, max_size=4))
def test_something_is_found_exactly_where_something_differs(texts):
    """Also where only the order differs, or how often something comes."""
    assert bool(differences(texts, range(len(texts)))) == any(text != texts[0] for text in texts)
