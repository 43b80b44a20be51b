"""Exported programs and traced graphs as sources: what is a constant in a graph is right on the device of each slot."""

import functools

import pytest
import torch
from torch import nn

from around import assert_trains_alike, batches
from dataparallel import DataParallel, replicate
from dataparallel.replicas.placement import patched_forward
from dataparallel.testing.parity import Perturbation, assert_same_step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Net(nn.Module):
    def __init__(self, adds):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(4))
        self.adds = adds

    def forward(self, x):
        return self.second(self.adds(self, self.first(x).tanh() + self.shift))


def nothing(net, y):
    return y


def a_range(net, y):
    return y * torch.arange(4, dtype=y.dtype, device=y.device)


def a_tensor_of_numbers(net, y):
    return y * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=y.dtype, device=y.device)


def a_move(net, y):
    return y * torch.full((4,), 3.0, dtype=y.dtype).to(y.device)


def a_number_on_the_cpu(net, y):
    return y * torch.tensor(3.0, dtype=torch.float64)


def a_plain_tensor(net, y):
    return y * net.factor


def a_branch(net, y):
    return torch.cond(
        y.sum() > 0,
        lambda y: y * torch.ones(4, dtype=y.dtype, device=y.device),
        lambda y: y.sin() + torch.arange(4, dtype=y.dtype, device=y.device),
        (y,),
    )


KINDS = [nothing, a_range, a_tensor_of_numbers, a_move, a_number_on_the_cpu, a_plain_tensor, a_branch]


def build(adds, root):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(adds).double().to(root)
    net.factor = torch.arange(4, dtype=torch.float64, device=root)
    return net


def exported(adds, root, strict=False):
    """The module of an exported program whose batch may have any size."""
    net, (x,) = build(adds, root), batches(root, [6])
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=strict)
    return program.module()


@pytest.mark.parametrize("adds", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.slots(3, long=[2])
def test_training_equals_one_device(adds, form, slots, root):
    assert_trains_alike(form(exported(adds, root), slots), exported(adds, root), root)


@pytest.mark.parametrize("adds", [a_range, a_tensor_of_numbers], ids=lambda kind: kind.__name__)
def test_each_replica_has_its_own_parameters(adds, slots, root):
    assert_same_step(
        functools.partial(exported, adds, root),
        ((next(batches(root, [7])),), {}),
        slots,
        perturbation=Perturbation(),
    )


def test_graphs_of_torch_fx(form, slots, root):
    model, reference = (torch.fx.symbolic_trace(build(nothing, root)) for _ in range(2))
    assert_trains_alike(form(model, slots), reference, root)


def test_exported_with_the_compiler(slots, root):
    assert_trains_alike(DataParallel(exported(a_range, root, strict=True), slots), exported(a_range, root), root)


@pytest.mark.parametrize("adds", [a_range, a_tensor_of_numbers], ids=lambda kind: kind.__name__)
def test_compiled_replicas(adds, slots, root):
    model = DataParallel(exported(adds, root), slots, compile={"backend": "aot_eager"})
    assert_trains_alike(model, exported(adds, root), root)


def test_in_another_module(slots, root):
    model, reference = (nn.Sequential(exported(a_range, root), nn.Tanh()) for _ in range(2))
    assert_trains_alike(DataParallel(model, slots), reference, root)


def test_without_a_graph_and_frozen(slots, root, without_graph):
    model, reference = DataParallel(exported(a_range, root), slots), exported(a_range, root)
    with without_graph():
        for x in batches(root, [6, 5]):
            torch.testing.assert_close(model(x), reference(x))
        with model.options.frozen():
            for x in batches(root, [6, 5]):
                torch.testing.assert_close(model(x), reference(x))


def test_a_graph_that_is_compiled_anew(slots, root):
    """``recompile()`` makes other code of the graph, of which nothing is known yet."""
    model, reference = exported(nothing, root), exported(nothing, root)
    wrapped, (x,) = DataParallel(model, slots), batches(root, [6])
    torch.testing.assert_close(wrapped(x), reference(x))
    for each in (model, reference):
        (output,) = each.graph.find_nodes(op="output")
        (result,) = output.all_input_nodes[:1]
        with each.graph.inserting_after(result):
            ones = each.graph.call_function(
                torch.ops.aten.ones.default, ([2],), {"device": root, "dtype": torch.float64}
            )
        with each.graph.inserting_after(ones):
            more = each.graph.call_function(torch.ops.aten.add.Tensor, (result, ones))
        result.replace_all_uses_with(more, delete_user_cb=lambda node, more=more: node is not more)
        each.recompile()
    torch.testing.assert_close(wrapped(x), reference(x))


def test_its_own_constants_stay_as_they_are(slots, root):
    source = exported(a_tensor_of_numbers, root)
    names = {name for name, value in vars(source).items() if isinstance(value, torch.Tensor)}
    before = {name: getattr(source, name) for name in names}
    DataParallel(source, slots)(next(batches(root, [6]))).sum().backward()
    assert names
    assert all(getattr(source, name) is before[name] for name in names)
    assert not names & {*source.state_dict()}


def test_the_same_code_serves_each_call(root):
    forward = type(exported(a_range, root)).forward
    source, target = torch.device("cpu"), torch.device("meta")
    if root.type != "cpu":
        source = root
    code = patched_forward(forward, source, target)
    assert code is patched_forward(forward, source, target)
    assert code is not forward
    assert code.__globals__["device"](source.type, source.index) == target
    assert code.__globals__["device"]("cuda:7") == torch.device("cuda:7")


def test_code_that_names_devices_in_another_way_is_refused(root):
    forward = type(exported(a_range, root)).forward
    vars(torch.fx)  # what torch.fx puts into the globals of its code is not a promise of torch
    forward.__globals__["device"] = str
    with pytest.raises(RuntimeError, match="Wrap the module of which the graph was made"):
        patched_forward(forward, root, torch.device("meta"))


@pytest.mark.devices("sim", "cuda")
def test_replicas_on_other_devices_compute_there(slots, root):
    replicas = replicate(exported(a_range, root), slots)
    for replica, slot in zip(replicas, slots, strict=True):
        assert replica(next(batches(root, [6])).to(slot)).device == slot


def test_a_program_of_a_wrapper_is_refused(form, slots, root):
    model, (x,) = form(build(nothing, root), slots), batches(root, [6])
    with pytest.raises((RuntimeError, TypeError), match=r"torch\.export is running around|sharded tensors"):
        torch.export.export(model, (x,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dataparallel sends tensors|sharded tensors"):
        torch.export.export(model, (x,), strict=True)
