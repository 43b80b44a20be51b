"""`FullyShardedModule` is the class that `fully_shard` adds: it calls, saves and converts modules, and has settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.forms.form import are_in_one_tree
from dataparallel.forms.fully_shard_arguments import check_reshard
from dataparallel.forms.managed import ManagedModule, SlotsMethod, state_of
from dataparallel.replicas.compiled.calls import CALL
from dataparallel.replicas.plan import UNIT_MODULE


class UnshardHandle:
    """The handle that `FullyShardedModule.unshard` returns."""

    def __init__(self, started: Sequence[tuple[Any, Any]]) -> None:
        self._started = started  # the unit, and what `end_unshard` takes; without devices there is none

    def wait(self) -> None:
        """Makes the current streams wait for the full parameters, and gives them to the module."""
        for unit, ready in self._started:
            unit.end_unshard(ready)


class FullyShardedModule(ManagedModule):
    """The class that `fully_shard` adds to the class of a module. Its methods set how the module's unit behaves.

    Call them on the module itself: inside ``forward`` there is a replica, and there they raise ``RuntimeError``. Where
    the machine has no accelerator and no devices were given they do nothing.
    """

    _why_no_copy = "its parameters are sharded over several devices"
    _instead_of_a_copy = (
        "Save or copy its full state with fully_shard.full_state_dict(module), and load that into a new module"
    )
    _instead_of_a_wrapper = "the outermost module that is fully sharded runs on all slots by itself"

    forward: Any = SlotsMethod("forward")

    @_torch.not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. In a replica its unit is gathered first, so that hooks see full parameters too."""
        unit = vars(self).get(UNIT_MODULE)
        run = super().__call__  # type: ignore[misc]
        if unit is None:
            return run(*args, **kwargs)
        return unit.run(run, *args, **kwargs)

    @property
    @_torch.leave_alone
    def _compiled_call_impl(self) -> Any:
        """The compiled code that torch calls in place of a module. Only replicas have it: the module splits batches.

        In a replica it runs inside of the unit's call, so the compiler sees full parameters and no gathers.
        """
        is_replica = UNIT_MODULE in vars(self)
        return vars(self).get(CALL) if is_replica or not state_of(self).slots else None

    @_compiled_call_impl.setter
    def _compiled_call_impl(self, call: Any) -> None:
        vars(self)[CALL] = call

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # `to` and the like have to change the sharded parameters, because the full ones are freed. All units reshard
        # before anything is converted: one of them may raise.
        for unit in _units(self):
            unit.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    @_torch.not_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ``torch.nn.Module``. Drops gradients of the sharded parameters, also while the module has full ones."""
        for unit in _units(self) if UNIT_MODULE not in vars(self) else ():
            unit.show_sharded()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._reshard_on_source()
        super()._save_to_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._reshard_on_source()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _reshard_on_source(self) -> None:
        # State dicts have sharded parameters, because the full ones are freed and values written to them are lost. The
        # unit's modules below come after this one. A replica's state dict has its own tensors.
        if UNIT_MODULE in vars(self):
            return
        for unit in _units(self, recurse=False):
            # Also while shards are on their way: the host may not write to shards in its memory before they have left.
            # Not otherwise: `reshard` would remove tensors that `assign=True` has registered in the unit's modules.
            if any(slot_unit.is_started for slot_unit in unit.slot_units):
                unit.reshard()

    @_torch.not_traced
    def reshard(self) -> None:
        """Frees the full parameters of this module's unit. The module has the sharded ones again.

        Units of children stay as they are.
        """
        for unit in _units(self, recurse=False):
            unit.reshard()

    @_torch.not_traced
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's unit on all slots, in ``param_dtype`` if its policy has one.

        The module has the full parameters of the first slot until `reshard`, until its next forward frees them, or
        until its next backward ends; at all other times it has the sharded ones, which have the gradients. Units of
        children stay as they are.

        With ``set_reshard_after_forward(False)`` no forward frees them: :doc:`/guide/sharding` shows how to gather once
        for many evaluations. Meanwhile a write to the sharded parameters is seen as for `set_reshard_after_backward`.

        Args:
            async_op: if true, the gather is launched and a handle is returned. Call its ``wait()`` before you use the
                parameters; a forward of the module waits by itself.

        Returns:
            The handle, or ``None`` without ``async_op``.
        """
        async_op = checked("async_op", async_op, bool)
        handle = UnshardHandle([(unit, unit.start_unshard()) for unit in _units(self, recurse=False)])
        if async_op:
            return handle
        handle.wait()
        return None

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Changes nothing: every ``backward()`` ends with its sums, so that its gradients may be used or dropped.

        For programs that call it on FSDP2's modules. For micro-batches see `set_requires_gradient_sync`.
        """
        checked("is_last_backward", is_last_backward, bool)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, recurse: bool = True) -> None:
        """With ``True`` each later ``backward()`` sums gradients into the sharded parameters, as at the beginning.

        With ``False`` full gradients stay on the slots, and the next ``backward()`` with ``True`` adds them. That saves
        the sums, and takes the memory of a full gradient on each slot.

        Args:
            requires_gradient_sync: sum them or not.
            recurse: if true, this also holds for the units of all children.
        """
        _set(self, recurse, requires_gradient_sync=checked("requires_gradient_sync", requires_gradient_sync, bool))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block each ``backward()`` leaves gradients on the slots: see `set_requires_gradient_sync`."""
        before = [(unit, unit.requires_gradient_sync) for unit in _units(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, flag in before:
                unit.requires_gradient_sync = flag

    def set_requires_all_reduce(self, requires_all_reduce: bool, recurse: bool = True) -> None:
        """With ``False`` each later ``backward()`` sums gradients only over devices that have different parameters.

        The next ``backward()`` with ``True`` adds them up over machines that have the same ones too, with a
        ``process_group`` or the first dimension of a ``mesh``. Until then they wait, in memory of the size of the
        shards. ``.grad`` stays as it is or becomes zeros, and ``zero_grad`` drops what waits. Without such machines
        this does nothing.

        Args:
            requires_all_reduce: sum them there or not.
            recurse: if true, this also holds for the units of all children.
        """
        _set(self, recurse, requires_all_reduce=checked("requires_all_reduce", requires_all_reduce, bool))

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Changes what `fully_shard` was given: whether units free their full parameters after forward.

        Full parameters that are kept serve a backward. See `unshard` for evaluations that gather once.

        Args:
            reshard_after_forward: as for `fully_shard`, without ``None``.
            recurse: if true, this also holds for the units of all children.

        Raises:
            TypeError: it is neither a bool nor an int.
            ValueError: it does not divide the number of slots.
        """
        slots, machines = state_of(self).slots, state_of(self).machines
        reshard = check_reshard(reshard_after_forward, len(slots), 1 if machines is None else machines.shard_size)
        _set(self, recurse, is_reshard_automatic=False, reshard_after_forward=reshard)

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """With ``False`` units keep their full parameters after backward, so that the next forward gathers nothing.

        Use this between micro-batches: it takes the memory of all full parameters on each slot. What is written to
        the sharded parameters meanwhile, also through their ``data`` or ``shards``, is gathered by the next forward.
        Call `reshard` after writes that torch does not count: to the ``data`` of a shard, or to a view of the ``data``
        of a parameter.

        Args:
            reshard_after_backward: free them or not.
            recurse: if true, this also holds for the units of all children.
        """
        _set(self, recurse, reshard_after_backward=checked("reshard_after_backward", reshard_after_backward, bool))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Sets which units are gathered ahead in forward: those of ``modules``, after this module's own.

        By default the next unit is, in the order of the last forward. An empty list turns this off, two modules or
        more take more memory.

        Raises:
            ValueError: one is not fully sharded, or is in no tree with this module; the message names it.
        """
        _set(self, False, forward_prefetch=self._units_to_prefetch(modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """As `set_modules_to_forward_prefetch`, for backward: by default in the reverse order of the last forward."""
        _set(self, False, backward_prefetch=self._units_to_prefetch(modules))

    def set_post_optim_event(self, event: torch.Event | Sequence[torch.Event]) -> None:
        """Gives an event that was recorded after the optimizer's step. The next gathers wait for it, and only for it.

        By default they wait for all that was launched on the current streams before the call. Call this on the
        outermost module, before each call: the event is used once.

        Args:
            event: after it all shards have their values. An optimizer steps on each device: pass a list of events, one
                for each, or one event of a stream that has waited for all of them.
        """
        _set(self, False, post_optim_event=event)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the gradients of this unit by ``factor`` when they are summed. At the beginning it is 1: a plain sum.

        Over several machines they are averaged too, so this comes on top.

        Raises:
            TypeError: ``factor`` is no number.
            ValueError: ``factor`` is not above 0.
        """
        _set(self, False, gradient_divide_factor=float(checked("factor", factor, float, above=0)))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With ``False`` backward does not gather this unit: for one whose parameters backward does not read.

        An embedding is an example. The sums of its gradients are made all the same.
        """
        _set(self, False, unshard_in_backward=checked("unshard_in_backward", unshard_in_backward, bool))

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Calls ``hook(shard)`` for each owner's shard of this unit's summed gradients, before it goes to ``.grad``.

        The shard is a flat tensor on the owner's device, in the dtype in which gradients are summed, which is at least
        32 bits wide. It is the sum over slots and, if there are several machines, the mean over machines. The hook may
        change it in place. Over machines the hook is called at the end of the backward, for units in the same order on
        all machines, so it may call collectives of a group of its own; an error of the hook is raised on this machine
        only. On one machine any thread may call the hook, and the stream that adds up gradients is current.

        Raises:
            TypeError: ``hook`` cannot be called.
        """
        _set(self, False, all_reduce_hook=checked("hook", hook, Callable))

    def _units_to_prefetch(self, modules: Sequence[nn.Module]) -> list[Any]:
        if isinstance(modules, nn.Module):
            raise TypeError(f"expected a list of modules; got a {type(modules).__name__}: write [module]")
        for i, module in enumerate(modules):
            what = f"modules[{i}], a {type(module).__name__},"
            if not isinstance(module, FullyShardedModule):
                raise ValueError(f"{what} is not fully sharded, so it has no unit that could be gathered ahead")
            if not are_in_one_tree(self, module):
                raise ValueError(
                    f"{what} is in no fully sharded tree with this {type(self).__name__}; pass modules of one tree, "
                    "after its outermost module was fully sharded"
                )
        return [unit for module in modules for unit in _units(module, recurse=False)]


def _states(module: Any, recurse: bool = True) -> list[Any]:
    """Returns the states that have devices, each once: the module's own and, with ``recurse``, its children's."""
    if UNIT_MODULE in vars(module):
        raise RuntimeError(
            f"this {type(module).__name__} is a replica on one slot; call the methods of fully_shard on the module "
            "itself, outside of forward"
        )
    modules = module.modules() if recurse else [module]
    states = [state_of(each) for each in modules if isinstance(each, FullyShardedModule)]
    return [state for state in {id(state): state for state in states}.values() if state.slots]


def _units(module: Any, recurse: bool = True) -> list[Any]:
    return [state.unit for state in _states(module, recurse)]


def _set(module: Any, recurse: bool, **settings: Any) -> None:
    for unit in _units(module, checked("recurse", recurse, bool)):
        for name, value in settings.items():
            setattr(unit, name, value)
