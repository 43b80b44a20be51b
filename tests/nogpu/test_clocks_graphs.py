"""Plain autograd over several devices and side streams raises nothing if it is ordered as torch's documentation asks.

Sums are weighted, because the backward of ``a + b`` gives both inputs the same gradient tensor. torch's engine may add
to it in place on one stream while an operator for the other input still reads it on another stream. The clocks report
that, and they are right: nothing orders the two.
"""

from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from clocked import check_clocks

pytestmark = pytest.mark.devices("sim", "stand-in")

DEVICES, STREAMS = 4, 3

# How a node computes its value from two tensors of one device.
OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: torch.add(a * 0.5, b, alpha=2),
    "matmul": torch.matmul,
    "in place": lambda a, b: (a * 0.5).add_(b, alpha=2),
    "view": lambda a, b: a.t()[:2].repeat(2, 1) * b,
    "dropout": lambda a, b: torch.nn.functional.dropout(a, 0.5) * b,
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, (4,)) * b,
}

nodes = st.lists(
    st.tuples(
        st.sampled_from(sorted(OPERATORS)),
        st.integers(0, 1_000),
        st.integers(0, 1_000),
        st.integers(0, DEVICES - 1),
        st.integers(0, STREAMS - 1),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def streams(request: pytest.FixtureRequest) -> list[list[torch.Stream]]:
    """For each device the default stream and others."""
    kind = request.config.getoption("--devices")
    devices = [torch.device(kind, index) for index in range(DEVICES)]
    return [
        [torch.accelerator.current_stream(device), *(torch.Stream(device) for _ in range(STREAMS - 1))]
        for device in devices
    ]


def use(tensor: torch.Tensor, made_on: torch.Stream, used_on: torch.Stream, wait: bool = True) -> torch.Tensor:
    """The tensor for use on ``used_on``, which waits for it: recorded there, or copied if it is on another device."""
    if made_on.device == used_on.device:
        if made_on != used_on:
            if wait:
                used_on.wait_stream(made_on)
            tensor.record_stream(used_on)
        return tensor
    with made_on, used_on:
        return tensor.to(used_on.device, non_blocking=True)


def run(graph: list, streams: list[list[torch.Stream]]) -> list[torch.Tensor]:
    """Builds the graph, runs backward from all its tensors, and reads all gradients on the default streams."""
    leaves = []
    made: list[tuple[torch.Tensor, torch.Stream]] = []
    for default, *_ in streams:
        leaf = torch.full((4, 4), 0.5, device=default.device, requires_grad=True)
        leaves.append(leaf)
        made.append((leaf, default))
    for name, first, second, device, number in graph:
        stream = streams[device][number]
        inputs = [use(*made[index % len(made)], stream) for index in (first, second)]
        with stream:
            made.append((OPERATORS[name](*inputs), stream))
    home = streams[0][0]
    terms = [use(tensor, stream, home) for tensor, stream in made]
    with home:
        torch.stack([term.sum() for term in terms]).sum().backward()
    return [leaf.grad * 2 for leaf in leaves]


def finish_all() -> None:
    for index in range(DEVICES):
        torch.accelerator.synchronize(index)


@hypothesis.settings(max_examples=1_000)
@hypothesis.given(graph=nodes)
def test_no_false_alarm(streams, graph):
    gradients = run(graph, streams)
    finish_all()
    check_clocks()
    assert all(gradient.isfinite().all() for gradient in gradients)


@hypothesis.settings(max_examples=50)
@hypothesis.given(graph=nodes, device=st.integers(0, DEVICES - 1), numbers=st.permutations(range(STREAMS)))
def test_after_any_such_graph_one_missing_wait_is_found(streams, graph, device, numbers):
    run(graph, streams)
    finish_all()
    made_on, used_on = (streams[device][number] for number in numbers[:2])
    used_on.wait_stream(made_on)
    with made_on:
        made = torch.ones(4, 4, device=made_on.device) * 2
    with used_on, pytest.raises(RuntimeError, match=r"^race: "):
        use(made, made_on, used_on, wait=False) + 1
    with used_on:
        use(made, made_on, used_on) + 1
    finish_all()
