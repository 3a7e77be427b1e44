"""HASS context alignment (arXiv 2408.15766, section 3.2): the head sees in training what it will see when drafting.

At alignment step m (0-based) the head is fed its own features of step m - 1, shifted by one position; a query at row r
sees at column c the feature version max(0, m - (r - c)): itself the newest, the past the older the further back, all
columns <= r - m the target's true features. That is the key/value cache that a draft of depth m + 1 has.
"""

import torch
from torch.nn import functional

from heads.feature import FeatureHead


class AlignedAttention:
    """The `attend` of training: keeps, per layer, the keys and values of every feature version.

    Version 0 costs one [rows, rows] score matrix; each draft version adds one score per row (a diagonal), and all of
    them go through ONE softmax. With a single version this is plain causal attention.
    """

    def __init__(self) -> None:
        self.history: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.version = 0

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [batch, heads, rows, head_dim], key and value [batch, kv_heads, rows, head_dim] of the newest version."""
        if layer == len(self.history):
            self.history.append([])
        self.history[layer].append((key, value))
        versions, m = self.history[layer], self.version
        if m == 0:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
        batch, heads, rows, dim = query.shape
        kv_heads = key.shape[1]
        grouped = query.view(batch, kv_heads, heads // kv_heads, rows, dim) * dim**-0.5
        base_key, base_value = versions[0]
        # scores against true features, columns <= r - m
        scores = grouped @ base_key[:, :, None].transpose(-1, -2)  # [batch, kv_heads, group, rows, rows]
        hidden = ~torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril(-m)
        scores = scores.float().masked_fill(hidden, -torch.inf)
        # scores against draft version v at column r - (m - v), the same distance for every row
        diagonals = []
        for v in range(1, m + 1):
            back = _shift(versions[v][0], m - v)[:, :, None]
            score = (grouped * back).sum(-1, keepdim=True).float()
            if m > v:
                score = score.masked_fill(torch.arange(rows, device=query.device)[:, None] < m - v, -torch.inf)
            diagonals.append(score)
        weights = torch.softmax(torch.cat([scores, *diagonals], dim=-1), dim=-1).to(value.dtype)
        mixed = weights[..., :rows] @ base_value[:, :, None]
        for v in range(1, m + 1):
            mixed = mixed + weights[..., rows + v - 1, None] * _shift(versions[v][1], m - v)[:, :, None]
        return mixed.view(batch, heads, rows, dim)


def _shift(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Row r takes what stood at row r - `rows` [batch, heads, rows, head_dim]; the first rows become zero."""
    return functional.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]] if rows else x


def aligned_forwards(head: FeatureHead, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """The head's outputs at alignment steps 0 .. steps - 1 (one step is plain EAGLE training).

    Features are detached between steps; keys and values of all versions keep their gradient, as in the released code,
    which computes them anew in each of its forwards.

    Args:
        embeddings: [batch, rows, hidden] of the token that follows each position.
        features: [batch, rows, hidden] true target features.

    Returns:
        Per step [batch, rows, hidden]: row r is the head's estimate of the feature at position r + 1.
    """
    rotary = head.rotary_at(torch.arange(features.shape[1], device=features.device)[None], features.dtype)
    attend = AlignedAttention()
    current, outputs = features, []
    for step in range(steps):
        attend.version = step
        out = head(embeddings, current, rotary, attend)
        outputs.append(out)
        # f(m+1) at position r + 1 is what was predicted at row r; the first position keeps its true feature
        current = torch.cat((features[:, :1], out[:, :-1].detach().to(features.dtype)), dim=1)
    return outputs
