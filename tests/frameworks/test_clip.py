"""CLIP of transformers, with embeddings gathered from all replicas: the loss and the gradients of one device."""

import pytest
import torch

pytest.importorskip("transformers")

from either_form import both_forms, in_form
from torch import nn
from transformers import CLIPConfig, CLIPModel

from dataparallel import peers


class WithLoss(nn.Module):
    """As in the guide: each replica returns the loss of the whole batch."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = CLIPConfig(
            text_config={
                **sizes,
                "vocab_size": 50,
                "max_position_embeddings": 8,
                "eos_token_id": 49,
                "bos_token_id": 48,
            },
            vision_config={**sizes, "image_size": 8, "patch_size": 4},
            projection_dim=12,
        )
        self.clip = CLIPModel(config)

    def forward(self, input_ids, pixel_values):
        output = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        texts, images = peers.all_gather((output.text_embeds, output.image_embeds))
        logits = texts @ images.T * self.clip.logit_scale.exp()
        rows = torch.arange(len(logits), device=logits.device)
        return (nn.functional.cross_entropy(logits, rows) + nn.functional.cross_entropy(logits.T, rows)) / 2


@both_forms
@pytest.mark.slots(1, 2, 3, 8)
def test_the_loss_is_that_of_the_whole_batch(form, slots, root):
    torch.manual_seed(0)
    model = WithLoss().double().to(root)
    texts, images = torch.randint(49, (17, 8)).to(root), torch.randn(17, 3, 8, 8, dtype=torch.float64).to(root)
    expected = model(texts, images)
    gradients = torch.autograd.grad(expected, [*model.parameters()], allow_unused=True)
    wrapped = in_form(form, model, slots)
    loss = wrapped(texts, images).mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    for parameter, gradient in zip(wrapped.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
