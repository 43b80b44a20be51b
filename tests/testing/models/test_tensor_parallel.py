"""`Transformer.parallelize`: several processes compute what one computes, in forward and gradients, in float64 to 1e-9.

Each test starts its processes once and goes through all variants in them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.testing import ModelArgs, Rank, Transformer, run_subtests
from dataparallel.testing.cases import tokens
from dataparallel.testing.ranks import on_processes
from dataparallel.testing.steps import assert_equal, mean_square_loss

pytestmark = pytest.mark.devices("cpu")  # of each rank: slots play no part

BOTH = (False, True)


def whole(tree: dict[str, Any]) -> dict[str, Any]:
    """Copies of the values, of DTensors the whole ones."""
    found = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in tree.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def gradients(model: Transformer) -> dict[str, Any]:
    return whole({name: parameter.grad for name, parameter in model.named_parameters()})


def batch(length: int, vocabulary: int = 8) -> Tensor:
    (x,), _ = tokens(length, vocabulary)(3, 0)
    return x


def build(**changed: Any) -> Transformer:
    return Transformer(ModelArgs(**{"dropout_p": 0.0, **changed}), dtype=torch.float64)


def assert_same_step(one: Transformer, many: Transformer, length: int) -> None:
    """Scores and gradients of a model and of its twin that is divided."""
    x = batch(length, one.model_args.vocab_size)
    scores, expected = many(x), one(x)
    assert_equal(scores.detach(), expected.detach(), "scores", atol=1e-9)
    mean_square_loss(scores).backward()
    mean_square_loss(expected).backward()
    assert_equal(gradients(many), gradients(one), "gradients", atol=1e-9)


def divided(rank: Rank, one: Transformer, sequence: bool) -> Transformer:
    """A twin of the model, which has its first weights, divided among the ranks."""
    many = Transformer(one.model_args, dtype=torch.float64)
    assert Transformer.parallelize(many, rank.mesh(), sequence) is many
    assert (many.output.weight is many.tok_embeddings.weight) == one.model_args.weight_tying
    assert [*dict(many.named_parameters())] == [*dict(one.named_parameters())]
    assert {layer.attention.n_heads for layer in many.layers} == {one.model_args.n_heads // rank.count}
    assert many.tok_embeddings.weight.to_local().shape[0] < one.tok_embeddings.weight.shape[0]
    return many


def trains_alike(rank: Rank, sequence: bool, tied: bool, checkpointed: bool = False, **sizes: int) -> None:
    """Two steps of an optimizer, with sequences of other lengths."""
    one = build(weight_tying=tied, checkpoint_activations=checkpointed, **sizes)
    many = divided(rank, one, sequence)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (many, one))
    for length in (8, 12):
        ours.zero_grad()
        theirs.zero_grad()
        assert_same_step(one, many, length)
        ours.step()
        theirs.step()
        assert_equal(whole(dict(many.named_parameters())), whole(dict(one.named_parameters())), "weights", atol=1e-9)


def with_dropout(rank: Rank, sequence: bool, checkpointed: bool) -> None:
    """Processes that began with the same seed stay together, and blocks are recomputed with the same masks."""
    made = []
    for each in (False, checkpointed):
        model = build(n_layers=1, dropout_p=0.5, checkpoint_activations=each)
        Transformer.parallelize(model, rank.mesh(), sequence)
        torch.manual_seed(1)
        scores = model(batch(8))
        mean_square_loss(scores).backward()
        made.append({"scores": scores.detach(), **gradients(model)})
    assert_equal(made[1], made[0], "with dropout", atol=1e-9)
    others = [torch.empty_like(scores) for _ in range(rank.count)]
    torch.distributed.all_gather(others, scores.detach())
    assert all(torch.equal(other, scores) for other in others)


def refused(rank: Rank) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh, model = rank.mesh(), build()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    two = rank.mesh((1, 2), ("data", "tensor"))
    elsewhere = DeviceMesh("cuda", mesh.mesh, _init_backend=False)
    with pytest.raises(ValueError, match=r"mesh of one dimension; got .*, which has 2: pass a part of it"):
        Transformer.parallelize(model, two, False)
    with pytest.raises(ValueError, match=r"got tok_embeddings.weight on cpu and a mesh of cuda: move the model"):
        Transformer.parallelize(model, elsewhere, False)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    with pytest.raises(ValueError, match="got n_heads=3 and a mesh of 2"):
        Transformer.parallelize(build(n_heads=3, dim=12), mesh, False)
    Transformer.parallelize(model, two["tensor"], True)
    with pytest.raises(ValueError, match=r"the model is divided already: tok_embeddings.weight is a DTensor"):
        Transformer.parallelize(model, mesh, True)
    assert model.layers[0].attention.n_heads == 2
    with pytest.raises(ValueError, match=r"into 2 equal parts; got tokens of shape \(3, 7\): pass sequences"):
        model(batch(7))


def in_all_variants(rank: Rank) -> dict[str, Tensor]:
    run_subtests(rank, {"sequence": BOTH, "tied": BOTH, "checkpointed": BOTH}, trains_alike, rank)
    if rank.count == 2:
        uneven = {"vocab_size": 7, "max_seq_len": 13, "dim": 12, "n_heads": 2, "n_layers": 1}
        run_subtests(rank, {"sequence": BOTH, "tied": BOTH}, trains_alike, rank, **uneven)
        run_subtests(rank, {"sequence": BOTH, "checkpointed": [True]}, with_dropout, rank)
        refused(rank)
    return build().state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_compute_what_one_computes(ranks):
    for state in on_processes(in_all_variants, ranks=ranks):
        assert_equal(state, build().state_dict(), "first weights", atol=0.0)
