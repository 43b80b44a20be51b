"""One process drives every device of the machine: ``model = DataParallel(model)``.

The public names, nothing else. A *room* is a folder or a file of this package. It imports only from rooms below it
(``tests/test_floors.py``).
Importing this package touches no device, starts no thread, compiles nothing, and does not import torch: each name and
each room is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from dataparallel._on_demand import import_on_demand
from dataparallel._version import __version__ as __version__

if TYPE_CHECKING:
    from dataparallel import nn as nn
    from dataparallel import peers as peers
    from dataparallel.batches.gather import gather as gather
    from dataparallel.batches.scatter import scatter as scatter
    from dataparallel.batches.scatter import scatter_kwargs as scatter_kwargs
    from dataparallel.batches.structures import PerReplica as PerReplica
    from dataparallel.batches.structures import whole as whole
    from dataparallel.call.parallel_apply import parallel_apply as parallel_apply
    from dataparallel.forms.data_parallel import DataParallel as DataParallel
    from dataparallel.forms.data_parallel import data_parallel as data_parallel
    from dataparallel.forms.prefetch import prefetch as prefetch
    from dataparallel.replicas.replicate import replicate as replicate
    from dataparallel.samples import samples as samples
    from dataparallel.testing.machine_check.run import check as check

import_on_demand(
    __name__,
    {
        "dataparallel.forms.data_parallel": ("DataParallel", "data_parallel"),
        "dataparallel.call.parallel_apply": ("parallel_apply",),
        "dataparallel.forms.prefetch": ("prefetch",),
        "dataparallel.replicas.replicate": ("replicate",),
        "dataparallel.samples": ("samples",),
        "dataparallel.batches.gather": ("gather",),
        "dataparallel.batches.scatter": ("scatter", "scatter_kwargs"),
        "dataparallel.batches.structures": ("PerReplica", "whole"),
        "dataparallel.testing.machine_check.run": ("check",),
    },
    others=("__version__", "nn", "peers"),
)
