"""The part that Llama-like families share: norms, a gated MLP, rope, and the names of sizes and weights."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.checkpoint.huggingface.base import Family, Fields, Table, Weight, families, refuse, unusual
from rehead.checkpoint.huggingface.experts import expert_names
from rehead.checkpoint.huggingface.rope import RopeKeys, read_rope, write_rope
from rehead.config import GPTConfig

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = {
    "pre": (
        "input_layernorm",  # before attention
        "post_attention_layernorm",  # before the MLP
    ),
    "post": (
        "post_self_attn_layernorm",  # on attention's output, before it is added to the residual stream
        "post_mlp_layernorm",  # on the MLP's output, before it is added
    ),
}
"""Norms of a layer for each `norm_position`, by their names in `Block`; "both" has all four."""
ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
LLAMA: Table = {"norm": "rmsnorm", "mlp": "swiglu", "learned_positions": False}
A = TypeVar("A", bound=GroupedConfig | LatentConfig)


class Sizes(NamedTuple):
    """The sizes in config.json on which the attention depends."""

    width: int
    length: int
    n_query_head: int
    n_layer: int
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """Width of a head if config.json does not give it."""
        return self.width // self.n_query_head if self.n_query_head > 0 else 0


class Decoder(Family, Generic[A]):
    """A family whose layers have attentions of one class, `attention`.

    `tied`, `norm_eps` and the fields of `rope` are the defaults for missing keys in config.json. Except for Phi-3's,
    these classes have no field for dropout outside the attention, so it is lost.
    """

    attention: type[A]
    attention_words: ClassVar[str]
    """The name of the attention in an error message."""
    tied: ClassVar[bool] = False
    norm_eps: ClassVar[float] = 1e-6
    rope: ClassVar[RopeKeys] = RopeKeys()
    activation: ClassVar[str] = "hidden_act"
    block: ClassVar[Table] = {}
    """Fields of GPTConfig that all models of this family have, other than Llama's."""
    says: ClassVar[tuple[str, ...]] = ()
    """Fields of `base.BLOCK` for which config.json has a key."""
    names: ClassVar[dict[str, str]] = {}
    """Their names of a layer's modules, by ours; ours of the same name are stacked in one tensor."""
    sizes: ClassVar[dict[str, int]] = {}
    """The class's defaults for sizes that published files leave out."""

    def read(self, fields: Fields) -> GPTConfig:
        """Return the config that a config.json describes."""
        block = LLAMA | self.block
        fields.expect(self.activation, ACTIVATIONS[block["mlp"]])
        sizes = Sizes(
            width=fields.take("hidden_size", int),
            length=self.size(fields, "max_position_embeddings"),
            n_query_head=self.size(fields, "num_attention_heads"),
            n_layer=fields.layers("num_hidden_layers"),
            norm_eps=fields.take("rms_norm_eps", float, self.norm_eps),
        )
        shared = {
            "n_query_head": sizes.n_query_head,
            "attn_pdrop": fields.take("attention_dropout", float, 0.0),
            "rope": self.read_rope(fields, sizes.length),
        }
        model = {
            "vocab_size": self.size(fields, "vocab_size"),
            "block_size": sizes.length,
            "n_embd": sizes.width,
            "attention": tuple(self.layers(fields, sizes, shared)),
            **block,
            "norm_eps": sizes.norm_eps,
            "n_hidden": fields.take("intermediate_size", int),
            "tie_embeddings": fields.take("tie_word_embeddings", bool, self.tied),
        }
        config = GPTConfig(**model, **self.extra_config(fields, sizes))
        fields.finish()
        return config

    def size(self, fields: Fields, name: str) -> int:
        """Return a size; a missing one is the class's default, if published files leave it out."""
        found: int = fields.take(name, int, self.sizes.get(name, ...))
        return found

    def read_rope(self, fields: Fields, length: int) -> RopeConfig:
        """Return the rotary embedding of a model of `length` positions."""
        return read_rope(fields, length, self.rope)

    @abstractmethod
    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[A]:
        """Return the attention of every layer. `shared` are its fields that all classes read in the same way."""

    @abstractmethod
    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the other fields of GPTConfig: `mlp_bias`, and those of this family alone."""

    def write(self, config: GPTConfig) -> Table:
        """Return the config.json of a model. `rms_norm_eps` is that of the residual stream."""
        first = config.attention[0]
        refused = {
            self.attention_words: not all(type(layer) is self.attention for layer in config.attention),
            **unusual(config, *self.says, *self.block),
            **{name: getattr(config, name) != value for name, value in (LLAMA | self.block).items()},
        }
        if isinstance(first, self.attention):
            refused |= self.unsupported(config, first)
        refuse(refused, self.architecture)
        assert isinstance(first, self.attention)
        return {
            "architectures": [self.architecture],
            "model_type": families.name_of(self),
            "vocab_size": config.vocab_size,
            "hidden_size": config.n_embd,
            "intermediate_size": config.n_hidden,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": first.n_query_head,
            **self.attention_json(first),
            self.activation: ACTIVATIONS[config.mlp],
            "max_position_embeddings": config.block_size,
            "rms_norm_eps": config.norm_eps,
            "attention_dropout": first.attn_pdrop,
            "tie_word_embeddings": config.tie_embeddings,
            **self.write_rope(config),
            **self.extra_json(config, first),
        }

    def write_rope(self, config: GPTConfig) -> Table:
        """Return the keys of the rotary embedding: that of the first layer that has one."""
        ropes = [layer.rope for layer in config.attention if layer.rope is not None]
        return write_rope(ropes[0] if ropes else RopeConfig(), config.block_size, self.rope)

    @abstractmethod
    def unsupported(self, config: GPTConfig, first: A) -> dict[str, bool]:
        """Return the properties that this class cannot represent, by name in the error; True if the model has one."""

    @abstractmethod
    def attention_json(self, first: A) -> Table:
        """Return the sizes of the attention."""

    @abstractmethod
    def extra_json(self, config: GPTConfig, first: A) -> Table:
        """Return the keys that only this family has."""

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Yield all tensors. Their names are ours with the prefix `model.`, except for the head."""
        yield Weight(theirs="model.embed_tokens.weight", ours=("embed_tokens.weight",))
        yield Weight(theirs="model.norm.weight", ours=("norm.weight",))
        if not config.tie_embeddings:
            yield Weight(theirs="lm_head.weight", ours=("head.weight",))
        for index, layer in enumerate(config.attention):
            assert isinstance(layer, self.attention)
            position = config.norm_position
            norms = [norm for at, names in NORMS.items() if position in (at, "both") for norm in names]
            names = [f"{part}.weight" for part in norms]
            names += self.mlp_weights(config, index)
            names += [f"self_attn.{name}" for name in self.attention_weights(layer)]
            stacked: dict[str, list[str]] = {}
            for name in names:
                module, _, end = name.rpartition(".")
                stacked.setdefault(f"{self.names.get(module, module)}.{end}", []).append(name)
            for theirs, ours in stacked.items():
                yield Weight(
                    theirs=f"model.layers.{index}.{theirs}",
                    ours=tuple(f"layers.{index}.{name}" for name in ours),
                    rows=self.rows(layer, theirs),
                )

    def mlp_weights(self, config: GPTConfig, index: int) -> list[str]:
        """Return the names of the weights and biases of the MLP of a layer, or of its experts."""
        if config.experts is not None and index in config.experts.layers:
            return list(expert_names(config.experts))
        names = [f"{part}.weight" for part in MLP]
        return names + ([f"{part}.bias" for part in MLP] if config.mlp_bias else [])

    def rows(self, layer: A, theirs: str) -> tuple[int, ...]:
        """Return how many rows each of our weights has in the tensor `theirs`; () if they have equally many."""
        return ()

    @abstractmethod
    def attention_weights(self, layer: A) -> list[str]:
        """Return the names of the weights and biases of one attention."""
