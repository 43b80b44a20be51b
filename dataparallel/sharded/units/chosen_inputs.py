"""`reach_parameters` lets ``backward(inputs=[...])`` reach sharded parameters; ``torch.autograd.grad`` refuses them.

A graph has no sharded parameters, but the nodes that pass gradients to their units (``nodes``). So the engine is asked
for the leaves behind these nodes instead, and the gradients of the units' other parameters are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.pass_of_backward import running_pass
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.nodes import CHOSEN, Receiver, ToOwners


def reach_parameters() -> None:
    """Wraps the function with which torch starts its engine, once."""
    _torch.wrap_engine(lambda run_engine: partial(_run_engine, run_engine))


@_torch.not_traced
def _run_engine(
    run_engine: Callable[..., Any],
    outputs: Sequence[Any],
    grads: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    chosen = {id(each) for each in inputs if isinstance(each, (ShardedTensor, ReplicaParameter))}
    nodes = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs] if chosen else []
    roots = [node for node in nodes if node is not None]
    leaves = [leaf for receiver, leaf in _receivers_behind(roots) if receiver.takes_any(chosen)]
    if not leaves:
        return run_engine(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
    if not kwargs["accumulate_grad"]:
        raise RuntimeError(
            "torch.autograd.grad cannot return gradients of sharded parameters, which are summed when the backward has "
            "ended: call loss.backward(inputs=[...]) with these parameters, and read their .grad"
        )
    # A backward of another thread through the same units has all gradients.
    handles = [root.register_prehook(lambda _: running_pass().contents.update({CHOSEN: chosen})) for root in roots]
    kept = [each for each in inputs if not isinstance(each, ReplicaParameter)]  # full parameters have no `.grad`
    try:
        return run_engine(outputs, grads, retain_graph, create_graph, (*kept, *leaves), *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _receivers_behind(roots: Sequence[Any]) -> Iterator[tuple[Receiver, Any]]:
    """Finds the nodes of units behind these nodes: yields their receivers, each with the leaf behind its node."""
    seen: set[Any] = set()
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
        if getattr(type(node), "_forward_cls", None) is ToOwners and (receive := node.receive()) is not None:
            yield receive.__self__, node.next_functions[0][0].variable
