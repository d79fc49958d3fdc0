"""DeepSeek-V3 without experts: MLA with a decoupled rotary part and an RMSNorm on the latent."""

from collections.abc import Iterator
from dataclasses import replace

from rehead.attention import LatentConfig
from rehead.attention.latent import NORM_EPS
from rehead.checkpoint.family import (
    PARTS,
    Family,
    Fields,
    Table,
    Weight,
    families,
    outside_layers,
    refuse,
    write_rope,
)
from rehead.config import GPTConfig
from rehead.errors import InvalidInput


class DeepseekV3(Family):
    """All layers dense: `first_k_dense_replace` is the number of layers."""

    architecture = "DeepseekV3ForCausalLM"

    def read(self, fields: Fields) -> GPTConfig:
        """The config that a config.json describes."""
        n_layer, width = fields.take("num_hidden_layers", int), fields.take("hidden_size", int)
        dense = fields.take("first_k_dense_replace", int, 3)
        if dense < n_layer:
            raise InvalidInput(
                f"{fields.where}: first_k_dense_replace={dense} of {n_layer} layers: rehead has no experts."
            )
        fields.expect("hidden_act", "silu")
        fields.expect("attention_bias", False)
        heads = fields.take("num_attention_heads", int)
        fields.expect("num_key_value_heads", heads)
        interleaved = fields.take("rope_interleave", bool, True)
        rope = replace(fields.rope(), layout="interleaved" if interleaved else "half-split")
        rotated = fields.take("qk_rope_head_dim", int)
        fields.expect("head_dim", rotated)
        attention = LatentConfig(
            n_query_head=heads,
            kv_lora_rank=fields.take("kv_lora_rank", int),
            q_lora_rank=fields.take("q_lora_rank", int, None),
            qk_nope_head_dim=fields.take("qk_nope_head_dim", int),
            qk_rope_head_dim=rotated,
            v_head_dim=fields.take("v_head_dim", int),
            rope=rope,
            attn_pdrop=fields.take("attention_dropout", float, 0.0),
        )
        config = GPTConfig(
            vocab_size=fields.take("vocab_size", int),
            block_size=fields.take("max_position_embeddings", int, 4096),
            n_embd=width,
            attention=(attention,) * n_layer,
            learned_positions=False,
            norm="rmsnorm",
            norm_eps=fields.take("rms_norm_eps", float, 1e-6),
            mlp="swiglu",
            n_hidden=fields.take("intermediate_size", int),
            mlp_bias=False,
            tie_embeddings=fields.take("tie_word_embeddings", bool, False),
        )
        fields.finish()
        return config

    def write(self, config: GPTConfig) -> Table:
        """The config.json of a model. `rms_norm_eps` also is the latent norm's, to every engine."""
        first = config.attention[0]
        refused = {
            "attention (it has mla)": not all(isinstance(layer, LatentConfig) for layer in config.attention),
            "layers, which differ,": len(set(config.attention)) > 1,
            "norm": config.norm != "rmsnorm",
            "norm_eps (some engines give the latent norm the same)": config.norm_eps != NORM_EPS,
            "mlp": config.mlp != "swiglu" or config.mlp_bias,
            "learned_positions": config.learned_positions,
        }
        if isinstance(first, LatentConfig):
            refused |= {
                "latent_norm=False": not first.latent_norm,
                "rebuilt keys or missing rotary part": not first.qk_rope_head_dim,
                "window": first.window is not None,
                "n_kv_head": first.n_kv_head != first.n_query_head,
                "bias": first.qkv_bias or first.o_bias,
            }
        refuse(refused, self.architecture)
        assert isinstance(first, LatentConfig)
        assert first.rope is not None
        return {
            "architectures": [self.architecture],
            "model_type": "deepseek_v3",
            "vocab_size": config.vocab_size,
            "hidden_size": config.n_embd,
            "intermediate_size": config.n_hidden,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": first.n_query_head,
            "num_key_value_heads": first.n_query_head,
            "kv_lora_rank": first.kv_lora_rank,
            "q_lora_rank": first.q_lora_rank,
            "qk_nope_head_dim": first.qk_nope_head_dim,
            "qk_rope_head_dim": first.qk_rope_head_dim,
            "v_head_dim": first.v_head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.block_size,
            "rms_norm_eps": config.norm_eps,
            "rope_interleave": first.rope.layout == "interleaved",
            "rope_parameters": write_rope(first.rope),
            "attention_bias": False,
            "attention_dropout": first.attn_pdrop,
            "tie_word_embeddings": config.tie_embeddings,
            "first_k_dense_replace": config.n_layer,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
        }

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Names are ours with `model.` before them."""
        yield from outside_layers(config)
        for index, kind in enumerate(config.attention):
            assert isinstance(kind, LatentConfig)
            queries = ("q_proj",) if kind.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
            parts = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
            for name in (*PARTS, *(f"self_attn.{part}" for part in parts)):
                yield Weight(
                    theirs=f"model.layers.{index}.{name}.weight", ours=(f"layers.{index}.{name}.weight",)
                )


families.add("deepseek_v3")(DeepseekV3())
