"""Llama-like decoder layers run as a plain loop over fused matrices: what a step needs and nothing else.

No modelling code is copied: the matrices, norms and rotary embedding are those of the modules that transformers built
(or of a draft head). A target's loop is compared with the model's own forward before it is used (`lean_decoder`), and
any other architecture, quantisation or spread over devices keeps the model's own forward.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from decoding import processor
from decoding.cache import RowCache

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CHANGING_ROPE = ("dynamic", "longrope")  # their angles change with the length of the sequence
PROBE = (6, 5)  # rows of the two forwards that compare the loop with the model: a prompt, then a small tree


class Product:
    """A matrix product: [..., in] -> [..., out].

    On a CPU the matrix is kept in the order in which the library's kernel reads it, which else is made anew at every call.
    On an Intel Xeon the embedded target's layers take 26 -> 18 ms for one row and 44 -> 27 ms for 60 in bfloat16 (oneDNN), and
    50 -> 30 ms for 9 rows and 52 -> 31 ms for 16 in float32 (MKL; one row is limited by memory and stays at 24). On an AMD EPYC
    oneDNN is the one for float32 too: 36 -> 20 ms for one row, 49 -> 25 ms for 16, where MKL takes 28 and 69.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """
        Args:
            weight: [out, in].
            bias: [out] or None.
        """
        self.bias = bias
        pack = PACKED.get(weight.dtype) if weight.device.type == "cpu" else None
        self.packed = pack(weight.contiguous()) if pack is not None and packs(pack, weight.dtype) else None
        self.weight = weight if self.packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x, self.bias)


Packed = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # [..., in], bias -> [..., out]


