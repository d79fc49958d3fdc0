"""The flags of the `model` group, and the model config they resolve to."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from rehead.attention.grouped_config import HeadMap
from rehead.attention.rope import Layout
from rehead.config.layer_options import (
    GROUPED_ONLY,
    HEADS,
    LATENT_ONLY,
    ROPE_ONLY,
    chosen,
    layer,
    refuse,
    variant,
)
from rehead.config.model import MAX_LAYERS, GPTConfig, ModelConfig, RNNConfig
from rehead.errors import ConfigError
from rehead.fields import require_types

Shape = Literal["gpt", "llama"]
RNN_ONLY = ("activation",)


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
    """scaled_dot, soft_capped, multiplicative, concatenated or additive [default: scaled_dot]"""
    score_width: int | None = None
    """hidden units of the additive score [default: 64]"""
    tie_kv: bool | None = None
    """use the keys as values [default: False]"""
    qk_norm_eps: float | None = None
    """eps of an RMSNorm on the heads of queries and keys; an export as Qwen3 needs 1e-5 [default: no such norm]"""
    rope: bool | None = None
    """rotary positions in place of learned ones [default: False; llama: True]"""
    rope_theta: float | None = None
    """base of the rotary frequencies [default: 10000]"""
    partial_rotary_factor: float | None = None
    """share of each head's elements that rotate, counted from the first [default: 1]"""
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
    """mla: width of the rotated part that all heads share [default: half head_dim, even; without rope, or with
    qk_norm_eps: 0]"""
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
        variant(self)

    def resolve(self, vocab_size: int, block_size: int) -> ModelConfig:
        """Return the config these flags describe. Raises ConfigError if they contradict each other."""
        if self.folder is not None:
            raise ConfigError(
                f"model.folder={self.folder} has a config of its own: load it instead of resolving flags."
            )
        if self.type == "rnn":
            return self._rnn(vocab_size, block_size)
        refuse(self, RNN_ONLY, "model.type=gpt")
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
        kinds = [layer(self, changes) for changes in pattern]
        return GPTConfig(
            vocab_size=vocab_size,
            block_size=block_size,
            n_embd=self.n_embd,
            attention=tuple(kinds[index % len(kinds)] for index in range(n_layer)),
            learned_positions=not self.rotates,
            norm=self.norm or ("rmsnorm" if llama else "layernorm"),
            norm_eps=1e-5,
            mlp="swiglu" if swiglu else "gelu",
            n_hidden=chosen(self.n_hidden, 8 * self.n_embd // 3 if swiglu else 4 * self.n_embd),
            mlp_bias=self.has_biases,
            tie_embeddings=self.tie_embeddings,
            embd_pdrop=self.embd_pdrop,
            resid_pdrop=self.resid_pdrop,
        )

    @property
    def rotates(self) -> bool:
        """Whether layers have rope, unless `layers` says otherwise."""
        return self.shape == "llama" if self.rope is None else self.rope

    @property
    def has_biases(self) -> bool:
        """Whether linear layers have biases."""
        return self.shape == "gpt" if self.bias is None else self.bias

    def _rnn(self, vocab_size: int, block_size: int) -> RNNConfig:
        others = ("shape", "layers", "norm", "mlp", "bias", "tie_embeddings")
        refuse(self, HEADS + others + ROPE_ONLY + LATENT_ONLY + GROUPED_ONLY, "model.type=rnn")
        return RNNConfig(
            vocab_size=vocab_size,
            block_size=block_size,
            n_embd=self.n_embd,
            n_layer=1 if self.n_layer is None else self.n_layer,
            n_hidden=chosen(self.n_hidden, self.n_embd),
            n_output=vocab_size,
            activation=self.activation or "tanh",
            embd_pdrop=self.embd_pdrop,
        )

    def require_folder_only(self) -> None:
        """Raise ConfigError for flags given beside `folder`."""
        names = tuple(field.name for field in fields(self) if field.name != "folder")
        refuse(self, names, f"model.folder={self.folder}, which has the model's config")
