"""The public path of the forms without a wrapper: `replicate` and `fully_shard` change a module in place.

Names are imported when they are first asked for: the placements of `fully_shard` take torch most of a second to import.
"""

from typing import TYPE_CHECKING

from dataparallel._on_demand import import_on_demand

if TYPE_CHECKING:
    from dataparallel.forms.fully_shard import fully_shard as fully_shard
    from dataparallel.forms.fully_shard_arguments import CPUOffloadPolicy as CPUOffloadPolicy
    from dataparallel.forms.fully_shard_arguments import MixedPrecisionPolicy as MixedPrecisionPolicy
    from dataparallel.forms.fully_shard_arguments import OffloadPolicy as OffloadPolicy
    from dataparallel.forms.fully_sharded_module import FullyShardedModule as FullyShardedModule
    from dataparallel.forms.managed import register_forward_method as register_forward_method
    from dataparallel.forms.replicate import ReplicatedModule as ReplicatedModule
    from dataparallel.forms.replicate import replicate as replicate
    from dataparallel.gradients.comm_hooks import GradBucket as GradBucket

import_on_demand(
    __name__,
    {
        "dataparallel.forms.fully_shard": ("fully_shard",),
        "dataparallel.forms.fully_sharded_module": ("FullyShardedModule",),
        "dataparallel.forms.managed": ("register_forward_method",),
        "dataparallel.forms.fully_shard_arguments": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"),
        "dataparallel.forms.replicate": ("ReplicatedModule", "replicate"),
        "dataparallel.gradients.comm_hooks": ("GradBucket",),
    },
)
