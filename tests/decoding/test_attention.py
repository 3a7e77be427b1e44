"""Grouped attention is transformers' own attention with other words."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decoding.attention import GROUPED, use_grouped_attention

SIZES = {"vocab_size": 61, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 9, "head_dim": 4}


def test_it_changes_no_number() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_key_value_heads=3), attn_implementation="sdpa").eval()
    ids = torch.randint(61, (3, 20))
    padded = torch.ones_like(ids).index_fill_(1, torch.arange(4), 0)
    own_mask = (torch.rand(3, 1, 20, 20) > 0.5) | torch.eye(20, dtype=torch.bool)
    masks = (None, padded, own_mask)
    wanted = [model(ids, attention_mask=mask).logits for mask in masks]
    use_grouped_attention(model)
    assert model.config._attn_implementation == GROUPED
    for mask, logits in zip(masks, wanted, strict=True):
        seen = slice(4, None) if mask is padded else slice(None)  # what padding itself answers is nobody's business
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, seen], logits[:, seen], rtol=0, atol=1e-6)
    for mask, logits in zip((None, padded), wanted, strict=False):  # one row on a cache: its heads are put together
        cache = model(ids[:, :19], attention_mask=None if mask is None else mask[:, :19]).past_key_values
        newest = model(ids[:, 19:], attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(newest[:, 0], logits[:, 19], rtol=0, atol=1e-6)
    out = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert out.shape[1] == 28


def test_other_attention_is_left_alone() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_key_value_heads=3), attn_implementation="eager")
    use_grouped_attention(model)
    assert model.config._attn_implementation == "eager"
