"""What tensors whose parts lie on several machines ask of the group."""

from __future__ import annotations

import torch

from machine_ranks import all_machines, on_machines

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
]


def gathers(rank: int, devices: list[torch.device]) -> None:
    over = all_machines()
    assert (over.rank, over.size) == (rank, 2)
    assert over == all_machines()
    assert over != over.another()
    assert over.own("tensors") == over.own("tensors")
    for dtype in DTYPES:
        ours = torch.tensor([[1, 0, 3], [0, 2, rank]]).to(dtype).to(devices[0])
        theirs = torch.tensor([[1, 0, 3], [0, 2, 1 - rank]]).to(dtype).to(devices[0])
        kept = ours.clone()
        rows = [ours, theirs] if rank == 0 else [theirs, ours]
        gathered = over.all_gather(ours)
        assert torch.equal(gathered, torch.stack(rows)), dtype
        assert gathered.device == devices[0]
        assert torch.equal(ours, kept)
    assert over.all_gather(torch.ones((), device=devices[0])).tolist() == [1, 1]


def test_every_dtype() -> None:
    on_machines(gathers)
