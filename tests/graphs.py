"""What tests of the graph share."""

from typing import Any

from torch import Tensor


def nodes_of(output: Tensor) -> list[Any]:
    """The nodes of the output's graph, each once."""
    found: dict[Any, None] = {}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return [*found]
