"""FeatureHead: the network of EAGLE, HASS and KOALA-EAGLE heads (one network; the methods differ in layers and training).

fc(embedding, feature) -> K decoder layers -> the target's `lm_head`. Layer 0 has no input norm and there is no final
norm, because the feature that comes in is already normed and the one that goes out has to look like it (EAGLE, 2401.15077).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

# (layer, query [batch, heads, rows, head_dim], key, value [batch, kv_heads, rows, head_dim]) -> [batch, heads, rows, head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FeatureShape:
    """Sizes of a head. `llama` carries the Llama keys (hidden and intermediate size, heads, norm epsilon, rope)."""

    llama: LlamaConfig
    fc_bias: bool = True
    qkv_bias: bool = False

    @property
    def layers(self) -> int:
        return self.llama.num_hidden_layers

    @property
    def head_dim(self) -> int:
        return self.llama.head_dim or self.llama.hidden_size // self.llama.num_attention_heads


class DraftLayer(nn.Module):
    """A Llama decoder layer whose attention over the past is decided by the caller (`attend`)."""

    def __init__(self, shape: FeatureShape, index: int) -> None:
        super().__init__()
        config, dim = shape.llama, shape.head_dim
        self.index, self.head_dim = index, dim
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if index else nn.Identity()
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(config.hidden_size, config.num_attention_heads * dim, bias=shape.qkv_bias),
                "k_proj": nn.Linear(config.hidden_size, config.num_key_value_heads * dim, bias=shape.qkv_bias),
                "v_proj": nn.Linear(config.hidden_size, config.num_key_value_heads * dim, bias=shape.qkv_bias),
                "o_proj": nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False),
            }
        )
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        normed = self.input_layernorm(x)
        # [batch, rows, heads * head_dim] -> [batch, heads, rows, head_dim]
        query, key, value = (
            self.self_attn[name](normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        mixed = attend(self.index, query, key, value).transpose(1, 2).flatten(2)
        x = x + self.self_attn["o_proj"](mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class FeatureHead(nn.Module):
    """Predicts the target's next feature from (feature i, embedding of token i+1) at position i.

    Tensor names are those of the released EAGLE and HASS checkpoints.
    """

    def __init__(self, shape: FeatureShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.llama.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=shape.fc_bias)
        self.layers = nn.ModuleList(DraftLayer(shape, index) for index in range(shape.layers))
        self.rotary = LlamaRotaryEmbedding(shape.llama)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """[batch, rows, hidden] embeddings (of the next token) and features -> [batch, rows, hidden] next features.

        `rotary` is (cos, sin) [batch, rows, head_dim] of the rows' positions, from `rotary_at`.
        """
        x = self.fc(torch.cat((embeddings, features), dim=-1))  # embedding first (EAGLE)
        for layer in self.layers:
            x = layer(x, rotary, attend)
        return x

    def rotary_at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [batch, rows, head_dim] for positions [batch, rows]."""
        return self.rotary(torch.empty((), dtype=dtype, device=positions.device), positions)
