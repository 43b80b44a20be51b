"""The paths by which users import: those of ``torch.nn.parallel``'s stages, and the rooms that are public."""

import importlib

import pytest

import dataparallel

STAGES = {
    "data_parallel": ["DataParallel", "data_parallel"],
    "scatter_gather": ["gather", "scatter", "scatter_kwargs", "whole"],
    "replicate": ["replicate"],
    "parallel_apply": ["parallel_apply"],
    "prefetch": ["prefetch"],
    "samples": ["samples"],
}


@pytest.mark.parametrize("room", STAGES)
def test_a_stage_is_imported_from_its_room(room: str) -> None:
    module = importlib.import_module(f"dataparallel.{room}")
    for name in STAGES[room]:
        assert getattr(module, name) is getattr(dataparallel, name)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("comm", "broadcast broadcast_coalesced gather reduce_add reduce_add_coalesced scatter using"),
        ("peers", "all_gather all_reduce barrier broadcast checkpoint count index reduce_scatter"),
        ("nn", "BatchNorm SyncBatchNorm"),
        ("batch_types", "register_batch register_container"),
        ("composable", "replicate register_forward_method"),
        ("composable", "MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy"),
        ("composable", "fully_shard FullyShardedModule"),
        ("sharded", "ShardedTensor Shard Replicate distribute_tensor"),
        ("testing", "simulate"),
        ("testing", "ProcessTest ThreadTest SlotTest Rank RanksFailed with_comms run_subtests"),
        ("testing", "skip_unless_devices skip_unless_distributed"),
        ("testing.ranks", "on_processes on_slots on_threads"),
        ("testing.pytest", "on_processes on_slots on_threads"),
    ],
)
def test_public_names_are_where_users_import_them(path: str, names: str) -> None:
    module = importlib.import_module(f"dataparallel.{path}")
    assert [name for name in names.split() if not hasattr(module, name)] == []
