"""Checks of what travels: copies between each two devices, kernels that read peers, and each transport.

What arrives is compared with what the host has, byte by byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.comm import kernels
from dataparallel.comm.settings import TRANSPORT_VARIABLE, TRANSPORTS
from dataparallel.comm.tables import Place, Table, TableRow, summed_in
from dataparallel.devices import CPU
from dataparallel.testing.machine_check.checks import Check, CheckedMachine, CheckFailed, NotHere, Seen

SIZES = (1, 4099, 2**20 + 3)  # bytes
OFFSETS = (0, 1, 16)
_STRIPE = max(SIZES) + max(OFFSETS)

_REDIRECTED = (
    "An IOMMU or PCIe access control (ACS) that redirects copies between devices is the usual cause: turn it off in "
    f"the BIOS or for the bridges between the devices, or set {TRANSPORT_VARIABLE}=host, which is slower"
)


def _random(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers on the host. The generators of torch stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(256, (numel,), dtype=dtype, generator=generator)
    return torch.randn(numel, dtype=dtype, generator=generator)


def _regions() -> Iterator[tuple[int, int]]:
    return ((size, offset) for size in SIZES for offset in OFFSETS)


def copies_arrive(machine: CheckedMachine) -> Seen:
    """Torch's own copies between each ordered pair of devices, of several sizes and offsets."""
    data = _random(_STRIPE, torch.uint8, 0)
    broken: list[str] = []
    for source, target in machine.pairs:
        sent, arrived = data.to(source), torch.zeros(_STRIPE, dtype=torch.uint8, device=target)
        for size, offset in _regions():
            arrived.zero_()
            arrived[offset : offset + size].copy_(sent[offset : offset + size])
            expected = torch.zeros_like(data)
            expected[offset : offset + size] = data[offset : offset + size]
            if not torch.equal(arrived.cpu(), expected):
                broken.append(f"{source} to {target}")
                break
    if broken:
        raise CheckFailed(f"data arrives changed, without an error, from {', '.join(broken)}. {_REDIRECTED}")
    return Seen(
        f"{len(machine.pairs)} ordered pairs, {len(SIZES) * len(OFFSETS)} sizes and offsets: every byte arrives"
    )


def need_kernels(machine: CheckedMachine) -> None:
    """Raises `NotHere` if the kernels cannot be launched."""
    if machine.root == CPU:
        raise NotHere("the kernels do not run on the CPU")
    if (problem := kernels.why_not(machine.devices)) is not None:
        raise NotHere(f"the kernels do not run here: {problem}")
    kernels.make_reachable(machine.devices)


_KERNELS_WRONG = (
    f"Use plain copies instead, with {TRANSPORT_VARIABLE}=copy in the environment, and open an issue with the JSON of "
    "this report"
)


def kernels_copy(machine: CheckedMachine) -> Seen:
    """The kernel that copies, on each device from each other one, or on the only one, beside what the host has."""
    need_kernels(machine)
    data = _random(_STRIPE, torch.uint8, 1)
    regions = [*_regions()]
    table: Table = [
        TableRow(Place(len(regions) + at, offset), (Place(at, offset),), size)
        for at, (size, offset) in enumerate(regions)
    ]
    pairs = machine.pairs if len(machine.devices) > 1 else [(machine.root, machine.root)]
    for source, target in pairs:
        sent = data.to(source)
        arrived = [torch.zeros(_STRIPE, dtype=torch.uint8, device=target) for _ in regions]
        machine.synchronize()
        kernels.DeviceTable(table, target, torch.uint8).launch([*(sent for _ in regions), *arrived])
        machine.synchronize()
        for (size, offset), found in zip(regions, arrived, strict=True):
            expected = torch.zeros_like(data)
            expected[offset : offset + size] = data[offset : offset + size]
            if not torch.equal(found.cpu(), expected):
                raise CheckFailed(
                    f"a kernel on {target} that copies {size} bytes of {source} from byte {offset} on brings others. "
                    f"{_KERNELS_WRONG}"
                )
    where = f"{len(pairs)} ordered pairs" if len(machine.devices) > 1 else "on one device"
    return Seen(f"{where}, {len(regions)} sizes and offsets: every byte arrives")


