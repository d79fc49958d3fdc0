"""The contract of a family of stock models: config both ways, and whose weight is whose."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rehead.attention import RopeConfig, scalings
from rehead.attention.rope import RopeScaling
from rehead.config import GPTConfig, decode
from rehead.errors import ConfigError, InvalidInput
from rehead.registry import Registry

Table = dict[str, Any]
UNREAD_KEYS = """
    is_llama_config _num_labels transformers.js_config mlp_only_layers
    architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache bos_token_id
    eos_token_id pad_token_id initializer_range pretraining_tp output_hidden_states output_attentions
    return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type
    max_window_layers layer_types task_specific_params summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout n_ctx reorder_and_upcast_attn
    _attn_implementation_autoset qk_head_dim num_nextn_predict_layers moe_intermediate_size
    n_shared_experts n_routed_experts routed_scaling_factor n_group topk_group num_experts_per_tok
    norm_topk_prob output_router_logits scoring_func topk_method moe_layer_freq ep_size aux_loss_alpha
    seq_aux num_mtp_layers
"""
UNREAD = frozenset(UNREAD_KEYS.split())
"""Keys of config.json that do not change what a dense model computes."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of theirs: ours one below the other (`ours`), stored transposed or not."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


class Family(ABC):
    """One kind of stock model. Both directions must agree: `read(write(config)) == config`."""

    architecture: str

    @abstractmethod
    def read(self, fields: "Fields") -> GPTConfig:
        """The config that a config.json describes."""

    @abstractmethod
    def write(self, config: GPTConfig) -> Table:
        """The config.json of a model. Raises ConfigError for what this family cannot say."""

    @abstractmethod
    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """All tensors of a model."""

    def known_as(self, name: str) -> str | None:
        """A tensor's name as `weights` has it; None for one that is computed and not learned."""
        return name


PARTS = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""Of every layer of Llama's kin, beside its attention."""


def outside_layers(config: GPTConfig) -> Iterator[Weight]:
    """What Llama's kin have outside their layers: our names with `model.` before them, and the head."""
    yield Weight(theirs="model.embed_tokens.weight", ours=("embed_tokens.weight",))
    yield Weight(theirs="model.norm.weight", ours=("norm.weight",))
    if not config.tie_embeddings:
        yield Weight(theirs="lm_head.weight", ours=("head.weight",))


families: Registry[Family] = Registry("model family")


class Fields:
    """A config.json, read key by key; what nobody has read in the end is refused."""

    def __init__(self, table: Table, where: str) -> None:
        self._left, self.where = dict(table), where

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        """A value of exactly this kind; the default where it is missing or null."""
        value = self._left.pop(name, None)
        if value is None:
            if default is ...:
                raise InvalidInput(f"{self.where}: {name} is missing.")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidInput(f"{self.where}: {name}={value!r:.80}: expected {kind.__name__}.")
        return value

    def has(self, name: str) -> bool:
        """Whether the key is there, null or not: missing, transformers takes its own default."""
        return name in self._left

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse another value than these; missing is as good as the first."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            raise InvalidInput(
                f"{self.where}: {name}={value!r:.80}: rehead knows {', '.join(map(repr, allowed))} here."
            )

    def rope(self) -> RopeConfig:
        """Rotary embedding, in the words of transformers 5 (`rope_parameters`) or before."""
        new = self.take("rope_parameters", dict, {})
        old = self.take("rope_scaling", dict, {})
        theta = self.take("rope_theta", float, 10_000.0)
        table = dict(old) | dict(new)
        theta = table.pop("rope_theta", theta)
        kind = table.pop("rope_type", table.pop("type", "default"))
        table.pop("type", None)
        if kind == "default":
            scaling = None
            if table:
                raise InvalidInput(
                    f"{self.where}: rope_type default with {', '.join(table)}, which mean nothing there."
                )
        elif not isinstance(kind, str) or kind not in scalings:
            raise InvalidInput(
                f"{self.where}: rope_type={kind!r:.40}: rehead knows default, {', '.join(scalings)}."
            )
        else:
            if kind == "yarn" and self.has("max_position_embeddings"):
                table.setdefault("original_max_position_embeddings", self._left["max_position_embeddings"])
            scaling = decode(RopeScaling, {"rope_type": kind, **table}, f"{self.where}: rope")
        if not isinstance(theta, int | float) or isinstance(theta, bool) or not theta > 0:
            raise InvalidInput(f"{self.where}: rope_theta={theta!r:.40}: expected a positive number.")
        return RopeConfig(theta=float(theta), scaling=scaling)

    def finish(self) -> None:
        """Refuse keys that were not read and may mean something."""
        for name, value in self._left.items():
            if name not in UNREAD and value not in (None, False, [], {}):
                raise InvalidInput(
                    f"{self.where}: {name}={value!r:.60}: rehead does not know this key, and does not guess what "
                    "it changes."
                )


def write_rope(rope: RopeConfig | None) -> Table:
    """`rope_parameters`, as transformers 5 writes it."""
    assert rope is not None
    table: Table = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.scaling is not None:
        table["rope_type"] = scalings.name_of(type(rope.scaling))
        table |= {name: value for name, value in vars(rope.scaling).items() if value is not None}
    return table


def refuse(fields: dict[str, bool], architecture: str) -> None:
    """Raise ConfigError naming the fields that are true: those the class cannot say."""
    found = [name for name, bad in fields.items() if bad]
    if found:
        raise ConfigError(
            f"{architecture} cannot say this model's {', '.join(found)}. Convert it first, or choose another format."
        )
