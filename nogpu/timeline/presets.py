"""Published machines and their sources: 8 x V100, 8 x A100 (40 and 80 GB), 8 x H100, 4 x RTX 3090, 2 x TITAN RTX.

Peaks are the vendor's, dense (without sparsity). Real kernels and copies reach a share of them. The shares are stated
here once, with what was measured and where. Where nothing was found, the text says that a figure is assumed. The shares
decide the absolute times of a prediction more than anything else, so change them where you know better:
``A100.with_(memory_bandwidth=1.4e12)``. This module computes nothing; ``schedule`` takes its machines.

float32 means TF32 on the tensor cores where the device has them (``torch.set_float32_matmul_precision("high")``;
convolutions use it by default), otherwise the CUDA cores. Only floating-point dtypes are here; V100 and TITAN RTX have
no bfloat16.

A kernel that reads its peers' memory gets the bandwidth of a copy, and slows nothing beside it, unless you say
otherwise: ``A100.with_(peer_kernels=0.7, beside_peer_kernels=0.2)``. Such kernels reach 65 to 86 % of a copy on
8 x H100 (vllm 42324, NVIDIA/Megatron-LM 5596), and 230 of 240 GB/s on A100 (NVIDIA/nccl-tests 149). NCCL's make
products beside them 30 to 40 % slower (pytorch 179937). All are GitHub issues.

Measured by other people, with the test ``p2pBandwidthLatencyTest`` of the CUDA samples:

=======================  ===============================================================================================
NVIDIA/nccl 1264         GitHub issue, 8 x H100 SXM: memory 2,500 GB/s, over NVLink 376 GB/s, without it 37 GB/s
NVIDIA/nccl-tests 100    GitHub issue, 8 x A100 SXM 80 GB: memory 1,600 GB/s, over NVLink 424 to 519 GB/s in both
                         directions together; a copy without peer access 24.6 us
NVIDIA/nccl 1127         GitHub issue, 8 x RTX 3090: memory 838 GB/s; no peer access: a copy 12 to 17 us
ginkgo 164               GitHub issue of ginkgo-project, 4 x V100 SXM2: memory "should achieve around" 750 GB/s
Dell V100                Dell, "High Performance Computing Solution Resources", 4 x V100 SXM2: 47.9 GB/s over two links
=======================  ===============================================================================================
"""

from __future__ import annotations

from itertools import permutations

from nogpu.timeline.machine import Host, Machine, Path, Wiring
from nogpu.timeline.wiring import mesh, switch, through_host, tree

__all__ = ["A100", "A100_80", "H100", "PRESETS", "RTX_3090", "TITAN_RTX", "TITAN_RTX_PCIE", "V100"]

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6

# Of the peak FLOPs. Tensor cores: 94 of 156 TFLOP/s, assumed for TF32 and taken for all dtypes. CUDA cores: large
# float32 products reach 14.6 of 15.7 TFLOP/s on a V100 (Lambda, "NVIDIA A100 GPU Deep Learning Benchmark Estimates");
# assumed lower, because other shapes and convolutions do worse.
TENSOR_CORES = 0.6
CUDA_CORES = 0.8

# Of the bandwidth of PCIe, through the host: 37 of 63 GB/s with PCIe 5.0 (NVIDIA/nccl 1264), assumed the same
# elsewhere.
PCIE = 0.59
PCIE_3, PCIE_4, PCIE_5 = (rate * 16 * 128 / 130 / 8 * GIGA for rate in (8, 16, 32))  # 16 lanes of so many GT/s; PCI-SIG

# Assumed on all machines: what a kernel takes besides its work, and a copy from one device to another with peer access
# or between a device and the host.
KERNEL = 3 * MICRO
COPY = 9 * MICRO

# Assumed: a Python thread holds the interpreter lock for 3 us and takes 4 us more, a thread of autograd's engine 5 us.
# A graph takes 10 us in place of the 4 or 5, however many kernels it has. With the time of the device, 15 us and 0.6 us
# for each kernel are measured on an RTX 5070 Ti (ahrefs/ocannl 488).
LAUNCHES = Host(lock=3 * MICRO, rest=4 * MICRO, backward=5 * MICRO, graph=10 * MICRO)


