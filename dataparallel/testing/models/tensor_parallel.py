"""The plan by which `Transformer.parallelize` divides a transformer among processes.

It uses the public styles of ``torch.distributed.tensor.parallel``, which is imported when the plan is applied. Two
linear layers in a row are cut by columns, then by rows: nothing is sent between them. Queries, keys and values are cut
by columns, so each process computes with heads of its own. Each row of the token embedding and of the output layer
belongs to one token, so a tied weight is cut the same way for both.

With sequence parallelism, embeddings, norms and sums have a part of each sequence on each process. The whole sequences
are gathered before attention, before the feed-forward layers and before the output.

This file does not know the class of the model, only the names of its parts: `transformer` imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply_plan(model: Any, mesh: DeviceMesh, use_seq_parallel: bool) -> None:
    """Divides the model in place. `Transformer.parallelize` says what is passed and which errors there are."""
    _check(model, mesh)
    from torch.distributed.tensor.parallel import parallelize_module

    tied = model.output.weight is model.tok_embeddings.weight
    parallelize_module(model, mesh, _outside_of_blocks(use_seq_parallel))
    for layer in model.layers:
        parallelize_module(layer, mesh, _of_a_block(use_seq_parallel))
        layer.attention.n_heads //= mesh.size()
    if tied:
        # Both have become parameters of their own, cut alike.
        model.output.weight = model.tok_embeddings.weight
    if use_seq_parallel:
        model.sequence_parts = mesh.size()


def _check(model: Any, mesh: DeviceMesh) -> None:
    if not torch.distributed.is_available():
        raise RuntimeError(
            f"tensor parallelism needs torch.distributed, and torch {torch.__version__} is built without it: use "
            "another build of torch, or dataparallel.composable, which needs one process"
        )
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"tensor parallelism needs a mesh of processes; got {type(mesh).__name__}: make one with "
            'torch.distributed.init_device_mesh("cpu", (processes,))'
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor parallelism needs a mesh of one dimension; got {mesh}, which has {mesh.ndim}: pass a part of it, "
            'mesh["name of a dimension"]'
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"the model is divided already: {name} is a DTensor, {parameter.placements}")
        if parameter.device.type not in ("meta", mesh.device_type):
            raise ValueError(
                f"the model must be on the mesh's devices; got {name} on {parameter.device} and a mesh of "
                f"{mesh.device_type}: move the model there first"
            )
    heads = model.model_args.n_heads
    if heads % mesh.size() != 0:
        raise ValueError(
            f"each process has the same number of attention heads, so n_heads must be a multiple of the size of the "
            f"mesh; got n_heads={heads} and a mesh of {mesh.size()}"
        )


def _outside_of_blocks(use_seq_parallel: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    # Tokens and positions are whole on each process. Positions have no dimension of samples.
    whole, rows, tokens = Replicate(), Shard(0), Shard(1)
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=tokens if use_seq_parallel else whole),
        "pos_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=rows if use_seq_parallel else whole),
        "output": ColwiseParallel(input_layouts=tokens if use_seq_parallel else whole, output_layouts=whole),
    }
    if use_seq_parallel:
        plan["norm"] = SequenceParallel()
    return plan


def _of_a_block(use_seq_parallel: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if use_seq_parallel else Replicate()
    plan: dict[str, Any] = {
        # Local outputs: attention gets plain tensors, with the heads of its process.
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward.w1": ColwiseParallel(input_layouts=between),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
    }
    if use_seq_parallel:
        # Gathered once for queries, keys and values.
        plan["attention"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan["attention_norm"] = plan["ffn_norm"] = SequenceParallel()
    return plan
