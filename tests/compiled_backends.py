"""A backend of ``torch.compile`` that compiles as ``aot_eager`` does, and counts what it compiles and what then runs.

It knows nothing of the library: what it counts is compared with what the library says, and with one device.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd


class Counting:
    """Pass it as ``backend``. Lists only grow at their ends, so that any thread may append.

    Attributes:
        compiled: the device of each graph that Dynamo has handed over, in order.
        lowered: whether each graph that autograd has made of them is a backward.
        forwards, backwards: the device of each run of such a graph.
    """

    def __init__(self) -> None:
        self.compiled: list[torch.device] = []
        self.lowered: list[bool] = []
        self.forwards: list[torch.device] = []
        self.backwards: list[torch.device] = []
        self._compile = aot_autograd(
            fw_compiler=lambda graph, inputs: self._lower(graph, inputs, False),
            bw_compiler=lambda graph, inputs: self._lower(graph, inputs, True),
            partition_fn=min_cut_rematerialization_partition,
        )

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiled.append(device_of(inputs))
        return self._compile(graph, inputs)

    def by_device(self) -> Counter[torch.device]:
        """How many graphs have been compiled for each device."""
        return Counter(self.compiled)

    def forget_runs(self) -> None:
        self.forwards.clear()
        self.backwards.clear()

    def _lower(self, graph: fx.GraphModule, inputs: Sequence[Any], is_backward: bool) -> Callable[..., Any]:
        self.lowered.append(is_backward)
        device = device_of(inputs)
        runs = self.backwards if is_backward else self.forwards

        def run(*args: Any) -> Any:
            runs.append(device)
            return graph(*args)

        return make_boxed_func(run)


def device_of(inputs: Iterable[Any]) -> torch.device:
    """That of the inputs that have dimensions, which has to be one."""
    devices = {leaf.device for leaf in inputs if isinstance(leaf, Tensor) and leaf.dim() > 0}
    (device,) = devices
    return device
