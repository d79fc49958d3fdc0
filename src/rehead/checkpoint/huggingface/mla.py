"""The part that families with multi-head latent attention share; each family has its own file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
from rehead.checkpoint.huggingface.base import Fields, Table, different
from rehead.checkpoint.huggingface.decoder import Decoder, Sizes
from rehead.config import GPTConfig
from rehead.errors import InvalidInput


class LatentLike(Decoder[LatentConfig]):
    """A decoupled rotary part, an RMSNorm on the latent; every layer alike but for experts.

    The families differ in the defaults of missing keys, the layout of the rotary part, keys of experts,
    and MiniCPM's scales.
    """

    attention = LatentConfig
    attention_words = "attention (it has mla)"
    layouts: ClassVar[tuple[Layout, ...]] = ("interleaved", "half-split")
    """Which elements of the rotary part may form a pair; of two layouts `rope_interleave` in config.json chooses."""
    widths: ClassVar[dict[str, int]] = {"q_lora_rank": 1536, "v_head_dim": 128}
    """Defaults of missing keys, where they do not follow from other sizes."""
    scales: ClassVar[bool] = False
    """Whether config.json has keys for the scales of the model."""

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[LatentConfig]:
        """Return the attention of every layer, all alike."""
        fields.expect("num_key_value_heads", sizes.n_query_head, None)
        bias = fields.take("attention_bias", bool, False)
        rotated = fields.take("qk_rope_head_dim", int)
        if rotated < 1:
            raise InvalidInput(
                f"{fields.where}: qk_rope_head_dim={rotated}: this class needs a rotary part. Use 1 or more."
            )
        fields.expect("head_dim", rotated, None)
        kind = LatentConfig(
            **shared | {"rope": replace(shared["rope"], layout=self._layout(fields))},
            kv_lora_rank=fields.take("kv_lora_rank", int),
            q_lora_rank=fields.take("q_lora_rank", int, self.widths["q_lora_rank"], null=None),
            qk_nope_head_dim=fields.take("qk_nope_head_dim", int),
            qk_rope_head_dim=rotated,
            v_head_dim=fields.take("v_head_dim", int, self.widths.get("v_head_dim", sizes.head_dim)),
            down_bias=bias,
            o_bias=bias,
        )
        return [kind] * sizes.n_layer

    def _layout(self, fields: Fields) -> Layout:
        interleaved = len(self.layouts) == 1 or fields.take("rope_interleave", bool, True)
        return self.layouts[0 if interleaved else 1]

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return no biases in the MLP."""
        fields.expect("mlp_bias", False)
        return {"mlp_bias": False}

    def unsupported(self, config: GPTConfig, first: LatentConfig) -> dict[str, bool]:
        """Name what no class of this kind can represent."""
        layout = self.layouts[0] if first.rope is None else first.rope.layout
        return {
            f"rope_layout={layout}": layout not in self.layouts,
            "scales": config.scaled and not self.scales,
            different(config.attention): len(set(config.attention)) > 1,
            "mlp_bias": config.mlp_bias,
            "latent_norm=False": not first.latent_norm,
            "rebuilt keys or missing rotary part": not first.qk_rope_head_dim,
            "qk_norm_eps": first.qk_norm_eps is not None,
            "window": first.window is not None,
            "n_kv_head": first.n_kv_head != first.n_query_head,
            "qkv_bias": first.qkv_bias,
            "down_bias without o_bias": first.down_bias != first.o_bias,
        }

    def attention_json(self, first: LatentConfig) -> Table:
        """Return the widths of latents and heads."""
        return {
            "num_key_value_heads": first.n_query_head,
            "kv_lora_rank": first.kv_lora_rank,
            "q_lora_rank": first.q_lora_rank,
            "qk_nope_head_dim": first.qk_nope_head_dim,
            "qk_rope_head_dim": first.qk_rope_head_dim,
            "v_head_dim": first.v_head_dim,
        }

    def extra_json(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Return the key of the biases of down and output projections and, if it can differ, that of the layout."""
        assert first.rope is not None
        interleaved = {"rope_interleave": first.rope.layout == "interleaved"}
        return {"attention_bias": first.o_bias, **(interleaved if len(self.layouts) > 1 else {})}

    def attention_weights(self, layer: LatentConfig) -> list[str]:
        """Return the projections of queries, with a latent or without, and those of the KV latent."""
        queries = ("q_proj",) if layer.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
        parts = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        biased = [part for part in parts if part in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
        return [f"{part}.weight" for part in parts] + [f"{part}.bias" for part in biased * layer.down_bias]
