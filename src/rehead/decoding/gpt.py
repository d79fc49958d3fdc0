"""A GPT's step as a program: every part says which operations it is."""

from collections.abc import Sequence
from functools import cache as once
from typing import Any

import torch
from torch import Tensor, nn

from rehead.attention import EMPTY, GroupedAttention, LatentAttention, LayerCache
from rehead.attention.rope import Rotary
from rehead.attention.step import Moment, NextToken, is_plain
from rehead.decoding.program import Kind, Program, kernel
from rehead.model import GPT, LanguageModel
from rehead.model.base import Decode
from rehead.model.layers import GELU, Block, SwiGLU
from rehead.model.step import is_watched
from rehead.native import NoKernel, library
from rehead.nn.dropout import Dropout

MOST_ROWS = 16
"""Rows of a batch up to which reading the weights is what a step costs."""


def why_not(model: LanguageModel) -> str | None:
    """Why this model is not decoded natively; None where it is."""
    weights = list(model.parameters())
    dtypes = {weight.dtype for weight in weights}
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}"
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        return f"weights of {', '.join(sorted(map(str, dtypes)))}"
    if not isinstance(model, GPT):
        return f"a model of type {model.config.model_type}"
    if model.config.scaled:
        return "its residual stream is scaled"
    if is_watched(model) or torch.is_autocast_enabled("cpu"):
        return "somebody watches its parts, or autocast is on"
    plain = (nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList)
    ours = (Dropout, GPT, Block, GELU, SwiGLU, GroupedAttention, LatentAttention)
    for part in model.modules():
        if not is_plain(part) and type(part) not in (*plain, *ours):
            return f"it has a {type(part).__name__}"
        if isinstance(part, LatentAttention) and (
            part.config.rebuilds_keys or part.config.absorbs_below <= 1
        ):
            return "keys to rebuild at every step"
    if not all(weight.is_contiguous() for weight in weights):
        return "weights that are not contiguous"
    loaded = kernel()
    return str(loaded) if isinstance(loaded, NoKernel) else None


def prepare(model: LanguageModel) -> None:
    """Build now all C++ that this model's generation may come to need, so that nothing is said of it in between."""
    in_cpp = model.device.type == "cpu" and model.head.weight.dtype != torch.float64
    if in_cpp and isinstance(model, GPT):
        for name in ("sequence", "decode"):
            library(name)


def native_decoder(model: LanguageModel) -> Decode | None:
    """`model.decoder()`, native; None where there is no such way."""
    if why_not(model) is not None:
        return None
    assert isinstance(model, GPT)
    by_torch = once(model.decoder)  # joins weights in copies, which few need
    bound: list[Bound] = []

    def decode(ids: Tensor, cache: Sequence[LayerCache]) -> Tensor:
        if len(ids) > MOST_ROWS or not is_gapless(widest(cache)):
            return by_torch()(ids, cache)
        n_position = cache[0].n_token + 1
        model.require_room(n_position)
        moment = NextToken(cache[0])
        for layer in cache:
            layer.settle(moment.advance(layer))
        stores = [store for layer in cache for store in layer.stores]
        if not bound or not bound[0].fits(stores, n_position):
            room = max(2 * n_position, *(layer.capacity or 0 for layer in cache), 64)
            bound[:] = [Bound(model, [layer.stores for layer in cache], room)]
        return bound[0](ids, moment)

    return decode


def widest(cache: Sequence[LayerCache]) -> LayerCache:
    """The layer that remembers most: where it has no gap, none has."""
    return max(cache, key=lambda layer: layer.n_rows)


def is_gapless(cache: LayerCache) -> bool:
    """True where every row holds its last tokens, all of them: then a position says what is seen."""
    if cache.positions is None:
        return True
    held, tokens = (cache.positions != EMPTY).sum(dim=1), cache.next(1)
    assert tokens is not None
    return bool((held == tokens[:, 0].clamp(max=cache.n_rows)).all())


