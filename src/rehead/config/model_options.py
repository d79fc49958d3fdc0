"""The flags of the `model` group, and the model config they resolve to."""

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig, scores, variants
from rehead.attention.grouped import HeadMap, divisors
from rehead.attention.rope import Layout, RopeScaling
from rehead.config.codec import decode
from rehead.config.model import MAX_LAYERS, GPTConfig, ModelConfig, RNNConfig
from rehead.errors import ConfigError, InvalidInput
from rehead.fields import require_types
from rehead.registry import nearest

Variant = type[AttentionConfig]
Shape = Literal["gpt", "llama"]
LATENT_ONLY = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "latent_norm")
GROUPED_ONLY = ("head_map", "score", "score_width", "tie_kv", "qk_norm_eps")
RNN_ONLY = ("activation",)
ROPE_ONLY = ("rope_theta", "rope_layout", "rope_scaling")
HEADS = ("attention", "n_kv_head", "head_dim", "v_head_dim", "window", "rope")
PER_LAYER = HEADS + ROPE_ONLY + LATENT_ONLY + GROUPED_ONLY + ("n_query_head", "bias", "attn_pdrop")
"""Flags of the attention, which an entry of `layers` may change."""


@dataclass(kw_only=True)
class ModelOptions:
    """Flags of a model; a flag that is None follows from the others.

    `shape` gpt is minGPT's (LayerNorm, GELU, biases, learned positions unless rope), llama is
    Llama's (RMSNorm, SwiGLU, no biases, rope). `layers` is a pattern of changes to the attention, with
    one entry per layer, or fewer, which repeat from the first: with [{window: 64}, {window: 64}, {}]
    layers 3, 6, 9, ... have no window.

    `pretrained_folder` starts from the weights of a model that the flags describe. `folder` starts from
    any model as it is; no other flag of this group may then be given.
    """

    type: Literal["gpt", "rnn"] = "gpt"
    """gpt, a decoder with attention; rnn, an Elman network"""
    shape: Shape = "gpt"
    """gpt: LayerNorm, GELU, biases, learned positions; llama: RMSNorm, SwiGLU, no biases, rope"""
    attention: str | None = None
    """mha, gqa, mqa, mla or gqa_sum [default: mha, gqa or mqa, by n_kv_head]"""
    n_layer: int | None = None
    """number of layers [default: 6; rnn: 1]"""
    n_query_head: int = 6
    """number of query heads"""
    n_kv_head: int | None = None
    """number of KV heads, a divisor of n_query_head [default: n_query_head; mqa: 1]"""
    n_embd: int = 192
    """width of the model"""
    head_dim: int | None = None
    """width of a query and key head [default: n_embd / n_query_head]"""
    v_head_dim: int | None = None
    """width of a value head [default: head_dim]"""
    head_map: HeadMap | None = None
    """which query heads share a KV head: neighbours, or every n_kv_head-th [default: contiguous]"""
    window: int | None = None
    """keys a token sees, its own included [default: all before it]"""
    score: str | None = None
    """scaled_dot, multiplicative, concatenated or additive [default: scaled_dot]"""
    score_width: int | None = None
    """hidden units of the additive score [default: 64]"""
    tie_kv: bool | None = None
    """use the keys as values [default: False]"""
    qk_norm_eps: float | None = None
    """eps of an RMSNorm on queries and keys, as in Qwen3 [default: no such norm]"""
    rope: bool | None = None
    """rotary positions in place of learned ones [default: False; llama: True]"""
    rope_theta: float | None = None
    """base of the rotary frequencies [default: 10000]"""
    rope_layout: Layout | None = None
    """which numbers form a rotated pair: halves or neighbours [default: half-split]"""
    rope_scaling: dict[str, Any] | None = None
    """longer context for rope, e.g. '{rope_type: linear, factor: 2}'; also llama3, yarn, longrope [default: none]"""
    kv_lora_rank: int | None = None
    """mla: width of the latent [default: 4 head_dim]"""
    q_lora_rank: int | None = None
    """mla: width of a latent for the queries [default: none]"""
    qk_nope_head_dim: int | None = None
    """mla: width of the part of a head without position [default: head_dim]"""
    qk_rope_head_dim: int | None = None
    """mla: width of the rotated part that all heads share [default: half head_dim, even; without rope: 0]"""
    latent_norm: bool | None = None
    """mla: an RMSNorm on the latent [default: True]"""
    layers: list[dict[str, Any]] | None = None
    """changes to the attention per layer: n_layer entries, or fewer, which repeat; '[{window: 64}, {}]' gives every
    second layer a window [default: all alike]"""
    norm: Literal["layernorm", "rmsnorm"] | None = None
    """kind of norm [default: layernorm; llama: rmsnorm]"""
    mlp: Literal["gelu", "swiglu"] | None = None
    """kind of feed-forward layer [default: gelu; llama: swiglu]"""
    n_hidden: int | None = None
    """width inside the feed-forward layer, or of an rnn's state [default: 4 n_embd; swiglu: 8/3 n_embd; rnn: n_embd]"""
    bias: bool | None = None
    """biases in linear layers [default: True; llama: False]"""
    tie_embeddings: bool = False
    """use the token embedding as the output layer"""
    activation: Literal["tanh", "slide"] | None = None
    """rnn: the nonlinearity [default: tanh]"""
    embd_pdrop: float = 0.1
    """dropout after the embedding"""
    resid_pdrop: float = 0.1
    """dropout on the output of every layer"""
    attn_pdrop: float = 0.1
    """dropout on attention weights"""
    pretrained_folder: str | None = None
    """start from the weights of this model, which the other flags describe [default: fresh weights]"""
    folder: str | None = None
    """start from this model as it is; then no other flag of this group may be given [default: none]"""

    __no_type_check__ = True  # __post_init__ checks what is given

    def __post_init__(self) -> None:
        require_types(self, "model.")
        self._variant()

    def resolve(self, vocab_size: int, block_size: int) -> ModelConfig:
        """Return the config these flags describe. Raises ConfigError if they contradict each other."""
        if self.folder is not None:
            raise ConfigError(
                f"model.folder={self.folder} has a config of its own: load it instead of resolving flags."
            )
        if self.type == "rnn":
            return self._rnn(vocab_size, block_size)
        self._refuse(RNN_ONLY, "model.type=gpt")
        llama = self.shape == "llama"
        n_layer = 6 if self.n_layer is None else self.n_layer
        if not 1 <= n_layer <= MAX_LAYERS:
            raise ConfigError(f"model.n_layer={n_layer}. Use 1 to {MAX_LAYERS}.")
        if self.n_embd < 1:
            raise ConfigError(f"model.n_embd={self.n_embd}. Use 1 or more.")
        swiglu = self.mlp == "swiglu" or (self.mlp is None and llama)
        pattern = [{}] if self.layers is None else self.layers
        if not 1 <= len(pattern) <= n_layer:
            raise ConfigError(
                f"model.layers has {len(pattern)} entries for model.n_layer={n_layer}: give one per layer, or fewer, "
                f"which repeat. Use 1 to {n_layer}."
            )
        kinds = [self._layer(changes) for changes in pattern]
        return GPTConfig(
            vocab_size=vocab_size,
            block_size=block_size,
            n_embd=self.n_embd,
            attention=tuple(kinds[index % len(kinds)] for index in range(n_layer)),
            learned_positions=not self._rotates,
            norm=self.norm or ("rmsnorm" if llama else "layernorm"),
            norm_eps=1e-5,
            mlp="swiglu" if swiglu else "gelu",
            n_hidden=_or(self.n_hidden, 8 * self.n_embd // 3 if swiglu else 4 * self.n_embd),
            mlp_bias=self._bias,
            tie_embeddings=self.tie_embeddings,
            embd_pdrop=self.embd_pdrop,
            resid_pdrop=self.resid_pdrop,
        )

    @property
    def _rotates(self) -> bool:
        return self.shape == "llama" if self.rope is None else self.rope

    @property
    def _bias(self) -> bool:
        return self.shape == "gpt" if self.bias is None else self.bias

    def _layer(self, changes: dict[str, Any]) -> AttentionConfig:
        """Return the attention of one layer: the common flags with this layer's changes."""
        kinds = {field.name: field.type for field in fields(self) if field.name in PER_LAYER}
        for name, value in changes.items():
            if name not in kinds:
                raise ConfigError(f"model.layers: unknown key {name!r}.{nearest(name, list(kinds))}")
            if name != "rope_scaling":  # decoded by _rope
                _decoded(kinds[name], value, f"model.layers: {name}")
        changed = replace(self, **changes)
        kind = changed._variant()
        if kind is LatentConfig:
            return changed._latent()
        return changed._grouped() if kind is GroupedConfig else changed._other(kind)

    def _variant(self) -> Variant:
        """Return the requested kind of attention from the registry."""
        if self.attention is None:
            return GroupedConfig
        if self.attention not in variants:
            raise ConfigError(
                f"model.attention={self.attention!r} is not a known attention.{nearest(self.attention, variants)}"
            )
        return variants[self.attention]

    def _common(self) -> dict[str, Any]:
        return {
            "n_query_head": self.n_query_head,
            "rope": self._rope(),
            "window": self.window,
            "attn_pdrop": self.attn_pdrop,
            "qkv_bias": self._bias,
            "o_bias": self._bias,
        }

    def _grouped(self) -> GroupedConfig:
        self._refuse(LATENT_ONLY, f"model.attention={self.attention or 'mha, gqa or mqa'}")
        n_kv_head = self.n_kv_head
        if n_kv_head is None:
            if self.attention == "gqa":
                raise ConfigError("model.attention=gqa needs the number of KV heads. Set model.n_kv_head.")
            n_kv_head = 1 if self.attention == "mqa" else self.n_query_head
        if self.score_width is not None and self.score != "additive":
            raise ConfigError(
                f"model.score_width={self.score_width} with score={self.score or 'scaled_dot'}: only the additive "
                "score has hidden units. Use model.score=additive, or leave score_width out."
            )
        sizes = {} if self.score_width is None else {"width": self.score_width}
        config = GroupedConfig(
            **self._common(),
            n_kv_head=n_kv_head,
            head_dim=self._head_dim(),
            v_head_dim=_or(self.v_head_dim, self._head_dim()),
            head_map=self.head_map or "contiguous",
            score=scores[self.score or "scaled_dot"](**sizes),
            tie_kv=bool(self.tie_kv),
            qk_norm_eps=self.qk_norm_eps,
        )
        if self.attention not in (None, config.name):
            raise ConfigError(
                f"model.attention={self.attention} contradicts model.n_kv_head={n_kv_head} with "
                f"n_query_head={self.n_query_head}, which is {config.name}. Leave one of them out."
            )
        return config

    def _latent(self) -> LatentConfig:
        self._refuse(GROUPED_ONLY, "model.attention=mla")
        head_dim = self._head_dim()
        rope_width = self.qk_rope_head_dim
        if rope_width is None:
            rope_width = head_dim // 4 * 2 if self._rotates else 0
        return LatentConfig(
            **self._common() | {"rope": self._rope() or False},
            n_kv_head=_or(self.n_kv_head, self.n_query_head),
            kv_lora_rank=_or(self.kv_lora_rank, 4 * head_dim),
            q_lora_rank=self.q_lora_rank,
            qk_nope_head_dim=_or(self.qk_nope_head_dim, head_dim),
            qk_rope_head_dim=rope_width,
            v_head_dim=_or(self.v_head_dim, head_dim),
            latent_norm=True if self.latent_norm is None else self.latent_norm,
        )

    def _other(self, kind: Variant) -> AttentionConfig:
        """Return the config of any other variant, whose fields are the flags of the same name; others are refused."""
        known = {field.name: field for field in fields(kind)}
        because = f"model.attention={self.attention}"
        own = (*HEADS[1:-1], *LATENT_ONLY, *GROUPED_ONLY)
        self._refuse(tuple(name for name in own if name not in known), because)
        values = {name: value for name, value in self._common().items() if name in known}
        values |= {
            name: value for name in own if name in known and (value := getattr(self, name)) is not None
        }
        if "head_dim" in known:
            values["head_dim"] = self._head_dim()
        for name, field in known.items():
            if name not in values and field.default is MISSING and field.default_factory is MISSING:
                raise ConfigError(f"{because} has no default for {name}. Set model.{name}.")
        return kind(**values)

    def _head_dim(self) -> int:
        if self.head_dim is not None:
            return self.head_dim
        if self.n_query_head < 1 or self.n_embd % self.n_query_head:
            raise ConfigError(
                f"model.n_query_head={self.n_query_head} does not divide model.n_embd={self.n_embd}: heads share "
                f"the width equally. Use one of {divisors(self.n_embd)}, or set model.head_dim."
            )
        return self.n_embd // self.n_query_head

    def _rope(self) -> RopeConfig | None:
        if not self._rotates:
            self._refuse(ROPE_ONLY, "model.rope=False")
            return None
        scaling = _decoded(RopeScaling | None, self.rope_scaling, "model.rope_scaling")
        theta = 10_000.0 if self.rope_theta is None else self.rope_theta
        return RopeConfig(theta=theta, layout=self.rope_layout or "half-split", scaling=scaling)

    def _rnn(self, vocab_size: int, block_size: int) -> RNNConfig:
        others = ("shape", "layers", "norm", "mlp", "bias", "tie_embeddings")
        self._refuse(HEADS + others + ROPE_ONLY + LATENT_ONLY + GROUPED_ONLY, "model.type=rnn")
        return RNNConfig(
            vocab_size=vocab_size,
            block_size=block_size,
            n_embd=self.n_embd,
            n_layer=1 if self.n_layer is None else self.n_layer,
            n_hidden=_or(self.n_hidden, self.n_embd),
            n_output=vocab_size,
            activation=self.activation or "tanh",
            embd_pdrop=self.embd_pdrop,
        )

    def require_folder_only(self) -> None:
        """Raise ConfigError for flags given beside `folder`."""
        names = tuple(field.name for field in fields(self) if field.name != "folder")
        self._refuse(names, f"model.folder={self.folder}, which has the model's config")

    def _refuse(self, names: tuple[str, ...], because: str) -> None:
        """Raise ConfigError for flags that the model would not use."""
        for name in names:
            if getattr(self, name) != getattr(ModelOptions, name):
                raise ConfigError(
                    f"model.{name}={getattr(self, name)} has no effect with {because}. Leave it out."
                )


def _or(size: int | None, otherwise: int) -> int:
    return otherwise if size is None else size


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """Decode a table or value from inside a flag with the checks of a config file."""
    try:
        return decode(kind, value, where)
    except InvalidInput as error:
        raise ConfigError(str(error)) from error
