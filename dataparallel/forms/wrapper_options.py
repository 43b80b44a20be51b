"""`WrapperOptions` is the one object that a `DataParallel` has beside torch's attributes; `own_options` returns it."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

from dataparallel.call.options import CallOptions
from dataparallel.devices import resolve
from dataparallel.forms.kept_tensors import KeptTensors
from dataparallel.replicas.compiled.calls import CompileArgument
from dataparallel.replicas.graphs.calls import GraphedReplicas
from dataparallel.replicas.kept_replicas import FreshCopies, KeptReplicas
from dataparallel.replicas.replicate import BUCKET_CAP_MB, cap_in_bytes


class WrapperOptions(CallOptions):
    """What a `DataParallel` has beside torch's attributes: ``model.options``. See `CallOptions`.

    ``chunk_sizes``, ``workers``, ``serial``, ``bucket_cap_mb``, ``scalars`` and ``pad`` may be assigned between calls:
    ``model.options.chunk_sizes = [4, 8]``. The others can be read.

    Attributes:
        compile, sync_batch_norm: as given.
        graphs: the captured graphs of the replicas; ``None`` if there are none. Its ``replicas`` say what was captured,
            and what was not and why.
        compiled: how replicas are compiled, if the argument ``compile`` says so.
        kept: makes the replicas, and keeps those that stay.
    """

    assignable = ("chunk_sizes", "workers", "serial", "bucket_cap_mb", "scalars", "pad")

    compile: bool | dict[str, Any] | None
    sync_batch_norm: bool
    kept: KeptReplicas
    compiled: CompileArgument | None

    def keep_replicas(self, compiled: CompileArgument | None, as_torch: bool, has_graphs: bool = False) -> None:
        """Sets ``compiled`` and ``kept``.

        ``as_torch``: hooks stay functions of the source, and gradients are as `Copies.send` says.
        """
        slots = [resolve(slot) for slot in self.slots]
        fresh = FreshCopies(as_torch)
        tensors = KeptTensors(slots, cap_in_bytes(1), self.cap_bytes, True) if has_graphs else fresh
        kept = KeptReplicas(tensors, compiled, not as_torch, GraphedReplicas() if has_graphs else None)
        vars(self).update(compiled=compiled, kept=kept)

    def __copy__(self) -> WrapperOptions:
        """Returns options with replicas of their own."""
        copied = WrapperOptions.__new__(WrapperOptions)
        vars(copied).update(vars(self), kept=copy.copy(self.kept))
        return copied

    @property
    def graphs(self) -> GraphedReplicas | None:
        """See the class."""
        return self.kept.graphs

    def frozen(self) -> AbstractContextManager[None]:
        """For serving: inside the block replicas are made once and used again as they are, and nothing is sent.

        You promise that the module does not change inside: no values, no attributes, no modules. If it does change,
        replicas do not see it before the end, or only some of them do. Anything that ``forward`` writes to its replica
        stays there until the end, as it does on one device. Calls that run at the same time have their own replicas:
        `dataparallel.replicas.kept_replicas.MOST_FROZEN` sets are kept until the block ends, further ones for one call.

        A call that records a graph raises ``RuntimeError``. Blocks may be nested.
        """
        return self.kept.frozen()


def own_options(wrapper: Any) -> WrapperOptions:
    """Returns what the wrapper has beside torch's attributes. They get the defaults if only torch's have been set."""
    own: WrapperOptions | None = wrapper._dataparallel
    if own is None:
        own = WrapperOptions(wrapper.device_ids, **_DEFAULTS)
        own.keep_replicas(None, wrapper._dataparallel_as_torch)
        own = vars(wrapper).setdefault("_dataparallel", own)  # several threads may call at once
    if own.slots is not wrapper.device_ids:
        vars(own)["slots"] = wrapper.device_ids
    return own


_DEFAULTS: dict[str, Any] = {
    "chunk_sizes": None, "workers": None, "serial": None, "bucket_cap_mb": BUCKET_CAP_MB,
    "scalars": None, "pad": None, "compile": None, "sync_batch_norm": False,
}  # fmt: skip
"""The options of a wrapper whose class has set torch's attributes itself."""
