"""A decoder layer: attention and MLP, each with its norms and its residual connection."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import AttentionConfig, LayerCache
from rehead.attention.program import Add, Norm, Program, Scale
from rehead.attention.slot import Slot
from rehead.config import GPTConfig
from rehead.model.experts import MixtureOfExperts
from rehead.model.mlp import MLPS
from rehead.nn.dropout import Dropout
from rehead.nn.norm import NORMS


class Block(nn.Module):
    """x + scale * attention(norm x), then x + scale * mlp(norm x), where `norm_position` is "pre".

    With "post" the norms are on the outputs of attention and MLP, with "both" in all four places; missing norms are
    Identity. Norms have Llama's names in Hugging Face, on outputs GLM-4's. With `parallel_residual` both read x.
    """

    def __init__(self, config: GPTConfig, attention: AttentionConfig, *, has_experts: bool = False) -> None:
        super().__init__()
        before, after = config.norm_position != "post", config.norm_position != "pre"

        def norm(*, exists: bool) -> nn.Module:
            return NORMS[config.norm](config.n_embd, config.norm_eps) if exists else nn.Identity()

        self.input_layernorm = norm(exists=before)  # before attention
        self.self_attn = attention.build(config.n_embd)
        self.post_self_attn_layernorm = norm(exists=after)  # on attention's output
        self.post_attention_layernorm = norm(exists=before)  # before the MLP
        mlp = MLPS[config.mlp]
        self.mlp = MixtureOfExperts(config, mlp) if has_experts else mlp(config)
        self.post_mlp_layernorm = norm(exists=after)  # on the MLP's output
        self.resid_dropout = Dropout(config.resid_pdrop)
        self.scale, self.is_parallel = config.residual_scale, config.parallel_residual

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        positions: Int[Tensor, "#B L"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Apply attention and MLP, each with its residual connection."""
        attended = self.self_attn(self.input_layernorm(x), positions=positions, cache=cache)
        after = self._add(x, self.post_self_attn_layernorm(attended))
        hidden = self.mlp(self.post_attention_layernorm(x if self.is_parallel else after))
        return self._add(after, self.post_mlp_layernorm(hidden))

    def lower(self, program: Program, x: Slot, layer: int) -> Slot:
        """Append the operations of one token."""

        def normed(x: Slot, norm: nn.Module) -> Slot:
            return x if isinstance(norm, nn.Identity) else program.add(Norm(x, norm))

        attention_reads = normed(x, self.input_layernorm)
        mlp_reads = normed(x, self.post_attention_layernorm) if self.is_parallel else None
        if mlp_reads is x:  # to which the attention's output is added before
            mlp_reads = program.add(Scale(x, 1.0))
        attended = program.call(self.self_attn, attention_reads, x.width, layer)
        x = program.add(Add(normed(attended, self.post_self_attn_layernorm), x, self.scale))
        hidden = program.call(self.mlp, mlp_reads or normed(x, self.post_attention_layernorm), x.width)
        return program.add(Add(normed(hidden, self.post_mlp_layernorm), x, self.scale))

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        """Add a scaled update to the residual stream, with dropout."""
        update = self.resid_dropout(update)
        return x + (update if self.scale == 1 else update * self.scale)
