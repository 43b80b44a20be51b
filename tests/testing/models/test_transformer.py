"""The transformer for tests of sharding, on one device: what its options do, and what it refuses."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor, nn

from dataparallel.testing import ModelArgs, Transformer
from dataparallel.testing.cases import tokens
from dataparallel.testing.steps import assert_steps_match, run_step

NO_DROPOUT = ModelArgs(dropout_p=0.0)


def batch(length: int = 6, samples: int = 3) -> Tensor:
    return tokens(length, 8)(samples, 0)[0][0]


def variant(**changed) -> Transformer:
    return Transformer(dataclasses.replace(NO_DROPOUT, **changed), dtype=torch.float64)


class TestNames:
    @pytest.mark.smoke
    def test_the_parts(self):
        model = Transformer(ModelArgs(n_layers=1))
        assert [*dict(model.named_children())] == [
            "tok_embeddings", "pos_embeddings", "dropout", "layers", "norm", "output",
        ]  # fmt: skip
        (block,) = model.layers
        assert {*dict(block.named_children())} == {"attention", "attention_norm", "ffn_norm", "feed_forward"}
        assert {*dict(block.attention.named_children())} == {"wq", "wk", "wv", "wo", "resid_dropout"}
        assert {*dict(block.feed_forward.named_children())} == {"w1", "gelu", "w2", "resid_dropout"}
        assert (model.max_seq_len, model.checkpoint_activations) == (16, False)
        assert model.model_args == ModelArgs(n_layers=1)


class TestTiedWeights:
    def test_tied_weights_are_one_parameter(self):
        tied, apart = variant(), variant(weight_tying=False)
        assert tied.output.weight is tied.tok_embeddings.weight
        assert apart.output.weight is not apart.tok_embeddings.weight
        assert {*dict(apart.named_parameters())} - {*dict(tied.named_parameters())} == {"output.weight"}

    @pytest.mark.parametrize("weight_tying", [True, False])
    def test_they_stay_as_they_are_where_the_model_goes(self, weight_tying, slots):
        model = variant(weight_tying=weight_tying)
        moved = copy.deepcopy(model).to(slots[-1])
        empty = variant(weight_tying=weight_tying, n_layers=1).to("meta").to_empty(device=slots[-1])
        inside = nn.Sequential(copy.deepcopy(model)).to(slots[-1])[0]
        for each in (moved, empty, inside, pickle.loads(pickle.dumps(model)), copy.deepcopy(model).float()):
            assert (each.output.weight is each.tok_embeddings.weight) == weight_tying


class TestWhatItComputes:
    @pytest.mark.parametrize("use_attn_mask", [True, False])
    def test_a_token_sees_itself_and_earlier_ones_or_all(self, use_attn_mask):
        model, before = variant(use_attn_mask=use_attn_mask), batch()
        after = before.clone()
        after[:, 3] = (after[:, 3] + 1) % 8
        changed = (model(before) - model(after)).abs().amax(dim=(0, 2)) > 1e-9
        assert changed.tolist() == [not use_attn_mask] * 3 + [True] * 3

    def test_attention_is_that_of_torchs_module(self):
        """With the same weights, `nn.MultiheadAttention` computes the same."""
        attention = variant().layers[0].attention
        theirs = nn.MultiheadAttention(16, 4, bias=False, batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            theirs.in_proj_weight.copy_(torch.cat([attention.wq.weight, attention.wk.weight, attention.wv.weight]))
            theirs.out_proj.weight.copy_(attention.wo.weight)
        x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        torch.testing.assert_close(attention(x), theirs(x, x, x, attn_mask=later)[0], atol=1e-12, rtol=0)

    def test_dropout_is_of_training_only(self):
        model = Transformer(ModelArgs(dropout_p=0.5))
        assert not torch.equal(model(batch()), model(batch()))
        model.eval()
        assert torch.equal(model(batch()), model(batch()))
        assert torch.equal(model(batch()), Transformer(NO_DROPOUT)(batch()))

    @pytest.mark.parametrize("dropout_p", [0.0, 0.5])
    def test_checkpointing_changes_no_bit(self, dropout_p):
        made = []
        for checkpoint_activations in (False, True):
            torch.manual_seed(0)
            model = variant(dropout_p=dropout_p, checkpoint_activations=checkpoint_activations)
            made.append(run_step(model, ((batch(),), {})))
        assert_steps_match(*made, atol=0.0)

    def test_checkpointed_blocks_are_recomputed(self):
        model, calls = variant(checkpoint_activations=True), []
        for layer in model.layers:
            layer.attention.register_forward_hook(lambda *_: calls.append(0))
        scores = model(batch()).sum()
        assert len(calls) == 2
        scores.backward()
        assert len(calls) == 4

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_scores_are_float32_at_least(self, dtype):
        assert Transformer(NO_DROPOUT, dtype=dtype)(batch()).dtype == torch.promote_types(dtype, torch.float32)


class TestRefused:
    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (lambda: Transformer(ModelArgs(n_heads=3)), ValueError, "multiple of n_heads; got dim=16, n_heads=3"),
            (lambda: variant()(batch(17)), ValueError, r"at most max_seq_len=16 tokens; got tokens of shape \(3, 17\)"),
            (lambda: variant()(batch()[0]), ValueError, r"shape \(samples, length\); got \(6,\)"),
            (lambda: Transformer.parallelize(nn.Linear(2, 2), None, False), TypeError, "a Transformer; got Linear"),
        ],
    )
    def test_what_it_does_not_take(self, call, error, message):
        with pytest.raises(error, match=message):
            call()

    @pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
    def test_parallelize_takes_a_mesh(self):
        with pytest.raises(TypeError, match="needs a mesh of processes; got list: make one with"):
            Transformer.parallelize(variant(), ["cpu", "cpu"], False)

    def test_parallelize_says_that_torch_is_built_without_processes(self, monkeypatch):
        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="is built without it: use another build"):
            Transformer.parallelize(variant(), None, False)
