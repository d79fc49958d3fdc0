"""GPT-2: learned positions, LayerNorm and biases; weights are stored transposed, with q, k and v in one tensor."""

from collections.abc import Iterator
from typing import Literal

from rehead.attention import GroupedConfig
from rehead.checkpoint.huggingface.base import Family, Fields, Table, Weight, families, refuse, unusual
from rehead.config import GPTConfig

ACTIVATIONS: dict[str, Literal["gelu", "gelu_erf"]] = {
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_erf",
}
WRITTEN = {"gelu": "gelu_new", "gelu_erf": "gelu"}
NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
LINEARS = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}


class GPT2(Family):
    """GPT-2 with the names that transformers writes: the prefix `transformer.` for all tensors but the head.

    First-release files lack the prefix, and transformers reads both; with `prefix=""` such files are written.
    """

    architecture = "GPT2LMHeadModel"

    def __init__(self, prefix: str = "transformer.") -> None:
        self.prefix = prefix

    def read(self, fields: Fields) -> GPTConfig:
        """Return the config that a config.json describes."""
        width, heads = fields.take("n_embd", int), fields.take("n_head", int)
        n_layer = fields.layers("n_layer")
        activation = fields.expect("activation_function", *ACTIVATIONS)
        fields.expect("scale_attn_weights", True)
        fields.expect("scale_attn_by_inverse_layer_idx", False)
        fields.expect("add_cross_attention", False)
        attention = GroupedConfig(
            n_query_head=heads,
            head_dim=width // heads if heads > 0 else 0,
            attn_pdrop=fields.take("attn_pdrop", float, 0.1),
            qkv_bias=True,
            o_bias=True,
        )
        config = GPTConfig(
            vocab_size=fields.take("vocab_size", int),
            block_size=fields.take("n_positions", int, 1024),
            n_embd=width,
            attention=(attention,) * n_layer,
            learned_positions=True,
            norm="layernorm",
            norm_eps=fields.take("layer_norm_epsilon", float, 1e-5),
            mlp=ACTIVATIONS[activation],
            n_hidden=fields.take("n_inner", int, 4 * width, null=4 * width),
            mlp_bias=True,
            tie_embeddings=fields.take("tie_word_embeddings", bool, True),
            embd_pdrop=fields.take("embd_pdrop", float, 0.1),
            resid_pdrop=fields.take("resid_pdrop", float, 0.1),
        )
        fields.finish()
        return config

    def write(self, config: GPTConfig) -> Table:
        """Return the config.json of a model."""
        first = config.attention[0]
        like = GroupedConfig(
            n_query_head=first.n_query_head if isinstance(first, GroupedConfig) else 1,
            head_dim=first.head_dim if isinstance(first, GroupedConfig) else 1,
            attn_pdrop=first.attn_pdrop,
            qkv_bias=True,
            o_bias=True,
        )
        refuse(
            {
                "attention (it has MHA with biases and no rope or window)": set(config.attention) != {like},
                "head_dim": like.head_dim * like.n_query_head != config.n_embd,
                "learned_positions=False": not config.learned_positions,
                "norm": config.norm != "layernorm",
                "scales": config.scaled,
                **unusual(config),
                "mlp": config.mlp not in WRITTEN or not config.mlp_bias,
            },
            self.architecture,
        )
        return {
            "architectures": [self.architecture],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.block_size,
            "n_ctx": config.block_size,
            "n_embd": config.n_embd,
            "n_layer": config.n_layer,
            "n_head": like.n_query_head,
            "n_inner": config.n_hidden,
            "activation_function": WRITTEN[config.mlp],
            "layer_norm_epsilon": config.norm_eps,
            "attn_pdrop": like.attn_pdrop,
            "embd_pdrop": config.embd_pdrop,
            "resid_pdrop": config.resid_pdrop,
            "tie_word_embeddings": config.tie_embeddings,
        }

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Yield all tensors; linear layers are stored as inputs x outputs."""
        yield Weight(theirs=f"{self.prefix}wte.weight", ours=("embed_tokens.weight",))
        yield Weight(theirs=f"{self.prefix}wpe.weight", ours=("embed_positions.weight",))
        if not config.tie_embeddings:
            yield Weight(theirs="lm_head.weight", ours=("head.weight",))
        for end in ("weight", "bias"):
            yield Weight(theirs=f"{self.prefix}ln_f.{end}", ours=(f"norm.{end}",))
            for index in range(config.n_layer):
                theirs, ours = f"{self.prefix}h.{index}", f"layers.{index}"
                for name, norm in NORMS.items():
                    yield Weight(theirs=f"{theirs}.{name}.{end}", ours=(f"{ours}.{norm}.{end}",))
                for name, parts in LINEARS.items():
                    yield Weight(
                        theirs=f"{theirs}.{name}.{end}",
                        ours=tuple(f"{ours}.{part}.{end}" for part in parts),
                        transposed=end == "weight",
                    )

    def canonical_name(self, name: str) -> str | None:
        """Return the name with its prefix, which first-release files lack; None for the causal mask."""
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return None
        return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


families.add("gpt2")(GPT2())