class Bound:
    """The program of a model over certain rows of a cache, for positions up to `n_position`."""

    def __init__(self, model: GPT, layers: Sequence[Sequence[Tensor]], n_position: int) -> None:
        self.model, self.n_position = model, n_position
        self.stores = [store for stores in layers for store in stores]
        self.program = Program(len(self.stores[0]), torch.get_num_threads())
        self.tables: dict[tuple[object, int], tuple[Tensor, Tensor]] = {}
        self.logits = self._model(layers)

    def fits(self, stores: Sequence[Tensor], n_position: int) -> bool:
        """True while the rows are where they were."""
        same = len(stores) == len(self.stores) and all(
            a is b for a, b in zip(stores, self.stores, strict=True)
        )
        return same and n_position <= self.n_position

    def __call__(self, ids: Tensor, moment: Moment) -> Tensor:
        """Logits, (B, vocab)."""
        if moment.positions is None:
            positions = torch.full((len(ids),), moment.start)
        else:
            positions = moment.positions[:, 0].contiguous()
        self.program.run(ids.contiguous(), positions)
        return self.logits.to(self.model.head.weight.dtype, copy=True)

    def _model(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        model, width = self.model, self.model.config.n_embd
        x, normed = self.program.buffer(width), self.program.buffer(width)
        places = None if model.embed_positions is None else model.embed_positions.weight
        self.program.add(Kind.EMBED, w=model.embed_tokens.weight, w2=places, y=x, y_row=width, n=width)
        for block, stores in zip(model.layers, layers, strict=True):
            assert isinstance(block, Block)
            self._norm(block.input_layernorm, x, normed)
            attention = block.self_attn
            if isinstance(attention, LatentAttention):
                gathered, output = self._latent(attention, normed, stores), attention.o_proj
            else:
                assert isinstance(attention, GroupedAttention)
                gathered, output = self._grouped(attention, normed, stores), attention.o_proj
            self._linear(output, gathered, x, add=1)
            self._norm(block.post_attention_layernorm, x, normed)
            self._mlp(block.mlp, normed, x)
        self._norm(model.norm, x, normed)
        return self._linear(model.head, normed)

    def _linear(
        self,
        layer: nn.Module,
        x: Tensor,
        y: Tensor | None = None,
        *,
        add: int = 0,
        act: int = 0,
        sync: bool = True,
    ) -> Tensor:
        """y = layer(x), or y += layer(x)."""
        assert isinstance(layer, nn.Linear)
        y = self.program.buffer(layer.out_features) if y is None else y
        self.program.add(
            Kind.LINEAR, w=layer.weight, b=layer.bias, n=layer.out_features, k=layer.in_features,
            x=x, x_row=x.stride(0), y=y, y_row=y.stride(0), add=add, act=act, sync=sync,
        )  # fmt: skip
        return y

    def _norm(self, norm: nn.Module, x: Tensor, y: Tensor, heads: int = 1) -> None:
        """y = norm(x), on each of `heads` parts of a row."""
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        n, layer_norm = norm.normalized_shape[0], isinstance(norm, nn.LayerNorm)
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        self.program.add(
            Kind.NORM, w=norm.weight, b=bias, eps=eps, act=int(layer_norm), n=n, heads=heads,
            x=x, x_row=x.stride(0), x_head=n, y=y, y_row=y.stride(0), y_head=n,
        )  # fmt: skip

    def _turn(self, rotary: Rotary, x: Tensor, x_head: int, y: Tensor, y_head: int, heads: int) -> None:
        """y = x turned, `heads` of them."""
        key = rotary.config, rotary.width
        if key not in self.tables:
            cos, sin = rotary.turns(self.n_position, torch.float32, x.device)
            self.tables[key] = cos.contiguous(), sin.contiguous()
        cos, sin = self.tables[key]
        self.program.add(
            Kind.TURN, w=cos, w2=sin, act=int(rotary.config.layout == "interleaved"), n=rotary.width,
            heads=heads, x=x, x_row=x.stride(0), x_head=x_head, y=y, y_row=y.stride(0), y_head=y_head,
        )  # fmt: skip

    def _keep(self, x: Tensor, store: Tensor, sync: bool = True) -> None:
        """The new rows of `store`, (B, K, S, E) or (B, S, R)."""
        width = store.shape[-1]
        self.program.add(
            Kind.KEEP, w=store, heads=store.shape[1] if store.dim() == 4 else 1, rows=store.shape[-2],
            k=width, n=width, x=x, x_row=x.stride(0), x_head=width, sync=sync,
        )  # fmt: skip

    def _grouped(self, attention: GroupedAttention, x: Tensor, stores: Sequence[Tensor]) -> Tensor:
        config = attention.config
        H, K, E, V = config.n_query_head, config.n_kv_head, config.head_dim, config.v_head_dim
        query = self._linear(attention.q_proj, x, sync=False)
        if attention.v_proj is not None:
            value = self._linear(attention.v_proj, x, sync=False)
        key = self._linear(attention.k_proj, x)
        if attention.q_norm is not None and attention.k_norm is not None:
            self._norm(attention.q_norm, query, query, H)
            self._norm(attention.k_norm, key, key, K)
        if attention.rotary is not None:
            self._turn(attention.rotary, query, E, query, E, H)
            self._turn(attention.rotary, key, E, key, E, K)
        if attention.v_proj is not None:
            self._keep(value, stores[1], sync=False)
        self._keep(key, stores[0])
        gathered = self.program.buffer(H * V)
        near, far = (1, H // K) if config.head_map == "contiguous" else (K, 1)  # heads of a group, groups
        self.program.add(
            Kind.ATTEND, w=stores[0], w2=stores[-1], heads=K, group=H // K, rows=stores[0].shape[-2], k=E, n=V,
            w_head=V, eps=E**-0.5, x=query, x_row=H * E, x_head=near * E, x_kv=far * E,
            y=gathered, y_row=H * V, y_head=near * V, y_kv=far * V,
        )  # fmt: skip
        return gathered

    def _latent(self, attention: LatentAttention, x: Tensor, stores: Sequence[Tensor]) -> Tensor:
        config, (store,) = attention.config, stores
        H, N, P = config.n_query_head, config.qk_nope_head_dim, config.qk_rope_head_dim
        R, V = config.kv_lora_rank, config.v_head_dim
        down = self._linear(attention.kv_a_proj_with_mqa, x, sync=False)
        if config.q_lora_rank is None:
            query = self._linear(attention.q_proj, x)
        else:
            latent = self._linear(attention.q_a_proj, x)
            self._norm(attention.q_a_layernorm, latent, latent)
            query = self._linear(attention.q_b_proj, latent)
        if config.latent_norm:
            self._norm(attention.kv_a_layernorm, down, down)
        asked, context, gathered = (self.program.buffer(H * n) for n in (R + P, R, V))
        if attention.rotary is not None:
            self._turn(attention.rotary, query[:, N:], N + P, asked[:, R:], R + P, H)
            self._turn(attention.rotary, down[:, R:], P, down[:, R:], P, 1)
        self._keep(down, store, sync=False)
        up = attention.kv_b_proj
        heads: dict[str, Any] = {"heads": H, "group": H // config.n_kv_head, "w_head": (N + V) * R}
        self.program.add(
            Kind.SPREAD, w=up.weight, n=N, k=R, x=query, x_row=H * (N + P), x_head=N + P,
            y=asked, y_row=H * (R + P), y_head=R + P, **heads,
        )  # fmt: skip
        self.program.add(
            Kind.ATTEND, w=store, w2=store, heads=1, group=H, rows=store.shape[-2], k=R + P, n=R, w_head=R + P,
            eps=attention.scale, x=asked, x_row=H * (R + P), x_head=R + P, y=context, y_row=H * R, y_head=R,
        )  # fmt: skip
        self.program.add(
            Kind.LINEAR, w=up.weight[N:], b=None if up.bias is None else up.bias[N:], n=V, k=R, rows=N + V,
            x=context, x_row=H * R, x_head=R, y=gathered, y_row=H * V, y_head=V, **heads,
        )  # fmt: skip
        return gathered

    def _mlp(self, mlp: nn.Module, x: Tensor, y: Tensor) -> None:
        """y += mlp(x)."""
        if isinstance(mlp, GELU):
            self._linear(mlp.down_proj, self._linear(mlp.up_proj, x, act=1), y, add=1)
            return
        assert isinstance(mlp, SwiGLU)
        up, gate = self._linear(mlp.up_proj, x, sync=False), self._linear(mlp.gate_proj, x)
        width = gate.stride(0)
        self.program.add(Kind.GATE, n=width, x=up, x_row=width, y=gate, y_row=width)
        self._linear(mlp.down_proj, gate, y, add=1)
