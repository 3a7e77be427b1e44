"""Small targets and heads for tests: a table in place of a model, and untrained heads for real ones."""

from collections.abc import Sequence

import torch
from transformers import LlamaConfig

from decoding.head import DraftTree
from decoding.records import HeadInfo, TreeShape
from decoding.target import Target
from heads.checkpoint import HeadMeta
from heads.feature import FeatureHead, FeatureShape
from heads.session import FeatureDraftHead


class TableCache:
    """Tokens and positions in place of keys and values."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, start: int, rows: torch.Tensor | None, count: int) -> None:
        kept = range(count) if rows is None else rows.tolist()
        self.tokens[start:] = [self.tokens[start + row] for row in kept]
        self.positions[start:] = [self.positions[start + row] for row in kept]


class TableTarget:
    """A target whose next-token logits depend on the two tokens before: table[previous, own]. What is "previous" it
    finds through the mask and the positions, as attention would, so a wrong mask or commit shows."""

    name, tokenizer, device, dtype, context_length = "table", None, torch.device("cpu"), torch.float32, 4096
    stop_token_ids: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    forward_notes: tuple[str, ...] = ()

    def __init__(self, vocab: int, seed: int = 0, scale: float = 1.5) -> None:
        self.vocab_size = vocab
        self.table = scale * torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed))

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def new_cache(self, capacity: int, rows: Sequence[int] = ()) -> TableCache:
        return TableCache()

    def forward(self, token_ids, positions, tail, cache) -> torch.Tensor:
        start = cache.length
        cache.tokens += token_ids.tolist()
        cache.positions += positions.tolist()
        total = cache.length
        visible = torch.ones(len(token_ids), total, dtype=torch.bool)
        if tail is None:
            visible = visible.tril(start)
        else:
            assert tail.shape == (len(token_ids), len(token_ids))
            visible[:, start:] = tail
        columns = torch.tensor([cache.positions, cache.tokens])
        features = []
        for row, (token, position) in enumerate(zip(token_ids.tolist(), positions.tolist(), strict=True)):
            seen, tokens = columns[:, visible[row]].tolist()
            assert sorted(seen) == list(range(position + 1)), "a row sees each earlier position once"
            features.append([tokens[seen.index(position - 1)] if position else 0, token])
        return torch.tensor(features, dtype=torch.float32)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        pairs = features.long()
        return self.table[pairs[:, 0], pairs[:, 1]]


class TableHead:
    """Drafts for a TableTarget. `choose` gets the target's logits at a node and says which children it proposes."""

    name = "stub"
    tree = TreeShape(3, 8, 64)

    def __init__(self, target: TableTarget, choose) -> None:
        self.target, self.choose = target, choose
        self.info = HeadInfo(method="stub", layers=1, parameters=0, draft_vocab_size=target.vocab_size)

    def start(self, capacity: int, shape: TreeShape) -> "TableHead":
        self.shape = shape
        return self

    def propose(self, features: torch.Tensor, token_ids: torch.Tensor) -> DraftTree:
        last = (int(features[-1, 1]), int(token_ids[-1]))
        nodes: list[tuple[int, int, int]] = []  # token, parent, depth
        level = [(-1, last)]
        for depth in range(1, self.shape.depth + 1):
            below = []
            for parent, pair in level:
                for token in self.choose(self.target.table[pair]):
                    below.append((len(nodes), (pair[1], token)))
                    nodes.append((token, parent, depth))
            level = below
        tokens, parents, depths = (torch.tensor([node[i] for node in nodes], dtype=torch.long) for i in range(3))
        scores = -depths.float()
        return DraftTree(tokens, parents, depths, torch.full_like(scores, -1.0), scores)


def untrained_head(target: Target, layers: int = 1, seed: int = 0, draft_vocab: torch.Tensor | None = None) -> FeatureDraftHead:
    """A FeatureHead of the target's own sizes with random weights."""
    config = target.model.config
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim if getattr(config, "head_dim", None) else None,
        num_hidden_layers=layers,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )
    torch.manual_seed(seed)
    return FeatureDraftHead("untrained", FeatureHead(FeatureShape(llama)), HeadMeta("eagle", target.name), target, draft_vocab)
