"""Drafting with a FeatureHead: stable keys and values from true target features, a tree grown level by level."""

from pathlib import Path

import torch
from torch.nn import functional

from decoding.errors import UsageError
from decoding.head import DraftTree
from decoding.records import HeadInfo, TreeShape
from decoding.target import Target
from decoding.tree import TreePool
from heads.checkpoint import HeadMeta, check_target, load_feature_head
from heads.feature import FeatureHead


class FeatureDraftHead:
    """A FeatureHead bound to its target (decoding.head.DraftHead)."""

    def __init__(self, name: str, module: FeatureHead, meta: HeadMeta, target: Target, draft_vocab: torch.Tensor | None = None) -> None:
        """
        Args:
            draft_vocab: [tokens] ascending target token ids that the head may propose; None = all (FR-Spec, 2502.14856).
        """
        check_target(name, module.shape.llama.hidden_size, module.shape.llama.vocab_size, draft_vocab, target)
        self.name, self.meta, self.target = name, meta, target
        self.module = module.to(target.device, target.dtype).eval().requires_grad_(False)
        self.draft_vocab = None if draft_vocab is None else draft_vocab.to(target.device)
        weight = target.lm_head.weight
        self.lm_head = weight if draft_vocab is None else weight[self.draft_vocab].contiguous()
        self.tree = meta.tree or TreeShape()
        self.info = HeadInfo(
            method=meta.method,
            layers=module.shape.layers,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            draft_vocab_size=len(self.lm_head),
            adversary=meta.adversary,
            align_steps=meta.align_steps,
            tokens_seen=meta.tokens_seen,
        )

    @classmethod
    def load(cls, folder: Path, target: Target, name: str | None = None) -> "FeatureDraftHead":
        """Read a head folder and bind it; raises UsageError where it does not fit the target."""
        module, meta, draft_vocab = load_feature_head(folder)
        return cls(name or folder.name, module, meta, target, draft_vocab)

    def start(self, capacity: int, shape: TreeShape) -> "FeatureSession":
        if shape.top_k > len(self.lm_head):
            raise UsageError(f"tree_top_k {shape.top_k} is more than the {len(self.lm_head)} tokens that head {self.name} can propose")
        return FeatureSession(self, capacity, shape)

    def token_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary indices -> target token ids."""
        return indices if self.draft_vocab is None else self.draft_vocab[indices]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self.target.embedding
        return table(token_ids.to(table.weight.device)).to(self.target.device)

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(features, self.lm_head)
        if self.draft_vocab is None:
            return logits
        full = logits.new_full((len(features), self.target.vocab_size), -torch.inf)
        return full.index_copy_(1, self.draft_vocab, logits)


class FeatureSession:
    """Draft state of one request: keys and values of the committed positions, room for one tree behind them."""

    def __init__(self, head: FeatureDraftHead, capacity: int, shape: TreeShape) -> None:
        self.head, self.shape = head, shape
        self.stable = 0  # committed positions, always computed from true target features
        self.written = 0  # rows in use: the stable ones and the levels of the tree that is being drafted
        self.mask: torch.Tensor | None = None  # of the rows that are being computed: [rows, written + rows], True = visible
        config, target = head.module.shape.llama, head.target
        size = (1, config.num_key_value_heads, capacity + shape.depth * shape.top_k, head.module.shape.head_dim)
        self.keys = [torch.empty(size, device=target.device, dtype=target.dtype) for _ in range(head.module.shape.layers)]
        self.values = [torch.empty_like(keys) for keys in self.keys]

    @torch.inference_mode()
    def propose(self, features: torch.Tensor, token_ids: torch.Tensor) -> DraftTree:
        """EAGLE-2: extend with what was committed, expand level by level, rerank (see decoding.head.DraftSession)."""
        head, shape = self.head, self.shape
        new = len(token_ids)
        # extend: pairs (feature i, token i+1) at position i; their keys and values stay
        self.written = self.stable
        self.mask = None
        if new > 1 and self.stable:
            self.mask = torch.ones(new, self.stable + new, dtype=torch.bool, device=features.device).tril(self.stable)
        positions = torch.arange(self.stable, self.stable + new, device=features.device)
        hidden = self._forward(features, token_ids, positions)[-1:]
        self.stable += new

        # level 1: children of the root
        pool = TreePool(shape)
        root = torch.full((1,), -1, dtype=torch.long, device=features.device)
        pool.add_level(functional.linear(hidden, head.lm_head), root, features.new_zeros(1, dtype=torch.float32))
        drafted = [(root, hidden)]
        ancestors = None
        for level in range(1, shape.depth):
            # expand: the beam's nodes, fed with their parent's draft feature, all at the level's position
            tokens, numbers, scores, rows = pool.next_beam()
            beam = len(tokens)
            own = torch.eye(beam, dtype=torch.bool, device=features.device)
            ancestors = own if ancestors is None else torch.cat((ancestors[rows], own), dim=1)
            prefix = torch.ones(beam, self.stable, dtype=torch.bool, device=features.device)
            self.mask = torch.cat((prefix, ancestors), dim=1)
            position = torch.full((beam,), self.stable + level - 1, dtype=torch.long, device=features.device)
            hidden = self._forward(hidden[rows], head.token_ids(tokens), position)
            drafted.append((numbers, hidden))
            pool.add_level(functional.linear(hidden, head.lm_head), numbers, scores)

        tokens, parents, depths, logprobs, scores, place = pool.keep()

        def own_features() -> torch.Tensor:
            rows = hidden.new_full((len(tokens) + 1, hidden.shape[-1]), torch.nan)
            for numbers, estimates in drafted:
                kept = place[numbers]
                there = (kept >= 0) | (numbers < 0)
                rows[kept[there] + 1] = estimates[there]
            return rows

        return DraftTree(head.token_ids(tokens), parents, depths, logprobs, scores, own_features)

    def _forward(self, features: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rotary = self.head.module.rotary_at(positions[None], features.dtype)
        out = self.head.module(self.head.embed(token_ids)[None], features[None], rotary, self._attend)[0]
        self.written += len(token_ids)
        return out

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = key.shape[2]
        end = self.written + rows
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.written : end] = key
        values[:, :, self.written : end] = value
        return functional.scaled_dot_product_attention(
            query,
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=self.mask,
            is_causal=self.mask is None and rows > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )
