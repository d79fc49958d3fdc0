"""The config of a model: every size and every choice, with no default left open. Saved as config.json."""

import math
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Literal

from rehead.attention import AttentionConfig
from rehead.config.experts import ExpertsConfig
from rehead.errors import ConfigError
from rehead.fields import require_types
from rehead.nn.norm import NormKind
from rehead.registry import Registry

model_types: Registry[type["ModelConfig"]] = Registry("model type")
MAX_LAYERS = 1024
"""A config.json with more is refused: building it would take hours."""
LARGEST = {
    "vocab_size": 4 << 20,
    "block_size": 16 << 20,
    "n_embd": 1 << 17,
    "n_hidden": 1 << 20,
    "n_output": 4 << 20,
}
"""Larger sizes mean that a config.json is damaged or malicious."""
MOST_HEADS = 4096
SCALES = ("embed_scale", "residual_scale", "logit_scale")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The fields that all language models share: `vocab_size` tokens, trained on blocks of `block_size`."""

    model_type: ClassVar[str]
    vocab_size: int
    block_size: int
    n_embd: int
    embd_pdrop: float = 0.0

    __no_type_check__ = True  # __post_init__ checks what is given

    def __post_init__(self) -> None:
        require_types(self)
        self.require_positive("vocab_size", "block_size", "n_embd")
        self.require_probability("embd_pdrop")

    def require_positive(self, *names: str) -> None:
        """Raise ConfigError for a size below 1, or above its entry in `LARGEST`."""
        for name in names:
            size, largest = getattr(self, name), LARGEST[name]
            if size < 1:
                raise ConfigError(f"{name}={size}: a size is a whole number of at least 1.")
            if size > largest:
                raise ConfigError(f"{name}={size!s:.40} is too large. Use at most {largest:,}.")

    def require_layers(self, n_layer: int) -> None:
        """Raise ConfigError unless there are 1 to `MAX_LAYERS` layers."""
        if not 1 <= n_layer <= MAX_LAYERS:
            raise ConfigError(f"n_layer={n_layer}. Use 1 to {MAX_LAYERS}.")

    def require_probability(self, *names: str) -> None:
        """Raise ConfigError for a dropout outside [0, 1)."""
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not a dropout probability. Use 0 or more, below 1."
                )

    @property
    def context_limit(self) -> int | None:
        """Return how many tokens the model may look back on when it generates; None if unlimited."""
        return self.block_size


@model_types.add("gpt")
@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A decoder: minGPT's shape, Llama's, or anything between.

    `attention` has one entry per layer. `learned_positions` adds a table of `block_size` embeddings;
    without it positions come from the rope of the attention layers. `mlp` is gelu (GPT-2's tanh form), gelu_erf
    (the exact one), swiglu or geglu (tanh form), `n_hidden` wide; `norm` is layernorm, rmsnorm, or
    zero_centered_rmsnorm, whose weights are those of Gemma: 1 + w multiplies.

    Norms are before attention and MLP (`norm_position` pre), on what they add (post, as in OLMo2), or both (Gemma 2,
    GLM-4). With `parallel_residual` both read the same input (GPT-NeoX). As in MiniCPM, `embed_scale` multiplies the
    embeddings, `residual_scale` what every layer adds, and `logit_scale` the output of the last norm;
    `logit_softcap` c makes a logit z to c tanh(z / c) (Gemma 2). In the layers of `experts`, the MLP is a mixture.
    """

    model_type: ClassVar[str] = "gpt"
    attention: tuple[AttentionConfig, ...]
    learned_positions: bool
    norm: NormKind
    norm_eps: float
    mlp: Literal["gelu", "gelu_erf", "swiglu", "geglu"]
    n_hidden: int
    mlp_bias: bool
    tie_embeddings: bool = False
    resid_pdrop: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_position: Literal["pre", "post", "both"] = "pre"
    parallel_residual: bool = False
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_layers(self.n_layer)
        self.require_positive("n_hidden")
        self.require_probability("resid_pdrop")
        if not 0 < self.norm_eps < 1:
            raise ConfigError(
                f"norm_eps={self.norm_eps} is not between 0 and 1. Use a small number such as 1e-5."
            )
        for name in SCALES:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not a positive number. Use 1 for no scaling."
                )
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise ConfigError(
                f"logit_softcap={self.logit_softcap} is not a positive number. Use 30, or None."
            )
        if self.parallel_residual and self.norm_position == "post":
            raise ConfigError(
                "parallel_residual=True with norm_position=post: nothing norms what attention and MLP both read. Use "
                "norm_position=pre or both."
            )
        if self.experts is not None:
            self._require_experts(self.experts)
        for index, attention in enumerate(self.attention):
            heads = getattr(attention, "n_query_head", 1)
            if heads > MOST_HEADS:
                raise ConfigError(f"n_query_head={heads} is too large. Use at most {MOST_HEADS}.")
            if not attention.causal or attention.d_context is not None:
                raise ConfigError(
                    f"layer {index} of a GPT has causal={attention.causal} and d_context={attention.d_context}: a "
                    "decoder layer attends to its own past. Use causal=True and d_context=None."
                )

    def _require_experts(self, experts: ExpertsConfig) -> None:
        if experts.layers[-1] >= self.n_layer:
            raise ConfigError(
                f"layer {experts.layers[-1]} has experts, and there are {self.n_layer}. Use 0 to {self.n_layer - 1}."
            )
        if self.mlp_bias:
            raise ConfigError("mlp_bias=True with experts, which have none. Use mlp_bias=False.")
        widest = experts.moe_intermediate_size * max(1, experts.n_shared_experts)
        if widest > LARGEST["n_hidden"]:
            raise ConfigError(
                f"experts of {widest:,} numbers are too wide. Use at most {LARGEST['n_hidden']:,}."
            )

    @property
    def scaled(self) -> bool:
        """Return True if one of the three scales is not 1."""
        return any(getattr(self, name) != 1 for name in SCALES)

    @property
    def gated(self) -> bool:
        """Return True if the MLP multiplies two products of its input: it has three matrices."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def n_layer(self) -> int:
        """Return the number of layers."""
        return len(self.attention)

    @property
    def context_limit(self) -> int | None:
        """Return `block_size`, or None if every layer has a window within it and there is no position table."""
        windowed = all(
            (attention.window or self.block_size + 1) <= self.block_size for attention in self.attention
        )
        return None if windowed and not self.learned_positions else self.block_size


@model_types.add("rnn")
@dataclass(frozen=True, kw_only=True)
class RNNConfig(ModelConfig):
    """An Elman network (Elman, 1990): h_t = f(W_hh h_{t-1} + W_hx x_t + b_h), y_t = g(W_yh h_t + b_y).

    With `direction` forward it is a language model. With bidirectional it sees the tokens it should
    predict, so it is not one. With prefix both directions run over every prefix: a language model
    again, at O(T^2). `n_output` is `vocab_size` for a language model.
    """

    model_type: ClassVar[str] = "rnn"
    n_layer: int
    n_hidden: int
    n_output: int
    activation: Literal["tanh", "slide"] = "tanh"
    output_activation: Literal["none", "slide"] = "none"
    direction: Literal["forward", "bidirectional", "prefix"] = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_layers(self.n_layer)
        self.require_positive("n_hidden", "n_output")

    @property
    def context_limit(self) -> int | None:
        """Return None: a state of constant size represents the whole past."""
        return None
