"""Helpers for tests, of the library and of its users: models, comparisons, ranks, sharded operators.

`models` has small models, one for each feature that replicas must reproduce, and models for tests of sharding; `cases`
has the parts of the first. `parity` compares a module on several slots with the same module on one device, for the
library's models and for your own; `steps` has its comparisons. `ranks` runs tests on slots, on threads and in
processes; `sharding` runs operators on tensors that are sharded in every way. ``dataparallel.testing.pytest`` is a
plugin with fixtures for ranks. `simulate` is that of ``nogpu``, a package of its own for devices without hardware.

Nothing in the library imports this package. Importing it touches no device and does not import torch: each name is
imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from dataparallel._on_demand import import_on_demand

if TYPE_CHECKING:
    from dataparallel.testing.models import MLP as MLP
    from dataparallel.testing.models import ModelArgs as ModelArgs
    from dataparallel.testing.models import RMSNorm as RMSNorm
    from dataparallel.testing.models import StackedMLP as StackedMLP
    from dataparallel.testing.models import Transformer as Transformer
    from dataparallel.testing.ranks import ProcessTest as ProcessTest
    from dataparallel.testing.ranks import Rank as Rank
    from dataparallel.testing.ranks import RanksFailed as RanksFailed
    from dataparallel.testing.ranks import SlotTest as SlotTest
    from dataparallel.testing.ranks import ThreadTest as ThreadTest
    from dataparallel.testing.ranks import run_subtests as run_subtests
    from dataparallel.testing.ranks import skip_unless_devices as skip_unless_devices
    from dataparallel.testing.ranks import skip_unless_distributed as skip_unless_distributed
    from dataparallel.testing.ranks import with_comms as with_comms
    from dataparallel.testing.sharding import Checked as Checked
    from dataparallel.testing.sharding import OperatorDiffers as OperatorDiffers
    from dataparallel.testing.sharding import ShardingConverter as ShardingConverter
    from dataparallel.testing.sharding import check_op as check_op
    from nogpu import simulate as simulate

import_on_demand(
    __name__,
    {
        "dataparallel.testing.models": ("MLP", "ModelArgs", "RMSNorm", "StackedMLP", "Transformer"),
        "dataparallel.testing.ranks": (
            "ProcessTest",
            "Rank",
            "RanksFailed",
            "SlotTest",
            "ThreadTest",
            "run_subtests",
            "skip_unless_devices",
            "skip_unless_distributed",
            "with_comms",
        ),
        "dataparallel.testing.sharding": ("Checked", "OperatorDiffers", "ShardingConverter", "check_op"),
        "nogpu": ("simulate",),
    },
)
