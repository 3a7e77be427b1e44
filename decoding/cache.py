"""Key/value caches with a fixed size, spoken to through transformers' Cache interface."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _FixedLayer(CacheLayerMixin):
    """Keys and values [batch, kv_heads, capacity, head_dim], allocated at the first write on the layer's own device."""

    is_sliding = False  # the masks that are passed along decide what is seen

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, head_dim)
        self.values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class TreeLayer(_FixedLayer):
    """Rows up to `length` are committed or pending; a write appends in place."""

    length = 0

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def commit(self, start: int, rows: torch.Tensor | None, count: int) -> None:
        """Keep `count` of the rows written since `start`: those at start + rows (None: the first ones), in order."""
        if rows is not None:
            rows = rows.to(self.keys.device)
            for store in (self.keys, self.values):
                store[:, :, start : start + count] = store[:, :, rows + start]
        self.length = start + count


class TreeCache(Cache):
    """The target's cache of one request: the rows of a verified tree are appended, the accepted path is kept."""

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[TreeLayer(capacity) for _ in range(layers)])
        self.capacity = capacity

    @property
    def length(self) -> int:
        return self.layers[0].length

    def commit(self, start: int, rows: torch.Tensor | None, count: int) -> None:
        """Cached keys are already rotated to their position (= depth), so committing a path is a copy of rows, in place.

        Args:
            start: rows committed before this step.
            rows: [count] indices, relative to `start`, of the rows to keep, ascending; None where they are 0..count-1.
            count: number of rows to keep.
        """
        for layer in self.layers:
            layer.commit(start, rows, count)


class RowCache:
    """Keys and values of one request, all layers in one tensor: rows are appended, an accepted path is kept."""

    def __init__(self, layers: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            width: numbers per row and layer: the keys of all heads, then their values.
        """
        self.store = torch.empty(layers, capacity, width, dtype=dtype, device=device)
        self.length = 0
        self.fixed: dict[int, Any] = {}  # rows -> a forward of that shape over this store (decoding.static.FixedRows)

    @property
    def capacity(self) -> int:
        return self.store.shape[1]

    def lend(self) -> "RowCache":
        """An empty cache over the same store."""
        lent = copy.copy(self)
        lent.length = 0
        return lent

    def forward_for(self, rows: int, tail: torch.Tensor | None) -> Any:
        """The smallest recorded forward that takes so many rows; None where there is none (a prompt, or no graphs)."""
        if not self.fixed or (tail is None and rows > 1):
            return None
        return self.fixed.get(min((size for size in self.fixed if size >= rows), default=0))

    def commit(self, start: int, rows: torch.Tensor | None, count: int) -> None:
        """See TreeCache.commit."""
        if rows is not None:
            self.store[:, start : start + count] = self.store[:, rows + start]
        self.length = start + count


class SlotLayer(_FixedLayer):
    """Every batch row has its own length; each write puts one token per row at that row's position."""

    def __init__(self, capacity: int, place: Callable[[], tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        super().__init__(capacity)
        self.place = place

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys.zero_()
        self.values.zero_()  # masked rows are multiplied by 0, and 0 * NaN of unwritten memory is NaN

    def get_seq_length(self) -> int:
        return self.place()[2] - 1

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions, longest = self.place()
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[:, :, :longest], self.values[:, :, :longest]


class SlotCache(Cache):
    """A batch of unrelated sequences that start and end at different times (continuous batching)."""

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[SlotLayer(capacity, self._place) for _ in range(layers)])
        self.rows = torch.arange(batch, device=device)
        self.positions = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = 1

    def _place(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.rows, self.positions, self.longest

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Set where the next token of each row goes; returns the mask [batch, 1, 1, longest] (True = visible)."""
        self.positions = positions
        self.longest = int(positions.max()) + 1
        return (torch.arange(self.longest, device=positions.device) <= positions[:, None])[:, None, None]
