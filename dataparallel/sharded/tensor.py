"""`ShardedTensor`: one ``torch.Tensor`` whose shards lie on several devices of this process.

It has the shape, dtype and gradient of the full tensor. It has no memory of its own: its shards hold the values. One
thread runs an operator for all devices, once for each owner, on the owner's shard. ``sharded.operators`` has the
operators; any other raises ``NotImplementedError``, which names `full_tensor`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.utils.hooks import warn_if_has_hooks

from dataparallel import _torch
from dataparallel.devices import DeviceLike, current_device, resolve
from dataparallel.sharded import operators
from dataparallel.sharded.order import ordered_in_backward, wait_for_host_reads
from dataparallel.sharded.placements import Placement, after_loading, over_of
from dataparallel.sharded.shards import copied_to, copy_into, empty_shards, gather_full, split_into
from dataparallel.threads.meetings import here

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Machines


Taker: TypeAlias = Callable[[Any, Tensor], object]
"""Takes a parameter and a part of its gradient, in a backward."""


class _Replacement(OrderedDict[int, Callable[[Any], Any]]):
    """What the engine runs in place of ``waiting``, the hooks of users. It is where torch keeps hooks.

    Attributes of a tensor would not do: ``Module.to_empty`` exchanges them, but leaves the hooks.
    """

    waiting: Any = None


class WaitingHooks:
    """A descriptor for the hooks of one kind on a tensor. The engine runs them until `replace` is called."""

    def __init__(self, of_torch: Any) -> None:
        self._of_torch = of_torch

    def __get__(self, tensor: Any, owner: type) -> Any:
        hooks = self if tensor is None else self._of_torch.__get__(tensor)
        return hooks.waiting if isinstance(hooks, _Replacement) else hooks

    def __set__(self, tensor: Any, hooks: Any) -> None:
        present = self._of_torch.__get__(tensor)
        if isinstance(present, _Replacement):
            present.waiting = hooks
        else:
            self._of_torch.__set__(tensor, hooks)

    def replace(self, tensor: Any, hook: Callable[[Any], Any]) -> None:
        """Has the engine run ``hook`` in place of the tensor's hooks, whose handles work as before."""
        replacement = _Replacement({0: hook})
        replacement.waiting = self.__get__(tensor, type(tensor))
        self._of_torch.__set__(tensor, replacement)


ON_GRADIENT = WaitingHooks(_torch.BACKWARD_HOOKS)
AFTER_ACCUMULATION = WaitingHooks(_torch.POST_ACCUMULATE_GRAD_HOOKS)


def hand_over(parameter: Any, find_taker: WeakMethod[Callable[[], Taker | None]]) -> None:
    """Hands over what the engine would accumulate in ``parameter.grad``, and lets the parameter's hooks wait.

    Where a loss uses a parameter itself, as a penalty on weights does, the engine brings a part of its gradient at any
    time of the backward. Hooks have to see the whole gradient, once.

    ``find_taker`` is called in each backward. If it returns ``None`` or is gone, and in a backward with
    ``create_graph=True`` or of ``torch.autograd.grad``, the engine does what it does for any tensor.
    """

    def taker() -> Taker | None:
        find = find_taker()
        return None if find is None or torch.is_grad_enabled() else find()

    @_torch.not_traced
    def on_gradient(gradient: Tensor) -> Tensor | None:
        node, take = _torch.current_node(), taker()
        if take is None or _torch.is_returned(node):
            for hook in [*(_torch.hooks_of(node.variable) or {}).values()]:
                returned = hook(gradient)
                gradient = gradient if returned is None else returned
            return gradient

        def before_accumulation(gradients: tuple[Tensor | None]) -> tuple[None]:
            if gradients[0] is not None:  # otherwise another thread's hook on this node has taken it
                handle.remove()
                take(node.variable, gradients[0])
            return (None,)

        handle = node.register_prehook(before_accumulation)  # runs next, and leaves nothing to accumulate
        return None

    @_torch.not_traced
    def after_accumulation(parameter: Any) -> None:
        if taker() is None:
            for hook in [*(_torch.hooks_after_accumulation_of(parameter) or {}).values()]:
                hook(parameter)

    ON_GRADIENT.replace(parameter, on_gradient)
    AFTER_ACCUMULATION.replace(parameter, after_accumulation)