def _onednn(weight: torch.Tensor) -> Packed:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)  # the order for 16 rows serves more of them as well as their own would
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _mkl(weight: torch.Tensor) -> Packed:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 64)  # as above: as fast as any for 1 to 128 rows
    shape = weight.new_empty(1).expand(weight.shape)  # asked for its sizes only: the weights are not held twice
    return lambda x, bias: torch.ops.mkl._mkl_linear(x, packed, shape, bias, x.numel() // x.shape[-1])


PACKED = {torch.bfloat16: _onednn, torch.float32: _mkl if "Intel" in processor.name() else _onednn}  # MKL is Intel's own


@cache
def packs(pack: Callable[[torch.Tensor], Packed], dtype: torch.dtype) -> bool:
    """Whether this CPU and this build of torch multiply matrices packed this way, and rightly: few rows, and many."""
    weight = torch.arange(1, 33, dtype=dtype).diag()
    x = torch.arange(-8.0, 8.0, dtype=dtype).repeat(100, 2)
    try:
        product = pack(weight)
        return all(torch.equal(product(x[:rows], None), x[:rows] * weight.diag()) for rows in (1, 3, 100))
    except (RuntimeError, AttributeError):  # this CPU has no such product, or this torch not these operations: nothing is packed
        return False


def fuse(linears: Sequence[nn.Linear]) -> Product:
    """One product for several linears of the same input, outputs side by side. The linears then live from its memory:
    nothing is held twice, and the modules they belong to go on working."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None
    if any(one is not None for one in biases):
        rows = [linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach() for linear in linears]
        bias = torch.cat(rows)
    product = Product(weight, bias)
    shared = _Shared(product, len(linears))
    start = 0
    for linear in linears:
        part = slice(start, start + linear.out_features)
        if product.packed is None:
            linear.weight = nn.Parameter(weight[part], requires_grad=False)
        else:
            linear.register_parameter("weight", None)
            linear.forward = partial(shared, part)
        start += linear.out_features
    return product


class _Shared:
    """Serves the modules whose matrices were fused: the product is made once for all of them, not once for each."""

    def __init__(self, product: Product, users: int) -> None:
        self.product, self.users = product, users
        self.given: torch.Tensor | None = None
        self.made: torch.Tensor | None = None
        self.served = 0

    def __call__(self, part: slice, x: torch.Tensor) -> torch.Tensor:
        if x is not self.given:
            self.given, self.made, self.served = x, self.product(x), 0
        out = self.made[..., part]
        self.served += 1
        if self.served == self.users:
            self.given = self.made = None
        return out


class Rotary:
    """Cosines and signed sines of every position, from a rotary module of transformers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.table: torch.Tensor | None = None  # float32 [positions, 2, 1, head_dim]

    def reserve(self, positions: int, device: torch.device) -> None:
        """Have the table reach that far."""
        if self.table is not None and len(self.table) >= positions:
            return
        at = torch.arange(max(positions, 512), device=device)[None]
        cos, sin = self.module(torch.empty((), dtype=torch.float32, device=device), at)
        sin[..., : sin.shape[-1] // 2].neg_()  # rotate_half turns the second half into the first with a minus
        self.table = torch.stack((cos[0], sin[0]), dim=1)[:, :, None]

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows] -> cosines and sines [rows, 1, head_dim]."""
        return self.table[positions].unbind(1)


class Layer:
    """One decoder layer. Its matrices are fused at `fuse`, once it is known that the loop does what the model does."""

    def __init__(self, layer: nn.Module, head_dim: int, sliding: bool = False) -> None:
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.head_dim, self.sliding = head_dim, sliding
        self.heads = self.attention.q_proj.out_features // head_dim
        self.kv_heads = self.attention.k_proj.out_features // head_dim
        self.groups = self.heads // self.kv_heads
        self.kv_width = 2 * self.kv_heads * head_dim
        self.scaling = getattr(self.attention, "scaling", None)
        norms = [getattr(self.attention, name, None) for name in ("q_norm", "k_norm")]
        self.head_norm = None
        if norms[0] is not None:  # Qwen3: queries and keys are normed, head by head
            weight = torch.cat([norms[0].weight.expand(self.heads, -1), norms[1].weight.expand(self.kv_heads, -1)])
            self.head_norm = (weight.detach(), norms[0].variance_epsilon)
        self.act = self.mlp.act_fn
        self.qkv = self.out = self.gate_up = self.down = None

    def fuse(self) -> None:
        attention, mlp = self.attention, self.mlp
        self.qkv = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out, self.down = fuse([attention.o_proj]), fuse([mlp.down_proj])
        self.gate_up = fuse([mlp.gate_proj, mlp.up_proj])

    def __call__(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        store: torch.Tensor,
        end: int,
        mask: torch.Tensor | None,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: [rows, hidden].
            rotary: of the rows' positions.
            store: [capacity, kv_width] keys, then values; the rows' own are written below `end`.
            end: rows of the store that are in use, the new ones among them.
            mask: additive [groups * rows, end]; None = causal prefill of an empty store, or one row that sees all.
            slots: [rows] where the rows are written instead, for shapes that never change.
        """
        rows, dim, keys = len(x), self.head_dim, self.kv_heads * self.head_dim
        qkv = self.qkv(x if self.input_norm is None else functional.rms_norm(x, x.shape[-1:], *self.input_norm))
        turned = qkv[:, : self.heads * dim + keys].view(rows, -1, dim)  # queries and keys [rows, heads + kv_heads, head_dim]
        if self.head_norm is not None:
            turned.copy_(functional.rms_norm(turned, (dim,), None, self.head_norm[1]) * self.head_norm[0])
        wide = turned.float()  # the same memory where it is float32 already
        half = wide.roll(dim // 2, -1)
        wide.mul_(rotary[0]).addcmul_(half, rotary[1])
        if wide.dtype != turned.dtype:
            turned.copy_(wide)
        if slots is None:
            store[end - rows : end] = qkv[:, self.heads * dim :]
        else:
            store.index_copy_(0, slots, qkv[:, self.heads * dim :])
        key, value = (part.view(end, self.kv_heads, dim).transpose(0, 1)[None] for part in store[:end].split(keys, dim=1))
        query = qkv[:, : self.heads * dim].view(rows, self.kv_heads, self.groups, dim)
        if mask is None and rows > 1:
            query = query.flatten(1, 2).transpose(0, 1)[None]  # [1, heads, rows, head_dim]
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scaling, enable_gqa=self.groups > 1
            )
            mixed = mixed[0].transpose(0, 1)
        else:  # the queries that share a key head stand below each other: no key is repeated, on any device
            query = query.permute(1, 2, 0, 3).reshape(1, self.kv_heads, self.groups * rows, dim)
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
            mixed = mixed.view(self.kv_heads, self.groups, rows, dim).permute(2, 0, 1, 3)
        x = x + self.out(mixed.reshape(rows, self.heads * dim))
        gate, up = self.gate_up(functional.rms_norm(x, x.shape[-1:], *self.mlp_norm)).chunk(2, dim=-1)
        return x + self.down(self.act(gate) * up)


def _norm(module: nn.Module) -> tuple[torch.Tensor, float] | None:
    """Weight and epsilon of an RMS norm; None for a head's first layer, which has none."""
    return None if isinstance(module, nn.Identity) else (module.weight.detach(), module.variance_epsilon)


def additive(tail: torch.Tensor, columns: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, last] bool, what each row sees of the last columns (of those before it sees all) -> additive
    [groups * rows, columns]."""
    rows, last = tail.shape
    mask = tail.new_zeros(groups, rows, columns, dtype=dtype)
    mask[:, :, columns - last :].masked_fill_(~tail, -torch.inf)
    return mask.view(groups * rows, columns)


class LeanDecoder:
    """A target's decoder stack as a loop over `Layer`s."""

    def __init__(self, model: PreTrainedModel) -> None:
        body, config = model.get_decoder(), model.config.get_text_config()
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        self.window = getattr(config, "sliding_window", None)
        slides = [self.window is not None and (kind == "sliding_attention" or not getattr(config, "layer_types", None)) for kind in kinds]
        self.layers = [Layer(layer, dim, sliding) for layer, sliding in zip(body.layers, slides, strict=True)]
        self.embedding, self.norm = body.embed_tokens, _norm(body.norm)
        self.rotary = Rotary(body.rotary_emb)

    def new_cache(self, capacity: int) -> RowCache:
        weight = self.embedding.weight
        self.rotary.reserve(capacity, weight.device)
        return RowCache(len(self.layers), capacity, self.layers[0].kv_width, weight.dtype, weight.device)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, tail: torch.Tensor | None, cache: RowCache) -> torch.Tensor:
        """See Target.forward."""
        start, end = cache.length, cache.length + len(token_ids)
        if fixed := cache.forward_for(len(token_ids), tail):
            cache.length = end
            return fixed(token_ids, positions, tail, start)
        x = functional.embedding(token_ids, self.embedding.weight)
        rotary = self.rotary.at(positions)
        full, sliding = self._masks(positions, tail, start, end, x.dtype)
        for layer, store in zip(self.layers, cache.store.unbind(0), strict=True):
            x = layer(x, rotary, store, end, sliding if layer.sliding else full)
        cache.length = end
        return functional.rms_norm(x, x.shape[-1:], *self.norm)

    def _masks(
        self, positions: torch.Tensor, tail: torch.Tensor | None, cached: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        groups = self.layers[0].groups
        full = None if tail is None else additive(tail, end, groups, dtype)
        if self.window is None or end <= self.window:
            return full, full
        visible = see_all(len(positions), end, tail, positions.device)
        return full, additive(visible & near(positions, cached, self.window), end, groups, dtype)


def see_all(rows: int, columns: int, tail: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The whole mask [rows, columns], True = visible; without a tail each row sees the columns up to its own."""
    visible = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if tail is None:
        return visible.tril(columns - rows)
    visible[:, columns - tail.shape[1] :] = tail
    return visible


def near(positions: torch.Tensor, cached: int, window: int) -> torch.Tensor:
    """[rows, cached + rows] bool: what lies inside a sliding window. Cached rows stand at their own position, the rows of
    this forward at the positions that were given."""
    keys = torch.cat([torch.arange(cached, device=positions.device), positions])
    return positions[:, None] - keys[None] < window


def lean_decoder(model: PreTrainedModel, own: Callable[..., torch.Tensor], new_cache: Callable[[int], Any]) -> LeanDecoder | None:
    """A loop that does what the model's own forward does, found out by running both; None where there is none.

    Args:
        own: the model's own forward, as `LeanDecoder.__call__`.
        new_cache: a cache for it, of a capacity.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    weights = [module for module in model.get_decoder().modules() if type(module).__name__.startswith("Linear")]
    known = config.model_type in FAMILIES and rope.get("rope_type", "default") not in CHANGING_ROPE
    spread = len({parameter.device for parameter in model.parameters()}) > 1
    if not known or spread or any(type(module) is not nn.Linear for module in weights) or config._attn_implementation == "eager":
        return None
    with torch.inference_mode(False), torch.no_grad():
        wanted = _probe(own, new_cache(sum(PROBE)), config.vocab_size, model.device)
        lean = LeanDecoder(model)
        for layer in lean.layers:  # the parts as they are: nothing is changed before it is known to be right
            layer.qkv = _side_by_side(layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
            layer.out, layer.down = layer.attention.o_proj, layer.mlp.down_proj
            layer.gate_up = _side_by_side(layer.mlp.gate_proj, layer.mlp.up_proj)
        found = _probe(lean, lean.new_cache(sum(PROBE)), config.vocab_size, model.device)
        error = float((found - wanted).norm() / wanted.norm())
        if not error < (1e-4 if model.dtype == torch.float32 else 0.05):  # rounding, and no more; NaN is no agreement
            return None
        for layer in lean.layers:
            layer.fuse()
    return lean


def _side_by_side(*linears: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)


def _probe(forward: Callable[..., torch.Tensor], cache: Any, vocab: int, device: torch.device) -> torch.Tensor:
    """Float32 features of a short prompt and of a tree of 5 rows behind it (root, two children, one child of each)."""
    prompt, rows = PROBE
    ids = torch.arange(1, prompt + rows + 1, device=device) * 7919 % vocab
    first = forward(ids[:prompt], torch.arange(prompt, device=device), None, cache)
    depths = torch.tensor([0, 1, 1, 2, 2], device=device)
    tail = torch.eye(rows, dtype=torch.bool, device=device)
    tail[:, 0] = True
    tail[[3, 4], [1, 2]] = True
    return torch.cat((first, forward(ids[prompt:], depths + prompt, tail, cache))).float()
