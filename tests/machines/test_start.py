"""The start: what has to be the same on all ranks, and rank 0's values on all of them."""

import copy

import pytest
import torch
from torch import nn

from dataparallel.machines.start import compare, describe, send_values
from machine_ranks import all_machines, new_machines, on_machines, said

IN_HOST_MEMORY = pytest.mark.devices("cpu")  # once is enough


def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2, bias=False))


def description_of(module, slots, **settings):
    return describe(dict(module.named_parameters()), dict(module.named_buffers()), slots, settings)


# ---- comparison ------------------------------------------------------------------------------------------------------


def wrong_on_a_rank(rank):
    """The net of a rank, each with a fault of its own."""
    module = net(9 if rank == 1 else 8)
    if rank == 2:
        del module[1]
        module[1].half()
        module[0].bias.requires_grad_(False)
    return module


def different(rank, devices):
    module = wrong_on_a_rank(rank)
    before = copy.deepcopy(module.state_dict())
    machines = all_machines()
    slots = devices if rank else devices[:1]
    words = said(compare, machines, "replicate", description_of(module, slots, bucket_cap_mb=25 - rank // 2))
    unchanged = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return words, unchanged, said(compare, machines, "again", {"slots": 2})


@IN_HOST_MEMORY
def test_differences_are_named_on_every_rank_and_the_next_start_works():
    results = on_machines(different, ranks=3)
    words = results[0][0]
    assert results == [(words, True, "nothing was raised")] * 3
    for part in (
        "MachinesDiffer: the ranks differ in what they do next ('the start of replicate'), so nothing of it is used: ",
        "slots: number 1, type ",
        "bucket_cap_mb: 24 on rank 2; bucket_cap_mb: 25 on ranks 0 and 1; ",
        "parameter 0.weight: shape (8, 4), ",
        "strides row-major, requires_grad True on ranks 0 and 2; parameter 0.weight: shape (9, 4), ",
        "strides row-major, requires_grad False on rank 2",
    ):
        assert part in words


# ---- values ----------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


def awkward_tensors(rank, device):
    """Tensors of the same names, with other values on each rank."""
    torch.manual_seed(rank)

    def values(*shape):
        return torch.randint(0, 100, shape, device=device)

    tensors = {str(dtype): values(3, 5).to(dtype) for dtype in DTYPES}
    tensors["scalar"] = values().double()
    tensors["empty"] = values(0, 4)
    tensors["transposed"] = values(5, 3).t()
    tensors["channels_last"] = values(2, 3, 4, 4).float().to(memory_format=torch.channels_last)
    tensors["strided"] = values(4, 10)[:, ::3]
    tensors["other strides"] = values(4, 6) if rank else values(6, 4).t()
    tensors["expanded"] = values(1, 4).expand(3, 4)
    tensors["parameter"] = nn.Parameter(values(7).float())
    tensors["large"] = values(1000)
    tensors["tied"] = tensors["parameter"]
    return tensors


def received(rank, devices, cap_bytes):
    tensors = awkward_tensors(rank, devices[0])
    parts = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    send_values(all_machines().words, tensors, cap_bytes)
    assert all(tensor.data_ptr() == parts[name] for name, tensor in tensors.items())
    moved = {name for name, tensor in tensors.items() if tensor._version != versions[name]}
    assert moved == ({*tensors} - {"empty"} if rank else set())
    return [name for name, tensor in awkward_tensors(0, devices[0]).items() if not torch.equal(tensor, tensors[name])]


@pytest.mark.parametrize("cap_bytes", [100, 25 * 2**20], ids=["many buckets", "one bucket"])
def test_all_ranks_get_the_values_of_rank_0(cap_bytes):
    assert on_machines(received, cap_bytes, ranks=3) == [[]] * 3


def refused(rank, devices):
    with torch.inference_mode():
        frozen = torch.ones(2)
    good = torch.full((2,), float(rank))
    tensors = {
        "meta": torch.empty(2, device="meta"),
        "lazy": nn.LazyLinear(2).weight,
        "inference": frozen,
        "sparse": torch.eye(2).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    tensors["meta on one rank"] = torch.empty(2, device="meta" if rank else "cpu")
    tensors["shapes"] = torch.empty(2 + rank)
    found = {
        name: said(send_values, new_machines().words, {"good": good, name: each}) for name, each in tensors.items()
    }
    return found, good.tolist()


@IN_HOST_MEMORY
def test_what_cannot_be_sent():
    (first, kept), (second, changed) = on_machines(refused)
    for name, words in {
        "meta": "ValueError: cannot send the values of rank 0: 'meta' of shape (2,) is on the meta device",
        "lazy": "ValueError: cannot send the values of rank 0: 'lazy' is an uninitialised lazy parameter",
        "inference": "ValueError: cannot send the values of rank 0: 'inference' was made under torch.inference_mode()",
        "sparse": "TypeError: cannot send the values of rank 0: 'sparse' is a Tensor of layout torch.sparse_coo",
        "quantised": "TypeError: cannot send the values of rank 0: 'quantised' is a ",
    }.items():
        assert first[name].startswith(words)
        assert second[name].startswith(words)
    assert first["shapes"] == second["shapes"]
    assert "shapes: shape (2,), dtype torch.float32" in first["shapes"]
    assert first["meta on one rank"].startswith("PeerFailed: ")
    assert second["meta on one rank"].startswith(
        "ValueError: cannot send the values of rank 0: 'meta on one rank' of shape (2,) is on"
    )
    assert (kept, changed) == ([0.0, 0.0], [1.0, 1.0])


# ---- streams ---------------------------------------------------------------------------------------------------------


def sent_on_a_side_stream(rank, devices):
    """The values are written on one stream of the thread, just before, and read on it, just after."""
    device = devices[0]
    stream = torch.Stream(device)
    with stream:
        weights = [torch.full((1000,), float(rank), device=device).mul_(i) for i in range(1, 4)]
        send_values(all_machines().words, {str(i): weight for i, weight in enumerate(weights)}, 4000)
        return [weight.mul_(2).sum().item() for weight in weights]


@pytest.mark.devices("sim", "cuda")
def test_values_are_ordered_by_the_current_stream():
    """On simulated devices the clocks say so."""
    assert on_machines(sent_on_a_side_stream) == [[0.0] * 3] * 2