_INTERNAL = {"_shards", "_placement", "_devices", "_overwrites"}
# torch's descriptors, which the class overrides. Type checkers take them for their values.
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data


class ShardedTensor(Tensor):
    """A tensor whose shards lie on several devices.

    Args:
        shards: a tensor for each owner, on one device each, without a graph, of one dtype, and of the shapes that
            ``placements.shard_shapes`` gives. They are not copied and not checked.
        placement: how the full tensor is divided.
        shape: of the full tensor.
        devices: the owners, if the shards are not on them now (offloaded to the CPU, on meta).
        requires_grad: as for any tensor.
    """

    _shards: tuple[Tensor, ...]
    _placement: Placement
    _devices: tuple[torch.device, ...]
    _overwrites = 0
    """How often ``zero_``, ``fill_`` or ``copy_`` has written to it, by ``zero_grad`` for example."""

    _backward_hooks: Any = ON_GRADIENT
    _post_accumulate_grad_hooks: Any = AFTER_ACCUMULATION

    __torch_function__: Any = _torch.disabled_torch_function

    @staticmethod
    def __new__(
        cls,
        shards: Sequence[Tensor],
        placement: Placement,
        shape: Sequence[int],
        devices: Sequence[torch.device] | None = None,
        requires_grad: bool = False,
    ) -> ShardedTensor:
        """It runs for every result of an operator, so it checks nothing."""
        first = shards[0]
        made: ShardedTensor = _torch.make_wrapper_subclass(
            cls, torch.Size(shape), dtype=first.dtype, device=first.device, requires_grad=requires_grad
        )
        _torch.refuse_data_pointers(made)
        made._shards, made._placement = tuple(shards), placement
        if devices is None:
            devices = [shard.device for shard in shards]
        made._devices = devices if isinstance(devices, tuple) else tuple(devices)
        return made

    @classmethod
    @_torch.not_traced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return operators.run(cls._find_operator(func), func, args, kwargs or {})

    _find_operator = staticmethod(operators.by_table)

    # ---- shards, owners and placement --------------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The shard of each owner, without a graph. Writing to a shard writes to the tensor."""
        wait_for_host_reads()
        return self._shards

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The owners. One device may be listed several times. The shards may be elsewhere: on the CPU or on meta."""
        return self._devices

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where code that asks should compute: the replica's device in its forward and recomputations.

        Models ask their first parameter where to make a tensor, and in a replica that parameter may not be gathered.
        Elsewhere the device of the first shard.
        """
        first = self._shards[0].device
        if first.type == "meta" or (here() is None and not _torch.is_in_backward()):
            return first
        computing = current_device(like=self._devices[0])
        return computing if computing in self._devices else first

    @property
    def over(self) -> Machines | None:
        """The machines over which the tensor is sharded, or ``None``. Its shards and devices are those of this one."""
        return over_of(self._devices)

    @property
    def placement(self) -> Placement:
        """How the full tensor is divided: ``Shard(dim)`` or ``Replicate()``."""
        return self._placement

    def full_tensor(self, device: DeviceLike | None = None) -> Tensor:
        """The full tensor on one device, in memory of its own and without a graph.

        On the CPU the result is complete when the call returns; elsewhere it is ordered on the current streams. Over
        machines all of them call this, and each gets the full tensor.

        Args:
            device: default: where the first shard is, which is the first owner unless the shards have been moved.

        Raises:
            TypeError, ValueError: as ``devices.resolve``.
        """
        target = self._shards[0].device if device is None else resolve(device)
        return gather_full(self._shards, self._placement, self.shape, target, self.over)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        places = [str(shard.device) for shard in self._shards]
        owners = [str(device) for device in self._devices]
        over = "" if self.over is None else f" of {self.over.describe()}"
        moved_to = "" if places == owners else f", now on {places[0] if len({*places}) == 1 else places}"
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, placement={self._placement!r}, "
            f"devices={owners}{over}{moved_to}{gradient})"
        )

    # ---- gradient and data -------------------------------------------------------------------------------------------

    @property
    def grad(self) -> ShardedTensor | None:
        """The gradient, divided as the tensor is.

        Setting the gradient to a tensor that is divided in another way, or not at all, raises ``TypeError`` or
        ``ValueError``. Only a backward pass may leave such a gradient here, as the backward of ``(p * 2).sum()`` does:
        its operators have only plain arguments. The first read divides that gradient.
        """
        gradient = _GRAD.__get__(self)
        if gradient is not None and not is_divided_alike(gradient, self):
            if gradient.requires_grad:
                raise RuntimeError(
                    "the gradient of a sharded tensor came undivided from a backward with create_graph=True, and its "
                    "graph would be lost if it were divided: use torch.autograd.grad, which returns it as it is"
                )
            with torch.no_grad(), ordered_in_backward({shard.device for shard in self._shards}):
                divided = divided_like(gradient, self)
            _GRAD.__set__(self, divided)
            gradient = _GRAD.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            _check_divided_alike("the gradient of", gradient, self)
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)

    @property
    def data(self) -> ShardedTensor:
        """A tensor that shares the shards and has no graph, as for any tensor.

        After ``a.data = b`` both share the shards of b. A b that has not the shape, owners and placement of a raises
        ``TypeError`` or ``ValueError``.
        """
        data: ShardedTensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, other: Tensor) -> None:
        divided = _check_divided_alike("the data of", other, self)
        _DATA.__set__(self, divided)
        self._shards = divided._shards

    # ---- copies, files -----------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"_shard_{index}" for index in range(len(self._shards))]
        return names, (self._placement, self._devices, self.requires_grad)

    @classmethod
    def __tensor_unflatten__(
        cls, inner_tensors: dict[str, Tensor], context: Any, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> ShardedTensor:
        placement, devices, requires_grad = context
        shards = [inner_tensors[f"_shard_{index}"] for index in range(len(inner_tensors))]
        return cls(shards, placement, outer_size, devices, requires_grad)

    def __getattr__(self, name: str) -> Tensor:
        # torch reads the shards by the names that __tensor_flatten__ gives.
        index = name.removeprefix("_shard_")
        if index != name and index.isdecimal() and int(index) < len(self._shards):
            return self._shards[int(index)]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            copied: ShardedTensor = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError(
                "only leaves of the graph can be copied by deepcopy; this sharded tensor is the result of an operator: "
                "copy its .detach()"
            )
        with torch.no_grad():
            shards = [shard.clone() for shard in self._shards]
        made = type(self)(shards, self._placement, self.shape, self._devices, self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        made.__dict__.update(copy.deepcopy(self._attributes_and_mark(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.over is not None:
            raise TypeError(
                f"{self!r} cannot be pickled: this machine has a part of its values only. Save the plain tensors of "
                "fully_shard.full_state_dict(model), which all machines call, or full_tensor()"
            )
        warn_if_has_hooks(self)
        dim = None if isinstance(self._placement, Replicate) else self._placement.dim
        owners = [str(device) for device in self._devices]
        arguments = ([*self._shards], dim, tuple(self.shape), owners, self.requires_grad, self._attributes_and_mark())
        return rebuild, arguments

    def user_attributes(self) -> dict[str, Any]:
        """The Python attributes that users have set."""
        return {name: value for name, value in self._attributes_and_mark().items() if name != "_is_param"}

    def _attributes_and_mark(self) -> dict[str, Any]:
        """What users have set, and torch's mark of a parameter."""
        return {name: value for name, value in vars(self).items() if name not in _INTERNAL}

    def module_load(self, other: Tensor, assign: bool = False) -> Tensor:
        """The tensor that ``Module.load_state_dict`` swaps with this one, if torch's setting asks for swaps.

        A plain ``other`` is divided as this tensor is.
        """
        if not assign:
            self.copy_(other)
            other = self
        return other.detach() if isinstance(other, ShardedTensor) else divided_like(other, self)


def is_divided_alike(one: Tensor, other: ShardedTensor) -> bool:
    """True if both are sharded, with the same owners, placement and shape."""
    return (
        isinstance(one, ShardedTensor)
        and (one._devices is other._devices or one._devices == other._devices)
        and (one._placement is other._placement or one._placement == other._placement)
        and one.shape == other.shape
    )


def _check_divided_alike(role: str, tensor: object, like: ShardedTensor) -> ShardedTensor:
    """Returns ``tensor``, or raises if it is not sharded as ``like`` is. ``role`` begins the message."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{role} a sharded tensor is a sharded tensor; got {type(tensor).__name__}")
    if isinstance(tensor, ShardedTensor) and is_divided_alike(tensor, like):
        return tensor
    owners = [str(device) for device in like._devices] if like.over is None else like._devices
    how = f"distribute_tensor(tensor, {owners}, {like._placement!r})"
    if not isinstance(tensor, ShardedTensor):
        raise TypeError(
            f"{role} a sharded tensor must be sharded as it is; got a plain tensor of shape {tuple(tensor.shape)} on "
            f"{tensor.device}: pass {how}, or write into the one that is there with copy_"
        )
    raise ValueError(f"{role} {like!r} must be sharded as it is; got {tensor!r}: pass {how}")


def fill_shards(
    shards: Sequence[Tensor], placement: Placement, tensor: Tensor, over: Machines | None, non_blocking: bool = False
) -> None:
    """Copies the values of ``tensor``, plain or sharded in any way, into shards with this placement.

    A tensor that is divided in another way is gathered first, on the device of the first shard.
    """
    if isinstance(tensor, ShardedTensor):
        if (tensor._placement, len(tensor._shards), tensor.over) == (placement, len(shards), over):
            for shard, source in zip(shards, tensor._shards, strict=True):
                if shard.numel():
                    copy_into(shard, source, non_blocking)
            return
        tensor = tensor.full_tensor(shards[0].device)
    split_into(shards, placement, tensor.detach(), non_blocking, over)


def divided_like(tensor: Tensor, like: ShardedTensor) -> ShardedTensor:
    """The values of ``tensor``, plain or sharded in any way, divided as ``like`` is, with shards placed alike."""
    if tensor.shape != like.shape:
        raise ValueError(f"expected a tensor of the shape {tuple(like.shape)} of {like!r}; got {tuple(tensor.shape)}")
    return divided_on_owners_of(tensor, like, like._placement)


def divided_on_owners_of(
    tensor: Tensor, like: ShardedTensor, placement: Placement, places: Sequence[torch.device] | None = None
) -> ShardedTensor:
    """The values of ``tensor``, plain or sharded in any way, with this placement and the owners of ``like``.

    ``places``: the devices of the new shards. Default: the devices of the shards of ``like``.
    """
    places = [shard.device for shard in like._shards] if places is None else places
    shards = empty_shards(tensor.shape, placement, places, tensor.dtype, like.over)
    fill_shards(shards, placement, tensor, like.over)
    return ShardedTensor(shards, placement, tensor.shape, like._devices)


def rebuild(
    shards: Sequence[Tensor],
    dim: int | None,
    shape: Sequence[int],
    owners: Sequence[str],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> ShardedTensor:
    """Makes the tensor that was pickled. Files name this function, so its name and arguments must not change.

    ``map_location`` decides where the shards are. ``placements.after_loading`` says which devices own them then.
    """
    placement = Replicate() if dim is None else Shard(dim)
    places = [shard.device for shard in shards]
    devices = after_loading([torch.device(owner) for owner in owners], places)
    if all(place.type not in ("cpu", "meta") for place in places):
        shards = [copied_to(device, shard) for device, shard in zip(devices, shards, strict=True)]
    made = ShardedTensor(shards, placement, shape, devices, requires_grad)
    made.__dict__.update(attributes)
    return made


torch.serialization.add_safe_globals([rebuild])