def _without_peers(wiring: Wiring, latency: float) -> Wiring:
    """The same links where devices are no peers, and a copy between two of them begins after ``latency`` seconds."""
    paths = dict(wiring.paths)
    for ends in permutations(range(wiring.devices), 2):
        paths[ends] = Path(paths[ends].bandwidth, latency, paths[ends].links, for_kernels=False)
    return Wiring(wiring.links, paths)


# How many links a pair has: `nvidia-smi topo -m` of a DGX-1 in pytorch's benchmarks/distributed/ddp/README.md. Each
# device has six. Pairs that are missing have none.
V100_LINKS = {
    **{(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2},
    **{(4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
    **{(0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1},
}

V100 = Machine(
    name="8 x V100",
    devices=8,
    # Vendor data sheet, "NVIDIA Tesla V100 GPU Accelerator", SXM2: 15.7 TFLOP/s, 7.8 in float64, 125 on tensor cores,
    # 900 GB/s, of which 750 are expected (ginkgo 164).
    flops={
        "float32": CUDA_CORES * 15.7 * TERA,
        "float64": CUDA_CORES * 7.8 * TERA,
        "float16": TENSOR_CORES * 125 * TERA,
    },
    memory_bandwidth=750 * GIGA,
    kernel_latency=KERNEL,
    # 25 GB/s for each link and direction (NVIDIA, "DGX-1 With Tesla V100 System Architecture"), of which 47.9 of 50 are
    # measured for two (Dell V100). Other pairs go through PCIe 3.0 and both processors; two devices share a PCIe switch
    # (the same matrix, by their network cards). The latency without peer access is that of nccl-tests 100.
    wiring=mesh(
        {pair: count * 47.9 / 2 * GIGA for pair, count in V100_LINKS.items()},
        _without_peers(
            tree(
                [[0, 1], [2, 3], [4, 5], [6, 7]],
                bandwidth=PCIE * PCIE_3,
                latency=COPY,
                uplink=PCIE * PCIE_3,
            ),
            24.6 * MICRO,
        ),
        latency=COPY,
        engines=4,  # one for each neighbour: assumed not to limit anything
    ),
    host=LAUNCHES,
)
"""A DGX-1: hybrid cube mesh, in which a device reaches four others over NVLink and three through the host."""

A100 = Machine(
    name="8 x A100",
    devices=8,
    # Vendor data sheet, "NVIDIA A100 Tensor Core GPU", SXM4 40 GB: TF32 156, BF16 and FP16 312, FP64 19.5 TFLOP/s on
    # tensor cores, 1,555 GB/s. The share of the memory's bandwidth is measured on 80 GB: 1,600 of 2,039 GB/s
    # (nccl-tests 100).
    flops={
        "float32": TENSOR_CORES * 156 * TERA,
        "float64": TENSOR_CORES * 19.5 * TERA,
        "float16": TENSOR_CORES * 312 * TERA,
        "bfloat16": TENSOR_CORES * 312 * TERA,
    },
    memory_bandwidth=1600 / 2039 * 1555 * GIGA,
    kernel_latency=KERNEL,
    # NVLink 3 through NVSwitch: 600 GB/s, 300 in a direction (the data sheet). Measured are 212 to 260 (nccl-tests
    # 100); 225 is assumed. PCIe 4.0 for the host, assumed to be each device's own.
    wiring=switch(8, bandwidth=225 * GIGA, latency=COPY, host_bandwidth=PCIE * PCIE_4, host_latency=COPY),
    host=LAUNCHES,
)
"""A DGX A100 or HGX A100 with 40 GB devices: any pair at a time at full bandwidth."""

A100_80 = A100.with_(name="8 x A100 80 GB", memory_bandwidth=1600 * GIGA)  # measured (nccl-tests 100)
"""The same with 80 GB devices, whose memory is faster."""

H100 = Machine(
    name="8 x H100",
    devices=8,
    # Vendor data sheet, "NVIDIA H100 Tensor Core GPU", SXM5: TF32 989, BF16 and FP16 1,979 TFLOP/s with sparsity, half
    # of that dense; FP64 67 on tensor cores; 3.35 TB/s, of which 2,500 GB/s are measured (nccl 1264).
    flops={
        "float32": TENSOR_CORES * 989 / 2 * TERA,
        "float64": TENSOR_CORES * 67 * TERA,
        "float16": TENSOR_CORES * 1979 / 2 * TERA,
        "bfloat16": TENSOR_CORES * 1979 / 2 * TERA,
    },
    memory_bandwidth=2500 * GIGA,
    kernel_latency=KERNEL,
    # NVLink 4 through NVSwitch: 900 GB/s, 450 in a direction (the data sheet), 376 measured (nccl 1264). PCIe 5.0.
    wiring=switch(8, bandwidth=376 * GIGA, latency=COPY, host_bandwidth=PCIE * PCIE_5, host_latency=COPY),
    host=LAUNCHES,
)
"""A DGX H100 or HGX H100."""

RTX_3090 = Machine(
    name="4 x RTX 3090",
    devices=4,
    # Vendor white paper, "NVIDIA Ampere GA102 GPU Architecture": FP32 35.6 TFLOP/s, and TF32 on tensor cores no more;
    # BF16 and FP16 71 with sums in float32; FP64 a 64th; 936 GB/s, of which 838 are measured (nccl 1127).
    flops={
        "float32": CUDA_CORES * 35.6 * TERA,
        "float64": CUDA_CORES * 35.6 / 64 * TERA,
        "float16": TENSOR_CORES * 71 * TERA,
        "bfloat16": TENSOR_CORES * 71 * TERA,
    },
    memory_bandwidth=838 * GIGA,
    kernel_latency=KERNEL,
    # PCIe 4.0 x16 for each device, no NVLink and no peer access: a copy takes 14 us to begin (nccl 1127: 12 to 17).
    wiring=through_host(4, bandwidth=PCIE * PCIE_4, latency=7 * MICRO),
    host=LAUNCHES,
)
"""A workstation without links between its devices: everything goes through the host."""

TITAN_RTX_PCIE = Machine(
    name="2 x TITAN RTX, PCIe",
    devices=2,
    # NVIDIA, "TITAN RTX": 16.3 TFLOP/s, 130 on tensor cores, 672 GB/s (figures as printed by Tom's Hardware on
    # 2018-12-03). Vendor white paper, "NVIDIA Turing GPU Architecture": FP64 a 32nd. The share of the memory's
    # bandwidth is assumed to be that of the V100.
    flops={
        "float32": CUDA_CORES * 16.3 * TERA,
        "float64": CUDA_CORES * 16.3 / 32 * TERA,
        "float16": TENSOR_CORES * 130 * TERA,
    },
    memory_bandwidth=750 / 900 * 672 * GIGA,
    kernel_latency=KERNEL,
    # PCIe 3.0 x16; latency as on the RTX 3090, assumed.
    wiring=through_host(2, bandwidth=PCIE * PCIE_3, latency=7 * MICRO),
    host=LAUNCHES,
)
"""Two cards without their bridge."""

TITAN_RTX = TITAN_RTX_PCIE.with_(
    name="2 x TITAN RTX, NVLink",
    # Two links (NV2 in the documentation of transformers, "Efficient Training on Multiple GPUs"): 100 GB/s, 50 in a
    # direction (the white paper). The share is that of the V100 (Dell V100).
    wiring=mesh({(0, 1): 47.9 * GIGA}, TITAN_RTX_PCIE.wiring, latency=COPY, engines=1),
)
"""Two cards with their bridge, which transformers' documentation compares ``DataParallel`` and DDP on."""

PRESETS = (V100, A100, A100_80, H100, RTX_3090, TITAN_RTX, TITAN_RTX_PCIE)
