"""Where torch accepts what the library refuses, its rule is followed, with one warning."""

import dataclasses
import warnings

import numpy
import pytest
import torch
from torch import nn

import dataparallel
from dataparallel import replace_torch
from dataparallel.integrations import torch_wrapper


class Adds(nn.Module):
    """Adds the sum of ``each`` to each sample."""

    def forward(self, x, each, keyword=None):
        return x + each.to(x.dtype).sum()


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    """As in a program that has called nothing yet."""
    monkeypatch.setattr(torch_wrapper, "counts", torch_wrapper.FallbackCounts())


@pytest.fixture
def arguments(slots, root):
    return torch.arange(24.0, device=root).reshape(6, 4), torch.arange(4 * len(slots), device=root)


def expected(slots, x, each):
    pairs = zip(x.chunk(len(slots)), each.chunk(len(slots)), strict=False)  # as many as both have
    return torch.cat([chunk + entries.sum() for chunk, entries in pairs])


def test_tensors_of_other_sizes_are_split_by_themselves(slots, arguments):
    with pytest.raises(ValueError, match="batch sizes disagree"):
        dataparallel.DataParallel(Adds(), slots)(*arguments)
    with replace_torch():
        model = nn.DataParallel(Adds(), slots)
        with pytest.warns(UserWarning, match=r"batch sizes differ \(6, 12\)") as caught:
            torch.testing.assert_close(model(*arguments), expected(slots, *arguments))
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(model(*arguments), expected(slots, *arguments))


def test_one_entry_for_each_slot_is_no_reason_to_warn(slots, root):
    x, each = torch.arange(24.0, device=root).reshape(6, 4), torch.arange(len(slots), device=root)
    with replace_torch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(nn.DataParallel(Adds(), slots)(x, each), expected(slots, x, each))
    assert dict(torch_wrapper.counts.fallbacks) == {"each tensor is split by itself": 1}


@pytest.mark.filterwarnings("ignore:as torch.nn.DataParallel does")
def test_functions_follow_the_same_rule(slots, arguments):
    with replace_torch():
        parallel = torch.nn.parallel
        scattered = parallel.scatter(arguments, slots)
        by_kwargs, _ = parallel.scatter_gather.scatter_kwargs(arguments, None, slots)
        output = parallel.data_parallel(Adds(), arguments, slots)
    sizes = [(x.shape[0], each.shape[0]) for x, each in scattered]
    assert sizes == [(x.shape[0], each.shape[0]) for x, each in by_kwargs] == [(2, 4)] * 3
    torch.testing.assert_close(output, expected(slots, *arguments))


@dataclasses.dataclass
class Meter:
    sizes: list = dataclasses.field(default_factory=list)


class Weights:
    """An object that looks like a batch of six samples."""

    def __init__(self, root):
        self.weight, self.sizes = torch.ones(6, device=root), []


class Records(dict):
    pass


def note_in_list(container, size):
    container.append(size)


def note_under_key(container, size):
    container.setdefault("sizes", []).append(size)


def note_deeper(container, size):
    container["inner"][0]["sizes"].append(size)


SHARED = {
    "an empty list": (note_in_list, lambda root: [], list),
    "an empty dict subclass": (note_under_key, lambda root: Records(), lambda kept: kept["sizes"]),
    "an empty list inside": (
        note_deeper,
        lambda root: {"inner": [{"sizes": []}]},
        lambda kept: kept["inner"][0]["sizes"],
    ),
}


class Notes(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def forward(self, x, container):
        self.note(container, len(x))
        return x


class TestObjectsThatTorchDoesNotSplit:
    @pytest.mark.parametrize(("note", "make", "found"), SHARED.values(), ids=SHARED.keys())
    def test_the_caller_keeps_what_forward_has_written_into_them(self, note, make, found, slots, root):
        x = torch.ones(6, 4, device=root)
        with replace_torch():
            model = nn.DataParallel(Notes(note), slots)
            containers = [make(root) for _ in range(3)]
            model(x, containers[0])
            model(x, container=containers[1])
            torch.nn.parallel.data_parallel(model.module, x, slots, module_kwargs={"container": containers[2]})
        assert [found(container) for container in containers] == [[2, 2, 2]] * 3

    def test_all_replicas_get_the_program_s_own(self, slots, root):
        objects = [[], Meter(), iter([1, 2]), Weights(root), numpy.zeros(6)]
        with replace_torch(), warnings.catch_warnings():
            warnings.simplefilter("error")
            parts = torch.nn.parallel.scatter([torch.ones(6, 4, device=root), *objects], slots)
        assert all(entry is given for part in parts for entry, given in zip(part[1:], objects, strict=True))

    def test_containers_that_hold_something_are_copies_in_each_replica(self, slots, root):
        kept = [torch.ones(6, 4, device=root)]
        with replace_torch():
            nn.DataParallel(Notes(note_in_list), slots)(kept[0], kept)
        assert len(kept) == 1


@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
def test_as_many_replicas_run_as_the_shortest_tensor_has_chunks(slots, root, by_keyword):
    """torch drops the samples for which the other tensor has no chunk, silently."""
    x, each = torch.ones(6, 4, device=root).requires_grad_(), torch.arange(2, device=root)
    with replace_torch():
        model = nn.DataParallel(Adds(), slots)
        with pytest.warns(UserWarning, match=r"samples are dropped: batch sizes differ \(6, 2\), and 2 of 3 replicas"):
            output = model(x=x, each=each) if by_keyword else model(x, each)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x, each)
    torch.testing.assert_close(output, expected(slots, x, each))
    output.sum().backward()
    assert x.grad.sum(dim=1).tolist() == [4, 4, 4, 4, 0, 0]


