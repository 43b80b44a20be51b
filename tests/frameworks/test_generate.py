"""Greedy generation by a model of transformers, with a cache of keys and values: what one device generates."""

import copy
from types import MappingProxyType

import pytest
import torch

pytest.importorskip("transformers")

from tiny import gpt2, tokens
from transformers import DynamicCache

from dataparallel import PerReplica
from dataparallel.composable import register_forward_method, replicate
from each_form import composable_forms, replicating_forms

NEW_TOKENS = 6


@pytest.fixture
def model(root):
    return gpt2().eval().to(root)


@pytest.fixture
def ids(root):
    return tokens(7, 4).to(root)


def step_by_step(model, ids, cache=None, logits=()):
    """Token ids, and the logits of each step, of a loop as users write it."""
    for _ in range(NEW_TOKENS):
        output = model(ids if cache is None or not logits else ids[:, -1:], past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, (*logits, output.logits[:, -1])
        ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
    return ids, torch.stack(logits), cache


@replicating_forms
@pytest.mark.slots(1, 2, 3)
@torch.no_grad()
def test_step_by_step(form, model, ids, slots):
    expected, expected_logits, _ = step_by_step(model, ids)
    found, logits, cache = step_by_step(form(copy.deepcopy(model), slots), ids)
    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-12)
    assert type(cache) is (DynamicCache if len(slots) == 1 else PerReplica)
    lengths = [part.get_seq_length() for part in (cache if isinstance(cache, PerReplica) else [cache])]
    assert lengths == [4 + NEW_TOKENS - 1] * len(slots)


@replicating_forms
@torch.no_grad()
def test_one_cache_for_all_replicas_is_refused(form, model, ids, slots):
    wrapped = form(copy.deepcopy(model), slots)
    with pytest.raises(ValueError, match=r'"past_key_values"\] is one DynamicCache, to which 3 replicas would write'):
        wrapped(ids, past_key_values=DynamicCache(config=model.config), use_cache=True)


@replicating_forms
def test_gradients_through_a_cache(form, model, ids, slots):
    wrapped = form(copy.deepcopy(model), slots)
    for net in (model, wrapped):
        first = net(ids[:, :3], use_cache=True)
        second = net(ids[:, 3:], past_key_values=first.past_key_values, use_cache=True)
        (first.logits.square().mean() + second.logits.square().mean()).backward()
    for found, expected in zip(wrapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)


class TestGenerate:
    """The method ``generate`` itself, each replica with its own loop."""

    settings = MappingProxyType({"max_new_tokens": NEW_TOKENS, "do_sample": False})

    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.slots(1, 3)
    def test_it_runs_on_the_slots(self, model, ids, slots, use_cache):
        expected = model.generate(ids, use_cache=use_cache, **self.settings)
        replicate(model, devices=slots)
        register_forward_method(model, "generate")
        assert model.generate(ids, use_cache=use_cache, **self.settings).tolist() == expected.tolist()

    @composable_forms
    def test_sequences_that_end_early_are_filled(self, form, model, ids, slots):
        """A replica stops when all of its sequences have ended, and one device fills those that have."""
        settings = {**self.settings, "pad_token_id": 0, "output_scores": True, "return_dict_in_generate": True}
        # The token that ends the sequences of the last chunk at once.
        settings["eos_token_id"] = int(model.generate(ids, **self.settings)[-1, ids.shape[1]])
        expected = model.generate(ids, **settings)
        assert len(expected.scores) > 1
        form(model, slots)
        register_forward_method(model, "generate")
        with pytest.raises(ValueError, match=r"cannot gather output.*pad=NUMBER of the form, or of register_forward_m"):
            model.generate(ids, **settings)
        register_forward_method(model, "generate", pad={"sequences": 0, "scores": 0.0})
        found = model.generate(ids, **settings)
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert len(found.scores) == len(expected.scores)
        torch.testing.assert_close(found.scores[0], expected.scores[0])
        assert found.scores[-1][-1].tolist() == [0.0] * model.config.vocab_size

    def test_its_cache_goes_back_into_it(self, model, ids, slots):
        settings = {**self.settings, "return_dict_in_generate": True}
        expected = model.generate(ids, **settings)
        # What `generate` calls it is what the output's field is called: "cache" in new releases of transformers.
        name = "cache" if "cache" in expected else "past_key_values"
        again = model.generate(expected.sequences, **{name: expected.past_key_values}, **settings)
        replicate(model, devices=slots)
        register_forward_method(model, "generate")
        first = model.generate(ids, **settings)
        assert type(first.past_key_values) is PerReplica
        second = model.generate(first.sequences, **{name: first.past_key_values}, **settings)
        assert second.sequences.tolist() == again.sequences.tolist()

    def test_where_it_is_not_registered_the_error_says_how(self, model, ids, slots):
        replicate(model, devices=slots)
        with pytest.raises(ValueError, match=r"call register_forward_method\(model, 'generate'\) first"):
            model.generate(ids, **self.settings)
