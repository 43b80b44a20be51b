"""``replicate(module)``: the module itself runs on all slots, without a wrapper around it.

The class of the module becomes a subclass whose ``forward`` scatters inputs, runs replicas and gathers outputs. Callers
of the module and hooks on it see one call on the whole batch. This file has the part that a user touches: arguments and
the class. ``composable.replicate_state`` has the four stages of a call, ``composable.on_slots`` has methods that run on
replicas, and ``composable.contract`` has the rules of all forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dataparallel.composable.contract import Form
from dataparallel.composable.managed import ManagedModule
from dataparallel.composable.on_slots import OnSlots, state_of
from dataparallel.composable.replicate_state import ReplicateState
from dataparallel.devices import DeviceLike, resolve_output, resolve_slots
from dataparallel.replicate import BUCKET_CAP_MB, cap_in_bytes

__all__ = ["ReplicatedModule", "replicate"]


class ReplicatedModule(ManagedModule):
    """The class that `replicate` adds to the class of a module."""

    forward = OnSlots("forward")

    def set_requires_gradient_sync(self, flag: bool) -> None:
        """With ``True`` each later ``backward()`` sums gradients into the module's parameters, as at the beginning.

        With ``False`` gradients stay on the slots: a parameter's ``.grad`` is that of slot 0, and the next
        ``backward()`` with ``True`` adds the others. If you set a ``.grad`` to ``None``, to another tensor or to zeros
        (``zero_grad()``), the gradients that wait for it are thrown away. The module looks for this at its next forward
        or backward. It does not notice a backward that does not lead through it, for example one of a loss on its
        parameters alone. Let no such backward come between.
        """
        state_of(self).tensors.sums.are_on = flag

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block each ``backward()`` leaves gradients on the slots: see `set_requires_gradient_sync`."""
        sums = state_of(self).tensors.sums
        before, sums.are_on = sums.are_on, False
        try:
            yield
        finally:
            sums.are_on = before


def _prepare(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    devices: Sequence[DeviceLike] | None = None,
    ignored_params: Iterable[Tensor] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    first_bucket_mb: float = 1,
    broadcast_buffers: bool = True,
) -> ReplicateState:
    """Makes ``module`` run on all devices, in place: splits the batch, runs a replica on each slot, joins the outputs.

    The module stays the same object with the same parameters, so optimizers, ``state_dict`` and the training loop are
    those of one device. Its class becomes a subclass of `ReplicatedModule` and of its former class. The devices of its
    parameters are checked at each call, so it may be moved, loaded or materialised before. Hooks on the module itself
    run once per call, on the whole batch; hooks on submodules run in each replica. ``replicate.state(module)`` returns
    its state.

    A ``backward()`` must not run in one thread while another thread calls the module, unless both threads call the
    module: see the limits. The call writes current values into the replicas, which the backward pass may still read.

    Args:
        module: a module that has a ``forward`` and no form yet. It has to be on the first slot when it is called.
        ignored_modules: modules below it that replicas share, with all their parameters: these are not copied and their
            gradients are not summed. You make sure that several threads can use them at the same time, with tensors
            on the device of each slot.
        devices: the slots: ints (accelerators), strings, ``torch.device``; one device may be listed several times,
            ``["cpu", "cpu"]`` are two slots on the CPU. Default: all accelerators; without any the module just runs.
        ignored_params: single parameters that replicas share.
        output_device: the device of the outputs; default the first slot, -1 or ``"cpu"`` for the CPU.
        dim: the batch dimension of inputs and outputs.
        bucket_cap_mb: size in MiB of the buckets in which parameters travel, and their gradients back.
        first_bucket_mb: size in MiB of the bucket whose gradients come first.
        broadcast_buffers: if true, replicas get the module's buffers at each call, else only when they are made.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, has no ``forward``, or is a wrapper or a ScriptModule; ``dim`` is no int; an
            entry of ``ignored_modules`` is no module.
        ValueError: devices as for `dataparallel.DataParallel`; a bucket size is not above 0; a module or parameter to
            ignore is no part of ``module``.
        RuntimeError: the module, a parent, a child or one of its parameters has a form already.
    """
    _check_kind(module)
    slots = resolve_slots(devices)
    if slots:
        resolve_output(output_device, slots)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim={dim!r}: the batch dimension is an int")
    for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
        if not size > 0:
            raise ValueError(f"{name}={size}: a bucket holds more than 0 MiB")
    modules, parameters = _check_ignored(module, [*(ignored_modules or ())], [*(ignored_params or ())])
    return ReplicateState(
        module,
        slots,
        output_device=output_device,
        dim=dim,
        cap_bytes=cap_in_bytes(bucket_cap_mb),
        first_bytes=cap_in_bytes(first_bucket_mb),
        broadcast_buffers=broadcast_buffers,
        ignored_modules=modules,
        ignored_parameters=parameters,
    )


_prepare.__name__ = _prepare.__qualname__ = "replicate"
replicate = Form(_prepare, ReplicatedModule)


def _check_kind(module: nn.Module) -> None:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"cannot replicate a {name} in place: the class of a ScriptModule belongs to TorchScript and cannot be "
            "changed. Replicate the module that is not scripted, or wrap this one in dataparallel.DataParallel"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"the module is wrapped already, in a {name}; replicate its .module instead: forms do not nest")
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise TypeError(
            f"a {name} has no forward of its own, so there is no call that could be split; replicate the module that "
            "holds it"
        )


def _check_ignored(
    module: nn.Module, modules: list[nn.Module], parameters: list[Tensor]
) -> tuple[list[nn.Module], list[Tensor]]:
    """The ignored modules, and all ignored parameters: those of ignored modules too."""
    below = {id(child) for child in module.modules()} - {id(module)}
    own = {id(parameter) for parameter in module.parameters()}
    for i, child in enumerate(modules):
        if not isinstance(child, nn.Module):
            raise TypeError(f"ignored_modules[{i}] is {child!r}, which is no module; slots are named: devices=[...]")
        if id(child) not in below:
            raise ValueError(f"ignored_modules[{i}], a {type(child).__name__}, is not below the module to replicate")
    for i, parameter in enumerate(parameters):
        if id(parameter) not in own:
            raise ValueError(f"ignored_params[{i}] is no parameter of the module to replicate")
    return modules, [*parameters, *(parameter for child in modules for parameter in child.parameters())]
