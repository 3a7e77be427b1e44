"""Drafting with a FeatureHead: stable keys and values from true target features, a tree grown level by level."""

from functools import cached_property
from pathlib import Path

import torch

from decoding.cache import RowCache
from decoding.errors import UsageError
from decoding.head import DraftTree
from decoding.lean import Layer, Product, Rotary, additive, fuse
from decoding.records import HeadInfo, TreeShape
from decoding.static import FixedRows, Shelf, graphs_for
from decoding.target import Target
from decoding.tree import TreePool
from heads.checkpoint import HeadMeta, check_target, draft_dtype, load_feature_head
from heads.feature import FeatureHead
from heads.vocabulary import draft_product, most_frequent


class FeatureDraftHead:
    """A FeatureHead bound to its target (decoding.head.DraftHead)."""

    def __init__(self, name: str, module: FeatureHead, meta: HeadMeta, target: Target, draft_vocab: torch.Tensor | None = None) -> None:
        """
        Args:
            draft_vocab: [tokens] ascending target token ids that the head may propose; None = all (FR-Spec, 2502.14856).
        """
        check_target(name, module.shape.llama.hidden_size, module.shape.llama.vocab_size, draft_vocab, target)
        self.name, self.meta, self.target = name, meta, target
        self.dtype = draft_dtype(module.fc.weight.dtype, target)
        self.module = module.to(target.device, self.dtype).eval().requires_grad_(False)
        self.draft_vocab = None if draft_vocab is None else draft_vocab.to(target.device)
        self.tree = meta.tree or TreeShape()
        self.info = HeadInfo(
            method=meta.method,
            layers=module.shape.layers,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            draft_vocab_size=target.vocab_size if draft_vocab is None else len(draft_vocab),
            dtype=str(self.dtype).removeprefix("torch."),
            adversary=meta.adversary,
            align_steps=meta.align_steps,
            tokens_seen=meta.tokens_seen,
        )

    @classmethod
    def load(cls, folder: Path, target: Target, name: str | None = None, draft_vocab: int | None = None) -> "FeatureDraftHead":
        """Read a head folder and bind it.

        Args:
            draft_vocab: let it propose only that many of the most frequent tokens; None = those it was trained with.

        Raises:
            UsageError: it does not fit the target.
        """
        module, meta, own = load_feature_head(folder)
        return cls(name or folder.name, module, meta, target, most_frequent(own, draft_vocab, target))

    @cached_property
    def lm_head(self) -> Product:
        """Draft feature -> logits of the tokens that the head may propose."""
        return draft_product(self.target, self.draft_vocab, self.dtype)

    @cached_property
    def fc(self) -> Product:
        return fuse([self.module.fc])

    @cached_property
    def layers(self) -> list[Layer]:
        layers = [Layer(layer, self.module.shape.head_dim) for layer in self.module.layers]
        for layer in layers:
            layer.fuse()
        return layers

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.module.rotary)

    @cached_property
    def shelf(self) -> Shelf | None:
        """Stores with recorded forwards, where there can be any."""
        return Shelf(self.new_cache, self._fixed) if graphs_for(self.target.device) else None

    def new_cache(self, capacity: int) -> RowCache:
        """An empty cache of the head's own layers."""
        target = self.target
        with torch.inference_mode(False), torch.no_grad():  # what is made here outlives this request
            self.rotary.reserve(capacity, target.device)
            return RowCache(len(self.layers), capacity, self.layers[0].kv_width, self.dtype, target.device)

    def enter(self, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer: embedding first (EAGLE)."""
        return self.fc(torch.cat((self.embed(token_ids), features), dim=-1))

    def _fixed(self, store: torch.Tensor, rows: int) -> FixedRows:
        return FixedRows(self.layers, self.rotary, store, rows, self.enter, lambda x: x, self.target.hidden_size)

    def start(self, capacity: int, shape: TreeShape) -> "FeatureSession":
        if shape.top_k > self.info.draft_vocab_size:
            raise UsageError(
                f"tree_top_k {shape.top_k} is more than the {self.info.draft_vocab_size} tokens that head {self.name} can propose"
            )
        return FeatureSession(self, capacity, shape)

    def token_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary indices -> target token ids."""
        return indices if self.draft_vocab is None else self.draft_vocab[indices]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self.target.embedding
        return table(token_ids.to(table.weight.device)).to(self.target.device, self.dtype)

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(features.to(self.dtype))
        if self.draft_vocab is None:
            return logits
        full = logits.new_full((len(features), self.target.vocab_size), -torch.inf)
        return full.index_copy_(1, self.draft_vocab, logits)


class FeatureSession:
    """Draft state of one request: keys and values of the committed positions, room for one tree behind them."""

    def __init__(self, head: FeatureDraftHead, capacity: int, shape: TreeShape) -> None:
        self.head, self.shape = head, shape
        self.stable = 0  # committed positions, always computed from true target features
        # an extension takes up to depth + 1 rows, a level top_k
        room = capacity + max(shape.depth * shape.top_k, shape.depth + 1)
        rows = (shape.depth + 1, shape.top_k)
        self.cache = head.shelf.take(room, rows) if head.shelf else head.new_cache(room)
        self.root = torch.full((1,), -1, dtype=torch.long, device=head.target.device)

    @torch.inference_mode()
    def propose(self, features: torch.Tensor, token_ids: torch.Tensor) -> DraftTree:
        """EAGLE-2: extend with what was committed, expand level by level, rerank (see decoding.head.DraftSession)."""
        head, shape, cache = self.head, self.shape, self.cache
        features = features.to(head.dtype)
        new = len(token_ids)
        # extend: pairs (feature i, token i+1) at position i; their keys and values stay
        cache.length = self.stable
        tail = torch.ones(new, new, dtype=torch.bool, device=features.device).tril() if new > 1 and self.stable else None
        positions = torch.arange(self.stable, self.stable + new, device=features.device)
        hidden = self._forward(features, token_ids, positions, tail)[-1:]
        self.stable += new

        # level 1: children of the root
        pool = TreePool(shape)
        pool.add_level(head.lm_head(hidden), self.root, features.new_zeros(1, dtype=torch.float32))
        drafted = [(self.root, hidden)]
        ancestors = None
        for level in range(1, shape.depth):
            # expand: the beam's nodes, fed with their parent's draft feature, all at the level's position
            tokens, numbers, scores, rows = pool.next_beam()
            own = torch.eye(len(tokens), dtype=torch.bool, device=features.device)
            ancestors = own if ancestors is None else torch.cat((ancestors[rows], own), dim=1)
            position = (positions[-1:] + level).expand(len(tokens))
            hidden = self._forward(hidden[rows], head.token_ids(tokens), position, ancestors)
            drafted.append((numbers, hidden))
            pool.add_level(head.lm_head(hidden), numbers, scores)

        tokens, parents, depths, logprobs, scores, place = pool.keep()

        def own_features() -> torch.Tensor:
            rows = hidden.new_full((len(tokens) + 1, hidden.shape[-1]), torch.nan)
            for numbers, estimates in drafted:
                kept = place[numbers]
                there = (kept >= 0) | (numbers < 0)
                rows[kept[there] + 1] = estimates[there]
            return rows

        return DraftTree(head.token_ids(tokens), parents, depths, logprobs, scores, own_features)

    def _forward(self, features: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, tail: torch.Tensor | None) -> torch.Tensor:
        """[rows, hidden] features and the tokens behind them -> [rows, hidden] next features; see Target.forward for `tail`."""
        head, cache = self.head, self.cache
        start, end = cache.length, cache.length + len(token_ids)
        if fixed := cache.forward_for(len(token_ids), tail):
            cache.length = end
            return fixed(token_ids, positions, tail, start, features).clone()  # kept until the record is made
        mask = None if tail is None else additive(tail, end, head.layers[0].groups, features.dtype)
        rotary = head.rotary.at(positions)
        x = head.enter(token_ids, features)
        for layer, store in zip(head.layers, cache.store.unbind(0), strict=True):
            x = layer(x, rotary, store, end, mask)
        cache.length = end
        return x
