"""`Rank`, where there is but one process."""

import pytest
import torch

from dataparallel.testing.ranks import on_slots, on_threads

pytestmark = pytest.mark.devices("cpu")


def test_slots_have_no_mesh():
    with pytest.raises(RuntimeError, match="slots are devices of one process, and a DeviceMesh is for several ranks"):
        on_slots(lambda rank: rank.mesh())


def test_a_mesh_has_the_shape_and_names_that_were_asked_for():
    def build(rank):
        mesh = rank.mesh((2, 1), ["a", "b"])
        return tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type

    assert on_threads(build) == [((2, 1), ("a", "b"), "cpu")] * 2


def test_seeded_is_torch_s_seed():
    def draw(rank):
        with rank.seeded(3):
            return torch.rand(1)

    (drawn,) = on_slots(draw)
    torch.manual_seed(3)
    assert drawn == torch.rand(1)
