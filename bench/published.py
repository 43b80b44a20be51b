"""Published times of training steps on named machines, to hold predictions against. Data and its sources, nothing else.

Each figure is that of one device, of DDP or of ``torch.nn.DataParallel``. Where a throughput is published, the samples
of a step were divided by it. No throughput of ResNet-50 with ``torch.nn.DataParallel`` on a named machine was found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shapes import GPT2_LENGTH, GPT2_SMALL, RESNET50, RealShape

ONE, DDP, DP = "one device", "DDP", "torch.nn.DataParallel"

RESNET50_112 = replace(RESNET50, name="ResNet-50, 112 images", samples=112)
RESNET50_256 = replace(RESNET50, name="ResNet-50, 256 images", samples=256)
GPT2_LONG = replace(
    GPT2_SMALL, name="GPT-2 small, 4 x 1024 tokens", inputs=(GPT2_LENGTH,), targets=(GPT2_LENGTH,), samples=4
)
PUBLISHED_SHAPES = [RESNET50, RESNET50_112, RESNET50_256, GPT2_LONG]

PYTORCH, DGX_1, DGX_A100, TRANSFORMERS = "pytorch", "DGX-1", "DGX A100", "transformers"
SOURCES = {
    PYTORCH: "pytorch, benchmarks/distributed/ddp/README.md: pytorch 1.4.0a0, CUDA 10.0, DGX machines with V100",
    DGX_1: "NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch, README: 8 x V100 16 GB, without mixed precision",
    DGX_A100: "NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch, README: 8 x A100 80 GB, without mixed precision",
    TRANSFORMERS: 'transformers, documentation, "Efficient Training on Multiple GPUs": 200 steps, '
    "pytorch 1.8, CUDA 11.0, transformers 4.3.0",
}


@dataclass(frozen=True)
class Published:
    """What someone has measured for a step by ``way`` on some devices of ``machine``.

    ``machine`` is a name of ``presets``, ``source`` one of `SOURCES`.
    """

    shape: RealShape
    machine: str
    devices: int
    way: str
    milliseconds: float
    source: str


# Bytes per second into a device of NCCL's all-gather and reduce-scatter, between all devices of a machine.
NCCL = {
    # NVIDIA/Megatron-LM 5596, GitHub issue: 128 MiB in 363 us, and 32 MiB in 100.5 us, of which 7 / 8 are received.
    "8 x H100": (7 / 8 * 2**27 / 363e-6, 7 / 8 * 2**25 / 100.5e-6),
    # NVIDIA/nccl-tests 149, GitHub issue: 230 GB/s are reached of the 240 that kernels can.
    "8 x A100": (230e9, 230e9),
    # None was found: 130 GB/s are assumed of six links, and through the host what a copy gets.
    "8 x V100": (130e9, 130e9),
}

PUBLISHED = [
    Published(RESNET50, "8 x V100", 1, ONE, 97, PYTORCH),
    Published(RESNET50, "8 x V100", 2, DDP, 103, PYTORCH),
    Published(RESNET50, "8 x V100", 4, DDP, 103, PYTORCH),
    Published(RESNET50, "8 x V100", 8, DDP, 104, PYTORCH),
    # The batches are those of configs.yml in the same repository.
    Published(RESNET50_112, "8 x V100", 1, ONE, 1e3 * 112 / 367, DGX_1),
    Published(RESNET50_112, "8 x V100", 8, DDP, 1e3 * 8 * 112 / 2855, DGX_1),
    Published(RESNET50_256, "8 x A100 80 GB", 1, ONE, 1e3 * 256 / 938, DGX_A100),
    Published(RESNET50_256, "8 x A100 80 GB", 8, DDP, 1e3 * 8 * 256 / 7248, DGX_A100),
    Published(GPT2_LONG, "2 x TITAN RTX, NVLink", 2, DP, 1e3 * 110.5948 / 200, TRANSFORMERS),
    Published(GPT2_LONG, "2 x TITAN RTX, NVLink", 2, DDP, 1e3 * 101.9003 / 200, TRANSFORMERS),
    Published(GPT2_LONG, "2 x TITAN RTX, PCIe", 2, DDP, 1e3 * 131.4367 / 200, TRANSFORMERS),
]
