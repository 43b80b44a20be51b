"""What the devices of a stand-in say of themselves."""

import pytest

from nogpu.cuda.machine import CEILING, LIKE, machine_like

pytestmark = pytest.mark.devices("cpu")


@pytest.mark.parametrize("like", LIKE)
def test_each_kind_says_in_its_name_that_there_is_no_gpu(like):
    machine = machine_like(like, 3)
    assert (machine.devices, machine.like) == (3, like)
    assert machine.name.endswith("(stand-in, no GPU)")
    assert 7 <= machine.major <= 9
    assert machine.bytes >= 16 * 2**30


def test_geforce_cards_have_no_peers():
    assert [like for like in LIKE if not machine_like(like, 1).peers] == ["rtx_3090", "titan_rtx_pcie"]


@pytest.mark.parametrize(
    ("like", "count", "error", "words"),
    [
        *(("a100", count, ValueError, rf"1 to {CEILING} devices; got {count}$") for count in (0, -1, CEILING + 1)),
        *(("a100", count, TypeError, "number of devices is an int; got") for count in (True, 2.0, "2", None)),
        ("k80", 1, ValueError, r"like one of v100, a100, .*; got 'k80'"),
    ],
)
def test_a_machine_that_cannot_be(like, count, error, words):
    with pytest.raises(error, match=words):
        machine_like(like, count)
