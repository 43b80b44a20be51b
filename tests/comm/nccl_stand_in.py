"""In the place of ``torch.cuda.nccl`` for tests on any devices: it takes what torch takes, and copies and adds."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

AS_NUMBERS = {torch.float32, torch.float16, torch.float64, torch.bfloat16}
AS_NUMBERS |= {torch.int64, torch.int32, torch.int8, torch.uint8}
AS_BYTES = {torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
"""What torch/csrc/cuda/nccl.cpp (`to_nccl_data_type`) hands to NCCL in torch 2.11 to 2.15."""


class Library:
    """In the place of ``torch.cuda.nccl``; notes calls, and whether two threads are inside at the same time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.inside = 0
        self.crowded = False

    def __enter__(self) -> None:
        self.inside += 1
        self.crowded |= self.inside > 1
        threading.Event().wait(0.001)  # others would come in now

    def __exit__(self, *_: object) -> None:
        self.inside -= 1

    def check(self, tensors: list[Tensor]) -> None:
        """As torch does."""
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise RuntimeError("all inputs and outputs must be of the same Tensor dtype")
        if not dtypes <= AS_NUMBERS | AS_BYTES:
            raise RuntimeError(f"Unconvertible NCCL type {dtypes}")
        if not all(tensor.is_contiguous() and tensor.numel() == tensors[0].numel() for tensor in tensors):
            raise RuntimeError("all inputs must be contiguous, with the same number of elements")

    def broadcast(self, inputs: list[Tensor], root: int) -> None:
        with self:
            self.check(inputs)
            self.calls.append(("broadcast", len(inputs), root))
            for target in inputs:
                if target is not inputs[root]:
                    target.data.copy_(inputs[root])  # unseen by autograd

    def reduce(self, inputs: list[Tensor], output: Tensor, root: int) -> None:
        with self:
            self.check([*inputs, output])
            self.calls.append(("reduce", len(inputs), root))
            assert output.dtype in AS_NUMBERS, "NCCL would add bytes"
            assert output.device == inputs[root].device
            output.copy_(sum(tensor.to(output.device) for tensor in inputs))

    def reduce_scatter(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        with self:
            self.check(inputs)
            self.check(outputs)
            self.calls.append(("reduce_scatter", len(inputs), -1))
            assert {inputs[0].dtype} == {outputs[0].dtype} <= AS_NUMBERS
            assert inputs[0].numel() == len(inputs) * outputs[0].numel()
            assert [flat.device for flat in inputs] == [row.device for row in outputs]
            for row, target in enumerate(outputs):
                target.data.copy_(sum(flat.view(len(inputs), -1)[row].to(target.device) for flat in inputs))