@pytest.mark.parametrize("samples", [4, 1])
def test_counts_that_are_dropped_are_no_reason_to_warn(slots, root, samples):
    """``Trainer`` of transformers passes a number in a row for each device; its last batch may have fewer chunks."""
    x, each = torch.ones(samples, 4, device=root), torch.full((len(slots), 1), 7, device=root)
    with replace_torch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(nn.DataParallel(Adds(), slots)(x, each), torch.full((samples, 4), 8.0, device=root))


def test_one_sample_for_each_slot_is_no_count(slots, root):
    with replace_torch(), pytest.warns(UserWarning, match="samples are dropped"):
        output = nn.DataParallel(Adds(), slots)(torch.arange(3.0, device=root), torch.zeros(2, device=root))
    assert output.tolist() == [0, 1]


def test_an_empty_tensor_is_an_empty_chunk_for_each_replica(slots, root):
    x, empty = torch.ones(6, 4, device=root), torch.ones(0, 4, device=root)
    with replace_torch(), pytest.warns(UserWarning, match="each tensor is split by itself"):
        assert torch.equal(nn.DataParallel(Adds(), slots)(x, empty), x)


@pytest.mark.filterwarnings("ignore:as torch.nn.DataParallel does")
def test_torchs_rule_holds_for_what_a_subclass_hands_to_torch(slots, arguments):
    with replace_torch():

        class Reversed(nn.DataParallel):
            def scatter(self, inputs, kwargs, device_ids):
                return super().scatter(inputs[::-1], kwargs, device_ids)

        torch.testing.assert_close(
            Reversed(Adds(), slots)(*arguments[::-1]), nn.DataParallel(Adds(), slots)(*arguments)
        )


class Unused(nn.Module):
    """Only one of its layers is used, and each is as large as a bucket."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(4)).double()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.layers[1](x)

    def parts(self):
        used = {*self.layers[1].parameters()}
        return used, {*self.layers.parameters()} - used


def by_wrapper(net, slots, x):
    return nn.DataParallel(net, slots)(x)


def by_function(net, slots, x):
    return torch.nn.parallel.data_parallel(net, x, slots)


def by_hand(net, slots, x):
    parallel = torch.nn.parallel
    chunks = parallel.scatter((x,), slots)
    outputs = parallel.parallel_apply(
        parallel.replicate(net, slots)[: len(chunks)], chunks, devices=slots[: len(chunks)]
    )
    return parallel.gather(outputs, slots[0])


@pytest.mark.parametrize("call", [by_wrapper, by_function, by_hand])
class TestUnusedParameters:
    """Programs clamp the gradients of all parameters in place, or ask ``autograd.grad`` for all of them."""

    @pytest.mark.parametrize("samples", [6, 1])
    def test_their_gradients_are_zeros(self, slots, root, call, samples):
        net, x = Unused().to(root), torch.randn(samples, 400, dtype=torch.float64, device=root)
        expected = torch.autograd.grad(net(x).square().sum(), net.layers[1].weight)[0]
        with replace_torch():
            call(net, slots, x).square().sum().backward()
        used, unused = net.parts()
        for parameter in used | unused:
            parameter.grad.data.clamp_(-1, 1)
        assert all(not parameter.grad.any() for parameter in unused)
        torch.testing.assert_close(net.layers[1].weight.grad, expected.clamp(-1, 1))
        assert [parameter.grad for parameter in net.frozen.parameters()] == [None, None]

    def test_gradients_of_gradients(self, slots, root, call):
        net = Unused().to(root)
        x = torch.randn(6, 400, dtype=torch.float64, device=root)
        with replace_torch():
            loss = call(net, slots, x).square().sum()
        used, _ = net.parts()
        asked = [parameter for parameter in net.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, asked, create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()
        found = [parameter.grad for parameter in used]
        net.zero_grad()
        alone = torch.autograd.grad(net(x).square().sum(), [*used], create_graph=True)
        sum(gradient.square().sum() for gradient in alone).backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in used])


def test_no_gradient_at_all_stays_none(slots, root):
    net = Unused().to(root)
    x = torch.ones(6, 400, dtype=torch.float64, device=root).requires_grad_()
    with replace_torch():
        (nn.DataParallel(net, slots)(x).detach() * x).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_first_detached_replica_has_the_tensors_of_the_source(slots, root):
    """Old code for several GPUs trains it as the source itself."""
    net = nn.Linear(4, 2).to(root)
    with replace_torch():
        first, *others = torch.nn.parallel.replicate(net, slots, detach=True)
    assert first.weight is net.weight
    first(torch.ones(3, 4, device=root)).sum().backward()
    assert net.weight.grad is not None
    assert all(not replica.weight.requires_grad for replica in others)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused_as_torch_refuses_them(slots, root):
    with replace_torch(), pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        nn.DataParallel(nn.LazyLinear(2).to(root), slots)(torch.ones(6, 4, device=root))
