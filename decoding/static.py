"""A target's forward in shapes that never change, and its replay as a CUDA graph.

A decoding step at small batch launches some hundred kernels of a few microseconds each; a graph launches them at once. It
can only replay what it recorded: the same addresses and shapes. So the keys and values are all read, up to the capacity,
and an additive mask hides what is not there; where rows are written is a tensor, not a slice.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from decoding.lean import LeanDecoder, additive


class StaticForward:
    """`rows` rows over one fixed cache. `__call__` does what LeanDecoder does with a growing one."""

    def __init__(self, lean: LeanDecoder, capacity: int, rows: int, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """
        Args:
            logits: features [rows, hidden] -> [rows, vocab].
        """
        self.lean, self.logits = lean, logits
        self.cache = lean.new_cache(capacity)
        self.cache.store.zero_()  # hidden is not absent: what is masked is multiplied by zero, and must be a number
        store, groups = self.cache.store, lean.layers[0].groups
        self.ids, self.positions, self.slots = (torch.zeros(rows, dtype=torch.long, device=store.device) for _ in range(3))
        self.mask = store.new_zeros(groups * rows, capacity)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.features = self.out = store.new_empty(0)

    def capture(self) -> bool:
        """Record the forward as a CUDA graph; False where that can't be done (no GPU, or a runtime that refuses)."""
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
        self.graph = graph
        return True

    @torch.inference_mode()
    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows behind the committed ones; see Target.forward.

        Returns:
            [rows, hidden] features and [rows, vocab] logits; both are overwritten by the next call.
        """
        start, rows = self.cache.length, len(token_ids)
        self.ids.copy_(token_ids)
        self.positions.copy_(positions)
        torch.arange(start, start + rows, out=self.slots)
        self.mask.fill_(-torch.inf)
        end = start + rows
        self.mask[:, :end] = additive(tail, end, self.lean.layers[0].groups, self.mask.dtype)
        if self.graph is None:
            self._forward()
        else:
            self.graph.replay()
        self.cache.length = end
        return self.features, self.out

    @torch.inference_mode()
    def _forward(self) -> None:
        lean, store = self.lean, self.cache.store
        x = functional.embedding(self.ids, lean.embedding.weight)
        rotary = lean.rotary.at(self.positions)
        for layer, own in zip(lean.layers, store.unbind(0), strict=True):
            x = layer(x, rotary, own, store.shape[1], self.mask, self.slots)
        self.features = functional.rms_norm(x, x.shape[-1:], *lean.norm)
        self.out = self.logits(self.features)
