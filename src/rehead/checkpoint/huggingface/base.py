"""The contract of a family of stock models: configs in both directions, and the names of weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rehead.attention import RopeConfig, scalings
from rehead.attention.rope import LongRopeScaling, RopeScaling
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
    seq_aux num_mtp_layers embedding_initializer_range
"""
UNREAD = frozenset(UNREAD_KEYS.split())
"""Keys of config.json that do not change what a dense model computes."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of theirs, which holds `ours` stacked along the first axis, possibly transposed."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


class Family(ABC):
    """One kind of stock model. Both directions must agree: `read(write(config)) == config`."""

    architecture: str
    deepseek_kernels: ClassVar[bool] = False
    """Whether engines run it on the MLA kernels they have for DeepSeek."""

    @abstractmethod
    def read(self, fields: "Fields") -> GPTConfig:
        """Return the config that a config.json describes."""

    @abstractmethod
    def write(self, config: GPTConfig) -> Table:
        """Return the config.json of a model. Raises ConfigError for what this family cannot represent."""

    @abstractmethod
    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Yield all tensors of a model."""

    def canonical_name(self, name: str) -> str | None:
        """Return a tensor's name as `weights` has it; None for one that is computed and not learned."""
        return name


families: Registry[Family] = Registry("model family")
QUANTISED = (".qweight", ".qzeros", ".scales", ".weight_scale", ".weight_scale_inv", ".absmax", ".SCB")
"""Suffixes that GPTQ, AWQ, fp8 and bitsandbytes give to tensors beside quantised weights."""


def require_plain(names: Iterable[str], where: str) -> None:
    """Refuse quantised weights, which are recognised by the suffixes of their names."""
    quantised = sorted(name for name in names if name.endswith(QUANTISED))
    if quantised:
        raise InvalidInput(
            f"{where} holds quantised weights ({quantised[0]:.100} and {len(quantised) - 1} like it): rehead reads "
            "float32, bfloat16 and float16. Use the model from before its quantisation."
        )


class Fields:
    """A config.json that is read key by key; `finish` refuses keys that were not read."""

    def __init__(self, table: Table, where: str) -> None:
        self._left, self.where = dict(table), where

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        """Return a value of exactly this kind; the default where it is missing or null."""
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
        """Whether the key is present, null or not. For a missing one transformers takes its own default."""
        return name in self._left

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; a missing key counts as the first."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            raise InvalidInput(
                f"{self.where}: {name}={value!r:.80}: rehead knows {', '.join(map(repr, allowed))} here."
            )

    def rope(self, length: int) -> RopeConfig:
        """Read the rotary embedding of a model of `length` positions, from the keys of transformers 5 or earlier.

        These are `rope_parameters`, and `rope_theta` with `rope_scaling`. If both are given, they must agree.
        """
        table = _renamed(self.take("rope_parameters", dict, {}))
        old = _renamed(self.take("rope_scaling", dict, {}))
        theta = self.take("rope_theta", float, None)
        for name, value in (old if theta is None else {"rope_theta": theta, **old}).items():
            if table.setdefault(name, value) != value:
                raise InvalidInput(
                    f"{self.where}: {name} is {table[name]!r:.40} in rope_parameters and {value!r:.40} outside it: "
                    "remove one."
                )
        theta = table.pop("rope_theta", 10_000.0)
        kind = table.pop("rope_type", "default")
        if kind == "default":
            scaling = None
            if table:
                raise InvalidInput(
                    f"{self.where}: rope_type default with {', '.join(table)}: the default takes no other keys."
                )
        elif not isinstance(kind, str) or kind not in scalings:
            raise InvalidInput(
                f"{self.where}: rope_type={kind!r:.40}: rehead knows default, {', '.join(scalings)}."
            )
        else:
            if kind != "linear":
                table.setdefault("original_max_position_embeddings", length)
            if kind == "longrope":
                table = _one_list(table, length, self.where)
            scaling = decode(RopeScaling, {"rope_type": kind, **table}, f"{self.where}: rope")
        if not isinstance(theta, int | float) or isinstance(theta, bool) or not theta > 0:
            raise InvalidInput(f"{self.where}: rope_theta={theta!r:.40}: expected a positive number.")
        return RopeConfig(theta=float(theta), scaling=scaling)

    def finish(self) -> None:
        """Refuse keys that were not read and may change what the model computes."""
        for name, value in self._left.items():
            if name not in UNREAD and value not in (None, False, [], {}):
                raise InvalidInput(
                    f"{self.where}: {name}={value!r:.60}: rehead does not know this key, which may change the model."
                )


def _renamed(table: Table) -> Table:
    """Return the table with `rope_type` for its former name, `type`."""
    table = dict(table)
    if "type" in table:
        table.setdefault("rope_type", table.pop("type"))
        table.pop("type", None)
    return table


def _one_list(table: Table, length: int, where: str) -> Table:
    """Merge longrope's lists for short and long texts, and compute its magnitude as transformers does."""
    short, long = table.get("short_factor"), table.get("long_factor")
    reach, stretch = table["original_max_position_embeddings"], table.get("factor")
    known = {"short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor"}
    if not isinstance(short, list) or type(reach) is not int or reach < 2 or table.keys() - known:
        raise InvalidInput(
            f"{where}: longrope with {', '.join(map(str, table)):.200}: expected {', '.join(known)}."
        )
    if short != long and length > reach:
        raise InvalidInput(
            f"{where}: longrope with other factors beyond {reach} of {length} positions: the angles would change "
            f"within a text. Set max_position_embeddings={reach} to use the model up to there."
        )
    factor = length / reach if stretch is None else stretch
    if not isinstance(factor, int | float):
        raise InvalidInput(f"{where}: longrope factor={factor!r:.40}: expected a number.")
    default = math.sqrt(1 + math.log(factor) / math.log(reach)) if factor > 1 else 1.0
    given = table.get("attention_factor")
    return {"factors": short, "attention_factor": default if given is None else given}


def write_rope(rope: RopeConfig | None, length: int) -> Table:
    """Return the keys of a rotary embedding over `length` positions, for transformers 5 and for earlier releases.

    Earlier releases and other engines read `rope_theta` and `rope_scaling`, and take 10000 for a missing theta.
    """
    assert rope is not None
    table: Table = {"rope_type": "default"}
    if isinstance(rope.scaling, LongRopeScaling):
        factors = list(rope.scaling.factors)
        table = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0}
        table |= {
            "original_max_position_embeddings": length,
            "attention_factor": rope.scaling.attention_factor,
        }
    elif rope.scaling is not None:
        table = {"rope_type": scalings.name_of(type(rope.scaling))}
        table |= {name: value for name, value in vars(rope.scaling).items() if value is not None}
    return {
        "rope_parameters": {"rope_theta": rope.theta, **table},
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling is None else table,
    }


def refuse(fields: dict[str, bool], architecture: str) -> None:
    """Raise ConfigError naming the fields whose value is True: those that the class cannot represent."""
    refused = [name for name, bad in fields.items() if bad]
    remedy = "Choose another --format, or change the attention with `rehead convert`."
    if any(name.startswith(("norm", "mlp", "learned_positions", "scales")) for name in refused):
        remedy = "Conversions change the attention only: choose another --format, or train it with model.shape=llama."
    if refused:
        raise ConfigError(f"{architecture} cannot represent this model's {', '.join(refused)}. {remedy}")
