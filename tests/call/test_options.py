"""An option means the same in each form that has it, and the reference says which form has it."""

import copy
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, data_parallel, prefetch
from dataparallel.composable import fully_shard, register_forward_method, replicate
from each_form import Form, frozen, replicating_forms, whole

TABLE = Path(__file__).parents[2] / "docs" / "api.rst"


class Net(nn.Module):
    """It notes the threads of its replicas, and how many run at a time, in lists that any thread may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        self.threads: list[int] = []
        self.running: list[int] = []
        self.counts: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.get_ident())
        self.running.append(0)
        self.counts.append(len(self.running))
        output: Tensor = self.layers(x)
        self.running.pop()
        return output


@pytest.fixture
def single(root: torch.device) -> Net:
    torch.manual_seed(0)
    return Net().double().to(root)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)


def gradients(model: nn.Module) -> list[Tensor]:
    return [whole(parameter.grad).cpu() for parameter in model.parameters()]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, check_device=False)


def test_both_names_of_the_slots_are_taken(form: Form, single: Net, slots: list, x: Tensor) -> None:
    wraps = {"by_wrapper": DataParallel, "replicated": replicate, "sharded_whole": fully_shard}[form.__name__]
    for name in ("devices", "device_ids"):
        model = wraps(copy.deepcopy(single).eval(), **{name: slots})
        close(model(x), single.eval()(x))
    with pytest.raises(ValueError, match=r"device_ids=.* and devices=.*: these are two names of one argument"):
        wraps(single, devices=slots, device_ids=slots)
    close(data_parallel(single, x, devices=slots), single(x))


@pytest.mark.parametrize("options", [{"serial": True}, {"workers": 1}], ids=str)
def test_how_many_replicas_run_and_where(
    options: dict[str, Any], form: Form, single: Net, slots: list, x: Tensor
) -> None:
    model = form(single, slots, **options)
    for _ in range(3):
        model(x).sum().backward()
    assert {*single.counts} == {1}
    assert "workers" in options or {*single.threads} == {threading.get_ident()}


class Sizes(nn.Linear):
    """It returns how many samples each replica gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_tensor([len(x)])


def test_chunk_sizes_may_be_assigned_between_calls(form: Form, slots: list, root: torch.device) -> None:
    """That results do not depend on them: the state machine."""
    model = form(Sizes(4, 5).to(root), slots, chunk_sizes=[1, 4, 2])
    state: Any = {"replicated": replicate.state, "sharded_whole": fully_shard.state}.get(form.__name__)
    options = (model if state is None else state(model)).options
    for chunk_sizes, sizes in (([2, 2, 3], [2, 2, 3]), ([3.0, 1, 3], [3, 1, 3]), (None, [3, 3, 1])):
        options.chunk_sizes = chunk_sizes
        assert model(torch.zeros(7, 4, device=root)).tolist() == sizes
    with pytest.raises(ValueError, match="has 2 entries for 3 slots"):
        options.chunk_sizes = [0.5, 0.5]
    with pytest.raises(ValueError, match="has 2 entries for 3 slots"):
        form(Sizes(4, 5).to(root), slots, chunk_sizes=[0.5, 0.5])


def test_shares_are_checked_again_where_slots_have_changed(slots: list, root: torch.device) -> None:
    model = DataParallel(Sizes(4, 5).to(root), slots, chunk_sizes=[0.5, 1, 1])
    model.device_ids = model.device_ids[:2]
    with pytest.raises(ValueError, match="has 3 entries for 2 slots"):
        model(torch.zeros(7, 4, device=root))


def test_batch_norm_sees_the_whole_batch(form: Form, single: Net, slots: list, x: Tensor) -> None:
    model = form(copy.deepcopy(single), slots, sync_batch_norm=True)
    output, expected = model(x), single(x)
    close(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    close(gradients(model), gradients(single))
    buffers = {name.removeprefix("module."): buffer for name, buffer in model.named_buffers()}
    close(buffers, dict(single.named_buffers()))


def test_prefetched_batches_give_the_same(form: Form, single: Net, slots: list, x: Tensor) -> None:
    model = form(single.eval(), slots)
    with torch.no_grad():
        close([model(batch) for batch in prefetch([x, x + 1], model)], [model(x), model(x + 1)])


@replicating_forms
def test_frozen_replicas_stay(form: Form, single: Net, slots: list, x: Tensor, root: torch.device) -> None:
    single.eval()
    model = form(copy.deepcopy(single).eval(), slots)
    module = getattr(model, "module", model)
    with torch.no_grad():
        before = model(x)
        with frozen(model):
            close(model(x), before)
            module.layers[3].bias.data.add_(1)
            # Slots on the root's device share the memory of the source, and so does replica 0.
            if root not in [*map(torch.device, slots[1:])]:
                close(model(x)[3:], before[3:])
        close(model(x), before + 1)
    with frozen(model), pytest.raises(RuntimeError, match=r"inside frozen\(\)"):
        model(x)
    model(x).sum().backward()
    single.layers[3].bias.data.add_(1)
    single(x).sum().backward()
    close(gradients(model), gradients(single))


@pytest.mark.parametrize("with_hook", [False, True])
def test_a_graph_that_frozen_comes_between_takes_what_waits(
    with_hook: bool, single: Net, slots: list, x: Tensor
) -> None:
    model: Any = replicate(copy.deepcopy(single).eval(), devices=slots)
    if with_hook:
        model.register_comm_hook(None, passes_on)
    with model.no_sync():
        model(x).sum().backward()
    output = model(x).sum()
    with torch.no_grad(), model.frozen():
        model(x)
    output.backward()
    single.eval()
    (2 * single(x).sum()).backward()
    close(gradients(model), gradients(single))


def passes_on(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Encoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        output: Tensor = self(x)
        return output


def test_frozen_replicas_of_a_method_have_the_hooks_of_the_module(slots: list, root: torch.device, x: Tensor) -> None:
    """A call of the module runs them on the whole batch; another method may call the replica, which runs them then."""
    encoder = Encoder().double().eval().to(root)
    encoder.register_forward_hook(lambda module, args, output: output + 1)
    model: Any = replicate(encoder, devices=slots)
    register_forward_method(model, "encode")
    with torch.no_grad(), model.frozen():
        expected = encoder.layers(x) + 1
        for _ in range(2):
            close(model(x), expected)
            close(model.encode(x), expected)


@pytest.mark.devices("cpu")
def test_the_reference_lists_every_option() -> None:
    """Those in the signatures, and what has a row in the table has it where the table says so."""
    text = TABLE.read_text(encoding="utf-8").split("Options of the forms")[1].split(".. toctree")[0]
    rows = [re.split(r"\n     - ", row) for row in text.split("\n   * - ")[2:]]
    named = [{*re.findall(r"``(\w+)", row[0])} for row in rows]
    signatures = [inspect.signature(each).parameters for each in (DataParallel, replicate, fully_shard)]
    for column, signature in enumerate(signatures, start=1):
        also = {name for row in rows for name in re.findall(r"``(\w+)", row[column])}
        has = {name for names, row in zip(named, rows, strict=True) for name in names if row[column].startswith("yes")}
        assert signature.keys() - {"module"} <= has | also
        assert has & {name for each in signatures for name in each} <= signature.keys()