def kernels_sum(machine: CheckedMachine) -> Seen:
    """The kernels that sum, on each device over all devices, beside sums of the host in the same order."""
    need_kernels(machine)
    numel = 10_007
    for dtype, target_dtype in kernels.SUM_KERNELS:
        data = [
            _random(numel, torch.complex64 if dtype.is_complex else torch.float32, at)
            for at in range(len(machine.slots))
        ]
        on_host = [each.to(dtype) for each in data]
        total = on_host[0].to(summed_in(dtype))
        for term in on_host[1:]:
            total = total + term.to(total.dtype)
        expected = total.to(target_dtype)
        terms = [each.to(slot) for each, slot in zip(on_host, machine.slots, strict=True)]
        table: Table = [TableRow(Place(len(terms), 0), tuple(Place(at, 0) for at in range(len(terms))), numel)]
        for device in machine.devices:
            found = torch.zeros(numel, dtype=target_dtype, device=device)
            machine.synchronize()
            kernels.DeviceTable(table, device, dtype, target_dtype).launch([*terms, found])
            machine.synchronize()
            if not torch.equal(found.cpu(), expected):
                wrong = int((found.cpu() != expected).sum())
                raise CheckFailed(
                    f"the kernel {kernels.SUM_KERNELS[dtype, target_dtype]} on {device} rounds otherwise than torch: "
                    f"{wrong} of {numel} sums of {len(terms)} terms differ. {_KERNELS_WRONG}"
                )
    return Seen(f"{len(kernels.SUM_KERNELS)} kernels on {len(machine.devices)} devices: the bits of torch's sums")


def transport_carries(name: str, machine: CheckedMachine) -> Seen:
    """A broadcast, a sum, a scatter and a gather by one transport, of small and of large tensors."""
    if len(machine.devices) < 2:
        raise NotHere("there is one device, so nothing travels")
    slots = machine.devices
    done: list[str] = []
    for numel in (1003, 2**19 + 5):
        on_host = [_random(numel, torch.float64, at) for at in range(len(slots))]
        terms = [each.to(slot) for each, slot in zip(on_host, slots, strict=True)]
        total = functools.reduce(torch.add, on_host)
        joined = torch.cat(on_host)
        with comm.using(transport=name):
            try:
                found = {
                    "broadcast": comm.broadcast(terms[0], slots),
                    "sum": [comm.reduce_add(terms, slots[0])],
                    "gather": [comm.gather(terms, 0, slots[0])],
                    "scatter": comm.scatter(joined.to(slots[0]), slots, [numel] * len(slots)),
                }
            except ValueError as error:
                raise NotHere(str(error)) from error
        wanted = {"broadcast": on_host[:1] * len(slots), "sum": [total], "gather": [joined], "scatter": on_host}
        for work, tensors in found.items():
            for tensor, expected in zip(tensors, wanted[work], strict=True):
                if not torch.equal(tensor.cpu(), expected):
                    wrong = int((tensor.cpu() != expected).sum())
                    raise CheckFailed(
                        f"a {work} of {numel * 8} bytes by the transport {name!r} brings {wrong} wrong numbers of "
                        f"{expected.numel()} to {tensor.device}. Use another one, by {TRANSPORT_VARIABLE}, and open an "
                        "issue with the JSON of this report"
                    )
        done = [*found]
    return Seen(f"{', '.join(done)}: what the host has")


CHECKS = (
    Check("transfers", "copies between devices", copies_arrive),
    Check("transfers", "kernels that copy", kernels_copy, hangs_after=60),
    Check("transfers", "kernels that sum", kernels_sum, hangs_after=60),
    *(Check("transfers", f"transport {name}", functools.partial(transport_carries, name)) for name in TRANSPORTS),
)
