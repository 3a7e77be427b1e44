"""Decoder layers in shapes that never change, and their replay as a CUDA graph.

A decoding step at small batch launches some hundred kernels of a few microseconds each; a graph launches them at once. It
can only replay what it recorded: the same addresses and shapes. So the keys and values are all read, up to the capacity,
and an additive mask hides what is not there; where rows are written is a tensor, not a slice. What was recorded is kept
from run to run (`Shelf`).
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import functional

from decoding.cache import RowCache
from decoding.lean import Layer, LeanDecoder, Rotary, additive
from decoding.space import on_zero_gpu

BUCKET = 512  # capacities are rounded up to this: runs of a similar length share one store


class FixedRows:
    """Up to `rows` rows through some layers over one store."""

    def __init__(
        self,
        layers: Sequence[Layer],
        rotary: Rotary,
        store: torch.Tensor,
        rows: int,
        enter: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        leave: Callable[[torch.Tensor], torch.Tensor],
        hidden: int = 0,
    ) -> None:
        """
        Args:
            store: [layers, capacity, kv_width] numbers: what is masked is multiplied by zero, and must not be NaN.
            enter: token ids [rows] and features [rows, hidden] (None without `hidden`) -> what goes into the first layer.
            leave: what comes out of the last one -> the result.
            hidden: size of the features that come in beside the tokens (a draft head), or 0.
        """
        self.layers, self.rotary, self.store, self.rows = layers, rotary, store, rows
        self.enter, self.leave, self.groups = enter, leave, layers[0].groups
        self.ids, self.positions, self.slots = (torch.zeros(rows, dtype=torch.long, device=store.device) for _ in range(3))
        self.features = store.new_zeros(rows, hidden) if hidden else None
        self.mask = store.new_zeros(self.groups * rows, store.shape[1])
        self.graph: torch.cuda.CUDAGraph | None = None
        self._angles: torch.Tensor | None = None  # the table that was recorded, kept alive
        self.out = store.new_empty(0)

    def capture(self) -> bool:
        """Record a CUDA graph; False where that can't be done (no GPU, or a runtime that refuses)."""
        if not self.mask.is_cuda:
            return False
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # libraries choose their kernels and take their workspaces before the recording
                    self._forward()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._forward()
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        self.graph, self._angles = graph, self.rotary.table
        return True

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        tail: torch.Tensor | None,
        start: int,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write rows behind the first `start` ones of the store; see Target.forward for the arguments.

        Returns:
            [rows given, hidden], overwritten by the next call.
        """
        count, end = len(token_ids), start + self.rows
        for kept, given in ((self.ids, token_ids), (self.positions, positions), (self.features, features)):
            if kept is not None:
                kept[:count].copy_(given)
        torch.arange(start, end, out=self.slots)
        # rows beyond those given are numbers that nobody reads: each sees what is committed and itself
        own = torch.eye(self.rows, dtype=torch.bool, device=self.mask.device)
        if tail is not None:
            before = tail.shape[1] - count
            own = torch.cat((own.new_ones(self.rows, before), own), dim=1)
            own[:count, : before + count] = tail
        self.mask.fill_(-torch.inf)
        self.mask[:, :end] = additive(own, end, self.groups, self.mask.dtype)
        if self.graph is None:
            self._forward()
        else:
            self.graph.replay()
        return self.out[:count]

    @torch.inference_mode()
    def _forward(self) -> None:
        x = self.enter(self.ids, self.features)
        rotary = self.rotary.at(self.positions)
        for layer, own in zip(self.layers, self.store.unbind(0), strict=True):
            x = layer(x, rotary, own, self.store.shape[1], self.mask, self.slots)
        self.out = self.leave(x)


class Shelf:
    """The stores that the runs of one target (or head) take turns in, with what was recorded over them."""

    def __init__(self, new_cache: Callable[[int], RowCache], fixed: Callable[[torch.Tensor, int], FixedRows]) -> None:
        """
        Args:
            new_cache: capacity -> an empty cache.
            fixed: store and rows -> the forward of so many rows over it.
        """
        self.new_cache, self.fixed = new_cache, fixed
        self.refused = False  # a recording failed
        self._kept: list[tuple[RowCache, Callable[[], RowCache | None]]] = []  # and who uses it

    def take(self, capacity: int, rows: Iterable[int]) -> RowCache:
        """A cache for one run, with a recorded forward for each number of rows, where they can be recorded.

        A store is free again when the run has let go of its cache. The free one of the right capacity is used, other free
        ones are given up.
        """
        if self.refused:
            return self.new_cache(capacity)
        rounded = -(-capacity // BUCKET) * BUCKET
        free = [kept for kept, user in self._kept if user() is None and kept.capacity == rounded]
        self._kept = [(kept, user) for kept, user in self._kept if user() is not None]
        store = free[0] if free else self.new_cache(rounded)
        if not free:
            store.store.zero_()
        for count in rows:
            if count not in store.fixed:
                made = self.fixed(store.store, count)
                if not recorded(made):
                    self.refused = True
                    return self.new_cache(capacity)
                store.fixed[count] = made
        cache = store.lend()
        self._kept.append((store, weakref.ref(cache)))
        return cache


def target_rows(lean: LeanDecoder, store: torch.Tensor, rows: int) -> FixedRows:
    """A target's forward of up to `rows` rows."""

    def enter(token_ids: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        return functional.embedding(token_ids, lean.embedding.weight)

    return FixedRows(lean.layers, lean.rotary, store, rows, enter, lambda x: functional.rms_norm(x, x.shape[-1:], *lean.norm))


def recorded(fixed: FixedRows) -> bool:
    """Whether a forward of fixed shape is worth using: where it could be recorded."""
    return fixed.capture()


def graphs_for(device: torch.device) -> bool:
    """Whether to try: a GPU of one's own (on ZeroGPU every run may have another one)."""
    return device.type == "cuda" and not on_zero_gpu()
