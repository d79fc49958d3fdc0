"""GPT-NeoX and Pythia: LayerNorm and biases, attention and MLP side by side, rope in a part of each head."""

from collections.abc import Iterator

from rehead.attention import GroupedConfig, RopeConfig
from rehead.checkpoint.huggingface.base import Family, Fields, Table, Weight, families, refuse, unusual
from rehead.checkpoint.huggingface.gpt2 import ACTIVATIONS
from rehead.checkpoint.huggingface.rope import RopeKeys, read_rope, write_rope
from rehead.config import GPTConfig
from rehead.errors import InvalidInput

ROPE = RopeKeys(partial=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct")
MODULES = {
    "input_layernorm": ("input_layernorm",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.dense_h_to_4h": ("mlp.up_proj",),
    "mlp.dense_4h_to_h": ("mlp.down_proj",),
}
"""Their modules of a layer, and ours; query, key and value of one head follow one another."""
BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


class GPTNeoX(Family):
    """MHA. One dropout for embeddings and layers."""

    architecture = "GPTNeoXForCausalLM"

    def read(self, fields: Fields) -> GPTConfig:
        """Return the config that a config.json describes."""
        width, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
        length = fields.take("max_position_embeddings", int, 2048)
        bias = fields.take("attention_bias", bool, True)
        head_dim = width // heads if heads > 0 else 0
        fields.expect("head_dim", head_dim, None)
        activation = fields.expect("hidden_act", "gelu", *ACTIVATIONS)
        dropout = fields.take("hidden_dropout", float, 0.0)
        attention = GroupedConfig(
            n_query_head=heads,
            head_dim=head_dim,
            rope=_rope(fields, length),
            attn_pdrop=fields.take("attention_dropout", float, 0.0),
            qkv_bias=bias,
            o_bias=bias,
        )
        config = GPTConfig(
            vocab_size=fields.take("vocab_size", int),
            block_size=length,
            n_embd=width,
            attention=(attention,) * fields.layers("num_hidden_layers"),
            learned_positions=False,
            norm="layernorm",
            norm_eps=fields.take("layer_norm_eps", float, 1e-5),
            mlp=ACTIVATIONS[activation],
            n_hidden=fields.take("intermediate_size", int),
            mlp_bias=True,
            tie_embeddings=fields.take("tie_word_embeddings", bool, False),
            parallel_residual=fields.take("use_parallel_residual", bool, True),
            embd_pdrop=dropout,
            resid_pdrop=dropout,
        )
        fields.finish()
        return config

    def write(self, config: GPTConfig) -> Table:
        """Return the config.json of a model."""
        first = config.attention[0]
        like = first if isinstance(first, GroupedConfig) else GroupedConfig(n_query_head=1, head_dim=1)
        like = GroupedConfig(
            n_query_head=like.n_query_head,
            head_dim=like.head_dim,
            rope=like.rope,
            attn_pdrop=like.attn_pdrop,
            qkv_bias=like.qkv_bias,
            o_bias=like.qkv_bias,
        )
        activations: dict[str, str] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        refuse(
            {
                "attention (it has MHA with rope and no window, biases everywhere or nowhere)": (
                    set(config.attention) != {like} or like.rope is None or like.rope.layout != "half-split"
                ),
                "head_dim": like.head_dim * like.n_query_head != config.n_embd,
                "learned_positions": config.learned_positions,
                "norm": config.norm != "layernorm",
                "scales": config.scaled,
                "mlp": config.mlp not in activations or not config.mlp_bias,
                "embd_pdrop other than resid_pdrop": config.embd_pdrop != config.resid_pdrop,
                **unusual(config, "parallel_residual"),
            },
            self.architecture,
        )
        return {
            "architectures": [self.architecture],
            "model_type": "gpt_neox",
            "vocab_size": config.vocab_size,
            "hidden_size": config.n_embd,
            "intermediate_size": config.n_hidden,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": like.n_query_head,
            "hidden_act": activations[config.mlp],
            "max_position_embeddings": config.block_size,
            "layer_norm_eps": config.norm_eps,
            "attention_bias": like.qkv_bias,
            "attention_dropout": like.attn_pdrop,
            "hidden_dropout": config.resid_pdrop,
            "use_parallel_residual": config.parallel_residual,
            "tie_word_embeddings": config.tie_embeddings,
            **write_rope(like.rope, config.block_size, ROPE),
        }

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Yield all tensors."""
        yield Weight(theirs="gpt_neox.embed_in.weight", ours=("embed_tokens.weight",))
        if not config.tie_embeddings:
            yield Weight(theirs="embed_out.weight", ours=("head.weight",))
        for end in ("weight", "bias"):
            yield Weight(theirs=f"gpt_neox.final_layer_norm.{end}", ours=(f"norm.{end}",))
            for index, layer in enumerate(config.attention):
                assert isinstance(layer, GroupedConfig)
                for theirs, ours in MODULES.items():
                    if end == "bias" and theirs.startswith("attention.") and not layer.qkv_bias:
                        continue
                    yield Weight(
                        theirs=f"gpt_neox.layers.{index}.{theirs}.{end}",
                        ours=tuple(f"layers.{index}.{name}.{end}" for name in ours),
                        groups=layer.n_query_head if len(ours) > 1 else 1,
                    )

    def canonical_name(self, name: str) -> str | None:
        """Return the name, the head's as files have it; None for the causal mask and angles."""
        if name.endswith(BUFFERS):
            return None
        return "embed_out.weight" if name == "lm_head.weight" else name


def _rope(fields: Fields, length: int) -> RopeConfig:
    """Return the rotary embedding. Some releases write its keys under the usual names, too, which must agree."""
    rope = read_rope(fields, length, ROPE)
    usual = {"rope_theta": rope.theta, "partial_rotary_factor": rope.partial_rotary_factor}
    for (name, value), read in zip(usual.items(), (ROPE.theta_key, ROPE.partial_key), strict=True):
        if (found := fields.take(name, float, value, null=value)) != value:
            raise InvalidInput(
                f"{fields.where}: {name}={found} beside {read}={value}, which the class reads: remove {name}, or "
                "correct one."
            )
    return rope


families.add("gpt_neox")(GPTNeoX())
