"""The target: any causal language model that transformers loads, driven row by row with explicit masks and positions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decoding.cache import RowCache, TreeCache
from decoding.lean import LeanDecoder, Product, lean_decoder, near, see_all
from decoding.static import Shelf, graphs_for, target_rows

# byte-level BPE writes each byte as one printable character
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass
class Target:
    """A loaded target and what decoding needs to know of it."""

    name: str
    model: PreTrainedModel
    tokenizer: Any | None
    stop_token_ids: frozenset[int]
    notes: tuple[str, ...] = ()  # what a run says of how the target was loaded
    hidden_size: int = field(init=False)
    vocab_size: int = field(init=False)
    context_length: int = field(init=False)
    weights_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config.get_text_config()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.context_length = config.max_position_embeddings
        self.weights_bytes = self.model.get_memory_footprint()  # before the fast loop packs them elsewhere
        self._window = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self._softcap = getattr(config, "final_logit_softcapping", None)

    @property
    def body(self) -> nn.Module:
        """The decoder stack: token ids in, features out."""
        return self.model.get_decoder()

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Where features arrive and heads live (of a target on several devices: that of its `lm_head`)."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no text by themselves as <0xE2>; "" without a tokenizer."""
        if self.tokenizer is None:
            return f"<{token_id}>"
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return f"<{token_id}>"
        if piece.startswith("\u2581"):  # sentencepiece writes a space as this block; decoding one token alone drops it
            return piece.replace("\u2581", " ")
        text = self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" in text and all(character in _BYTES for character in piece):
            return "".join(f"<0x{_BYTES[character]:02X}>" for character in piece)
        return text

    @cached_property
    def lean(self) -> LeanDecoder | None:
        """The fast loop over this target's layers, made (and compared with the model) when it is first needed."""
        return lean_decoder(self.model, self._own_forward, self._own_cache)

    @property
    def forward_notes(self) -> tuple[str, ...]:
        """What a run says of the forward: where the fast loop can't be used, and whether a GPU replays graphs."""
        loop = () if self.lean else ("transformers' own forward (no lean loop for this architecture or placement)",)
        if self.device.type != "cuda":
            return loop
        return (*loop, "CUDA graphs" if self.shelf and not self.shelf.refused else "no CUDA graphs (they can't be recorded here)")

    @cached_property
    def shelf(self) -> Shelf | None:
        """Stores with recorded forwards, where there can be any: not for layers that slide or are not run by the fast loop."""
        lean = self.lean
        if not graphs_for(self.device) or lean is None or any(layer.sliding for layer in lean.layers):
            return None
        return Shelf(lean.new_cache, partial(target_rows, lean))

    @cached_property
    def lm_product(self) -> nn.Module | Product:
        """Features -> logits before a soft cap. A CPU's packed copy stands beside the matrix that the embedding may share."""
        weight = self.lm_head.weight
        with torch.inference_mode(False), torch.no_grad():
            if type(self.lm_head) is nn.Linear and weight.device.type == "cpu":
                return Product(weight, self.lm_head.bias)
        return self.lm_head

    def new_cache(self, capacity: int, rows: Sequence[int] = ()) -> TreeCache | RowCache:
        """A request's cache.

        Args:
            capacity: rows that it holds, those of a tree and of its largest forward among them.
            rows: of the forwards that are made again and again (a GPU records them).
        """
        if self.shelf:
            return self.shelf.take(capacity, rows)
        return self.lean.new_cache(capacity) if self.lean else self._own_cache(capacity)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, tail: torch.Tensor | None, cache: TreeCache | RowCache
    ) -> torch.Tensor:
        """Run rows through the target and append them to the cache.

        Args:
            token_ids, positions: [rows].
            tail: [rows, last] bool, what each row sees of the last columns, its own and those of the other rows among
                them; the columns before are all seen. None for a causal prefill of an empty cache or a single row.
            cache: the request's cache.

        Returns:
            Features [rows, hidden]: the last hidden state after the final norm.
        """
        return (self.lean or self._own_forward)(token_ids, positions, tail, cache)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        logits = self.lm_product(features)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def _own_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.model.config.get_text_config().num_hidden_layers, capacity)

    def _own_forward(self, token_ids: torch.Tensor, positions: torch.Tensor, tail: torch.Tensor | None, cache: TreeCache) -> torch.Tensor:
        """The model's own forward, see `forward`."""
        out = self.body(
            input_ids=token_ids[None].to(self.embedding.weight.device),
            attention_mask=self._mask(positions, tail, cache.length),
            position_ids=positions[None],
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state[0].to(self.device)

    def _mask(self, positions: torch.Tensor, tail: torch.Tensor | None, cached: int) -> Any:
        """The 4-D mask transformers takes as it is; a sliding window, where the target has one, is cut into it here."""
        total = cached + len(positions)
        slides = self._window is not None and total > self._window
        if tail is None and not slides:
            return None
        full = see_all(len(positions), total, tail, positions.device)[None, None]
        if not slides:
            return full
        sliding = full & near(positions, cached, self._window)
        if not self._layer_types:
            return sliding  # Mistral: every layer slides
        return {"full_attention": full, "sliding_attention": sliding}
