"""The contract of a family of stock models: configs in both directions, and the names of weights."""

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, ClassVar, NoReturn

from rehead.attention import AttentionConfig
from rehead.config import GPTConfig
from rehead.config.model import MAX_LAYERS
from rehead.errors import ConfigError, InvalidInput
from rehead.registry import Registry

Table = dict[str, Any]
LARGEST = 16 << 20
"""Larger whole numbers mean that a config.json is damaged or malicious."""
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
    seq_aux num_mtp_layers router_aux_loss_coef embedding_initializer_range cache_implementation
    classifier_dropout is_decoder _attn_implementation predict_special_tokens unsloth_version unsloth_fixed
    max_sequence_length sliding_window_size
    do_sample temperature top_k top_p min_p typical_p repetition_penalty
"""
UNREAD = frozenset(UNREAD_KEYS.split())
"""Keys of config.json that do not change what a dense model computes."""
SHARED_KEYS = """
    attention_chunk_size compression_config fusion_config is_causal num_kv_shared_layers partial_rotary_factor
    per_layer_config quantization_config sliding_window original_max_position_embeddings transformers_weights
"""
SHARED = frozenset(SHARED_KEYS.split())
"""Keys that transformers reads for any class, in its masks, caches, rotary tables and loading."""

USUAL = {"is_causal": True, "partial_rotary_factor": 1.0}
"""What some of them say where they change nothing."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of the stock class, which holds our weights `ours` stacked along axis 0, possibly transposed.

    `rows` are the row counts of our weights, if not equal. With `groups`, the tensor is a stack of that many parts,
    each of which holds a share of all of ours (GPT-NeoX: query, key and value of one head after another).
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    rows: tuple[int, ...] = ()
    groups: int = 1


class Family(ABC):
    """One kind of stock model. Both directions must agree: `read(write(config)) == config`."""

    architecture: str
    deepseek_kernels: ClassVar[bool] = False
    """Whether engines run it on the MLA kernels they have for DeepSeek."""
    zeroes_padding: ClassVar[bool] = False
    """Whether the class zeroes the embedding of the token that config.json names for padding, as it is loaded."""

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

    def take(self, name: str, kind: type, default: Any = ..., *, null: Any = ...) -> Any:
        """Return a value of exactly this kind, `default` if the key is missing, or `null` for null.

        Unless `null` is given, null is refused where a missing key means more than none, zero or False.
        """
        value = self.look(name, kind, default, null=null)
        self._left.pop(name, None)
        return value

    def look(self, name: str, kind: type, default: Any = ..., *, null: Any = ...) -> Any:
        """Return what `take` returns, but leave the key to be read again."""
        if name not in self._left:
            if default is ...:
                raise InvalidInput(f"{self.where}: {name} is missing.")
            return default
        value = self._left[name]
        if value is None:
            if null is ... and (default is ... or default):
                self._refuse_null(name)
            return default if null is ... else null
        most = sys.float_info.max if kind is float else LARGEST
        if type(value) is int and kind in (int, float) and abs(value) > most:
            raise InvalidInput(f"{self.where}: {name}={value!s:.40} is too large. Use at most {most:,}.")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidInput(f"{self.where}: {name}={value!r:.80}: expected {kind.__name__}.")
        return value

    def rename(self, name: str, key: str, names: dict[str, str]) -> None:
        """Replace a former value of a key in the table `name` by its present one."""
        if isinstance(table := self._left.get(name), dict) and isinstance(value := table.get(key), str):
            self._left[name] = table | {key: names.get(value, value)}

    def layers(self, name: str) -> int:
        """Return the number of layers, checked before a list of that length is built."""
        n_layer: int = self.take(name, int)
        if not 1 <= n_layer <= MAX_LAYERS:
            raise InvalidInput(f"{self.where}: {name}={n_layer}. Use 1 to {MAX_LAYERS}.")
        return n_layer

    def expect(self, name: str, *allowed: Any) -> Any:
        """Return the value, and refuse any but these; a missing key counts as the first, as does null for False."""
        value = self._left.pop(name, allowed[0])
        if value is None and allowed[0] is False:
            return False
        if value is None and None not in allowed:
            self._refuse_null(name)
        if value not in allowed:
            raise InvalidInput(
                f"{self.where}: {name}={value!r:.80}: rehead knows {', '.join(map(repr, allowed))} here."
            )
        return value

    def _refuse_null(self, name: str) -> NoReturn:
        raise InvalidInput(
            f"{self.where}: {name}=null, which the stock class does not read. Give its value, or remove the key to "
            "use the class's default."
        )

    def unread(self) -> Table:
        """Return the keys that were not read, nor are in `UNREAD`, whose values say something."""
        return {
            name: value
            for name, value in self._left.items()
            if name not in UNREAD
            and value not in ((None, USUAL[name]) if name in USUAL else (None, False, [], {}))
        }

    def finish(self) -> None:
        """Warn of keys that the stock class does not read either; refuse those that transformers reads for it.

        A family takes every key that its class reads, so that the others cannot change what the model computes.
        """
        unread = self.unread()
        for name in sorted(SHARED & unread.keys()):
            self.refuse(name, unread[name])
        if unread:
            code = " auto_map names code in the folder, which is not run." if "auto_map" in unread else ""
            warnings.warn(
                f"{self.where}: ignored {', '.join(unread):.300}, which transformers' class for model_type "
                f"{self._left.get('model_type')} does not read.{code}",
                stacklevel=2,
            )

    def refuse(self, name: str, value: object) -> NoReturn:
        """Raise InvalidInput for a key that was not read."""
        raise InvalidInput(
            f"{self.where}: {name}={value!r:.60}: rehead does not know this key, which may change the model."
        )


BLOCK = ("norm_position", "parallel_residual", "logit_softcap", "experts")
"""Fields of GPTConfig that only some families can represent, beside the scales."""
MOST_NAMED = 4
"""Layers that a message names."""


def unusual(config: GPTConfig, *sayable: str) -> dict[str, bool]:
    """Return, for `refuse`, the fields of `BLOCK` except `sayable` ones; True if they are not at their default."""
    defaults = {field.name: field.default for field in fields_of(GPTConfig)}
    return {name: getattr(config, name) != defaults[name] for name in BLOCK if name not in sayable}


def refuse(fields: dict[str, bool], who: str, fails: str = "cannot represent") -> None:
    """Raise ConfigError naming the fields whose value is True: those that a class or an engine fails at."""
    refused = [name for name, bad in fields.items() if bad]
    if refused:
        raise ConfigError(f"{who} {fails} this model's {', '.join(refused)}.")


def different(layers: Sequence[AttentionConfig]) -> str:
    """Return, for `refuse`, which layers are not like most others, and in which fields."""
    usual = Counter(layers).most_common(1)[0][0]
    odd = [index for index, layer in enumerate(layers) if layer != usual]
    fields = [
        field.name
        for field in fields_of(type(usual))
        if any(getattr(layers[index], field.name, None) != getattr(usual, field.name) for index in odd)
    ]
    which = ", ".join(map(str, odd[:MOST_NAMED])) + (", ..." if len(odd) > MOST_NAMED else "")
    kinds = f"{'layer' if len(odd) == 1 else 'layers'} {which}"
    return f"different layers ({kinds} of 0 to {len(layers) - 1}: {', '.join(fields)})"


def written(value: float, reads_back: Callable[[float], bool]) -> float:
    """Return a number with few digits, or next to `value`, that reads back as what was meant; else `value`."""
    near = (float(f"{value:.12g}"), value, math.nextafter(value, 0), math.nextafter(value, math.inf))
    return next(filter(reads_back, near), value)
