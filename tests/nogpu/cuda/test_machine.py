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


@pytest.mark.parametrize("count", [0, -1, CEILING + 1])
def test_a_number_of_devices_that_cannot_be(count):
    with pytest.raises(ValueError, match=rf"1 to {CEILING} devices; got {count}$"):
        machine_like("a100", count)


@pytest.mark.parametrize("count", [True, 2.0, "2", None])
def test_a_number_that_is_none(count):
    with pytest.raises(TypeError, match="number of devices is an int; got"):
        machine_like("a100", count)


def test_an_unknown_kind():
    with pytest.raises(ValueError, match=r"like one of v100, a100, .*; got 'k80'"):
        machine_like("k80", 1)
