"""What ``fully_shard`` does with other machines before it changes anything: checks, and rank 0's values for all.

With a group or a mesh all ranks apply the form to the same modules in the same order. Each time they compare what they
are about to do. ``composable.fully_shard_form`` calls this file; it imports the room of machines only if there are any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel.composable.managed import own_modules
from dataparallel.modules.plan import dotted
from dataparallel.units.over_machines import MachinesOfTree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dataparallel.machines.group import Machines

__all__ = ["Start", "send_values", "start_over_machines"]


class Start:
    """The machines of one application of the form.

    Args:
        shard, replicate: as ``machines.arguments.shard_and_replicate_groups`` gives them.

    Attributes:
        given: both.
    """

    def __init__(self, shard: Machines | None, replicate: Machines | None) -> None:
        self.given = shard, replicate
        self._shard, self._replicate = _for_start(shard), _for_start(replicate)
        self._groups = [machines for machines in (self._shard, self._replicate) if machines is not None]

    @property
    def parts(self) -> int:
        """Over how many machines parameters are sharded."""
        return 1 if self._shard is None else self._shard.size

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around checks that this rank makes by itself: if one fails, the others raise instead of waiting for it."""
        if not self._groups:
            yield
            return
        from dataparallel.machines.start import failing_together

        with ExitStack() as stack:
            for machines in self._groups:
                stack.enter_context(failing_together(machines))
            yield

    def machines(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[tuple[str, nn.Parameter]],
        slots: Sequence[torch.device],
        settings: Mapping[str, Any],
    ) -> MachinesOfTree | None:
        """The machines of the tree, after all ranks have compared what they are about to do.

        Raises:
            dataparallel.machines.errors.MachinesDiffer: ranks differ; the message names what differs and where.
        """
        if not self._groups:
            return None
        from dataparallel.machines.start import describe

        description = describe(dict(parameters), _buffers(modules), slots, settings)
        names = " and ".join(type(module).__name__ for module in modules)
        self._compare(f"fully_shard of {names}", description)
        machines = MachinesOfTree(*self.given)
        machines.make_communicators(slots)
        return machines

    def _compare(self, what: str, description: Mapping[str, Any]) -> None:
        from dataparallel.machines.start import compare

        shard, replicate = self._shard, self._replicate
        if shard is None or replicate is None:
            compare(self._groups[0], what, description)
            return
        # A group knows only of its own ranks, and all have to raise if any do.
        try:
            compare(shard, what, description)
        except BaseException as error:
            replicate.line.signal_failure(error)
            raise
        failure: BaseException | None = None
        try:
            compare(replicate, what, description)
        except BaseException as error:
            failure = error
        last = shard.line.begin("the start in both dimensions", what).end([], failure)
        if failure is not None:
            raise failure
        last.wait()


def start_over_machines(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None, slots: Sequence[torch.device]
) -> Start:
    """What the arguments mean.

    Raises:
        TypeError, ValueError, RuntimeError: as ``machines.arguments.shard_and_replicate_groups``.
    """
    if process_group is None and mesh is None:
        return Start(None, None)
    from dataparallel.machines.arguments import shard_and_replicate_groups

    return Start(*shard_and_replicate_groups(process_group, mesh, slots))


def send_values(machines: MachinesOfTree, modules: Sequence[nn.Module], parameters: Mapping[str, Tensor]) -> None:
    """Gives these parameters and the buffers of the modules the values of the first rank, on all ranks.

    Those on meta have no values yet: ``units.over_machines`` sends them later.
    """
    from dataparallel.machines.start import send_values as send

    named = {**parameters, **_buffers(modules)}
    with_values = {name: tensor for name, tensor in named.items() if not tensor.is_meta}
    shard, replicate = machines.given
    for group in (
        replicate,
        shard,
    ):  # those that the first rank replicates with, then all that each of them shards with
        if group is not None:
            send(group.own("start"), with_values)


def _for_start(machines: Machines | None) -> Machines | None:
    """Failures of the start are told by another thread, which must not meet what the user sends."""
    return None if machines is None else machines.own("start")


def _buffers(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        dotted(name, key): buffer
        for name, module in own_modules(modules)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }
