"""Phi-3 and Phi-4: query, key and value in one tensor, gate and up in another; rope in all or part of each head."""

from collections.abc import Sequence
from typing import ClassVar

from rehead.attention import GroupedConfig, RopeConfig
from rehead.attention.rope_scaling import LongRopeScaling
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.llama import LlamaLike, Windows
from rehead.checkpoint.huggingface.rope import RopeKeys, read_rope
from rehead.config import GPTConfig
from rehead.errors import InvalidInput

REACH = 4096
"""`original_max_position_embeddings` if config.json does not name it."""
QKV = "self_attn.qkv_proj"


class Phi3(LlamaLike):
    """A window in every layer, or none; no biases."""

    architecture = "Phi3ForCausalLM"
    norm_eps = 1e-5
    rope = RopeKeys(partial=1.0)
    windows = Windows.ALIKE
    biases = ((False, False),)
    names: ClassVar[dict[str, str]] = {
        **{f"self_attn.{part}_proj": QKV for part in "qkv"},
        "mlp.gate_proj": "mlp.gate_up_proj",
        "mlp.up_proj": "mlp.gate_up_proj",
    }

    def rows(self, layer: GroupedConfig, theirs: str) -> tuple[int, ...]:
        """Return the rows of queries, keys and values."""
        heads = (layer.n_query_head, layer.n_kv_head, layer.n_kv_head)
        return tuple(n * layer.head_dim for n in heads) if theirs.startswith(QKV) else ()

    def read_rope(self, fields: Fields, length: int) -> RopeConfig:
        """Return the rotary embedding; longrope's first length is a key of its own, and it had other names before."""
        fields.rename("rope_scaling", "type", dict.fromkeys(("su", "yarn"), "longrope"))
        return read_rope(
            fields, length, self.rope, fields.take("original_max_position_embeddings", int, REACH)
        )

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, all alike."""
        layers = super().layers(fields, sizes, shared)
        if _other_factors(layers[0], sizes.width):
            raise InvalidInput(
                f"{fields.where}: head_dim={layers[0].head_dim} with longrope: transformers' class takes factors for "
                f"heads of hidden_size / num_attention_heads={sizes.head_dim} only. Give one for each of their pairs."
            )
        return layers

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the window; none if it is as wide as the context (Phi-4-mini), where it hides nothing."""
        fields.expect("attention_bias", False)
        window: int | None = fields.take("sliding_window", int, None)
        return {"window": None if window is not None and window >= sizes.length else window}

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return dropout; `embd_pdrop` is a key that the class does not use."""
        fields.take("embd_pdrop", float, 0.0)
        return super().extra_config(fields, sizes) | {"resid_pdrop": fields.take("resid_pdrop", float, 0.0)}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also scalings other than longrope, and longrope of heads of another width."""
        scaling = first.rope.scaling if first.rope is not None else None
        return super().unsupported(config, first) | {
            "rope scaling": scaling is not None and not isinstance(scaling, LongRopeScaling),
            "head_dim with longrope": _other_factors(first, config.n_embd),
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the window, the first length of longrope, and dropout."""
        return {
            "sliding_window": first.window,
            "original_max_position_embeddings": config.block_size,
            "resid_pdrop": config.resid_pdrop,
        }


def _other_factors(layer: GroupedConfig, width: int) -> bool:
    """Return True if longrope has another number of factors than the class expects from the model's `width`."""
    rope = layer.rope
    if rope is None or not isinstance(rope.scaling, LongRopeScaling):
        return False
    return rope.rotated(width // layer.n_query_head) // 2 != len(rope.scaling.factors)


families.add("phi3")(Phi3())
