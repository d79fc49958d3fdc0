"""The names of fields and weights in a GGUF file, and their names in the stock classes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rehead.attention import GroupedConfig
from rehead.attention.rope_scaling import Llama3Scaling
from rehead.checkpoint.files.deferred import map_deferred
from rehead.checkpoint.files.shards import require_names
from rehead.checkpoint.gguf.file import File, package
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.config import GPTConfig
from rehead.errors import InvalidInput
from rehead.registry import nearest

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures of GGUF; each is also the name of a model family."""
FACTORS = (8.0, 16.0, 32.0)
"""Those of Llama 3.1 to 3.3."""
FREQUENCIES = "rope_freqs.weight"
"""The tensor of divisors of Llama 3.1's angles."""


def names(architecture: str, n_layer: int) -> Callable[[str], str]:
    """Return a function from a weight's name in a stock class to its name in a file, by the package's own table."""
    gguf = package()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, n_layer)

    def named(theirs: str) -> str:
        name = table.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert isinstance(name, str), theirs
        return name

    return named


def read_config(file: File) -> tuple[Table, GPTConfig]:
    """Return the config.json that a file's metadata describes, and the config rehead reads from it.

    Raises InvalidInput for an architecture, a key or a value that rehead does not know.
    """
    arch = file.facts.get("general.architecture")
    # Other keys change nothing that llama.cpp computes; quantisation tools add some under their own names.
    facts = {key: value for key, value in file.facts.items() if key.startswith((f"{arch}.", "adapter."))}
    if arch not in ARCHITECTURES:
        hint = nearest(str(arch), list(ARCHITECTURES))
        raise InvalidInput(f"{file.path}: general.architecture={arch!r:.80} is not read.{hint}")
    if file.facts.get("general.type", "model") != "model":
        raise InvalidInput(
            f"{file.path}: general.type={file.facts['general.type']!r:.80}: rehead reads whole models."
        )
    if file.facts.get("split.count", 0) not in (0, 1):
        raise InvalidInput(
            f"{file.path} is one of {file.facts['split.count']!r:.40} files: join them with `llama-gguf-split --merge`."
        )
    fields = _Own(facts, str(file.path), arch)
    table = _table(file, fields)
    fields.finish()
    return table, stock.read_config(table, str(file.path))


class _Own(Fields):
    """The keys of one architecture, without its name as prefix."""

    def __init__(self, table: Table, where: str, arch: str) -> None:
        super().__init__(table, where)
        self.arch = arch

    def take(self, name: str, kind: type, default: Any = ..., *, null: Any = ...) -> Any:
        """Return the value of a key, whose name is prefixed with the architecture."""
        return super().take(f"{self.arch}.{name}", kind, default, null=null)

    def finish(self) -> None:
        """Refuse keys that were not read."""
        for name, value in self.unread().items():
            self.refuse(name, value)


def _table(file: File, fields: _Own) -> Table:
    width, heads = fields.take("embedding_length", int), fields.take("attention.head_count", int)
    head_dim = fields.take("attention.key_length", int, width // heads if heads > 0 else 0)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.take(name, int, head_dim)) != head_dim:
            raise InvalidInput(
                f"{file.path}: {fields.arch}.{name}={value}, its heads are {head_dim} wide: no stock class can "
                "represent that."
            )
    if not fields.take("attention.causal", bool, True):
        raise InvalidInput(
            f"{file.path}: {fields.arch}.attention.causal=False: rehead reads models that generate text."
        )
    n_layer = fields.take("block_count", int)
    layers = {name.split(".")[1] for name in file.entries if "blk." in name}
    if layers != set(map(str, range(min(n_layer, len(file.entries))))):
        raise InvalidInput(
            f"{file.path}: {fields.arch}.block_count={n_layer}, its tensors are those of {len(layers)} layers."
        )
    if (embedding := file.entries.get("token_embd.weight")) is None:
        raise InvalidInput(f"{file.path} lacks token_embd.weight: it does not hold a whole model.")
    vocab_size = fields.take("vocab_size", int, embedding.shape[0])
    if vocab_size != embedding.shape[0]:
        raise InvalidInput(
            f"{file.path}: {fields.arch}.vocab_size={vocab_size}, token_embd.weight has {embedding.shape[0]} rows."
        )
    theta = fields.take("rope.freq_base", float, 10_000.0)
    table = {
        "architectures": [families[fields.arch].architecture],
        "model_type": fields.arch,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.take("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "num_hidden_layers": n_layer,
        "intermediate_size": fields.take("feed_forward_length", int),
        "max_position_embeddings": fields.take("context_length", int),
        "rms_norm_eps": fields.take("attention.layer_norm_rms_epsilon", float),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.entries,
        "rope_parameters": {"rope_theta": theta, **_scaling(file, fields, theta, head_dim)},
    }
    if fields.arch != "qwen2":
        table["attention_bias"] = "blk.0.attn_q.bias" in file.entries
    if fields.arch == "llama":
        table["mlp_bias"] = "blk.0.ffn_up.bias" in file.entries
    return table


def _scaling(file: File, fields: _Own, theta: float, head_dim: int) -> Table:
    """Return the scaling with transformers' keys: none, linear, or Llama 3.1's, which the file stores as a tensor."""
    kind = fields.take("rope.scaling.type", str, "linear")
    factor = fields.take("rope.scaling.factor", float, 0.0) or 1.0
    fields.take("rope.scaling.finetuned", bool, False)
    if kind not in ("none", "linear"):
        raise InvalidInput(
            f"{file.path}: {fields.arch}.rope.scaling.type={kind!r:.40}: rehead knows 'none', 'linear' here."
        )
    scaled = kind == "linear" and factor != 1
    if FREQUENCIES not in file.entries:
        return {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    divisors = file.read(FREQUENCIES).double().flatten()
    if len(divisors) == head_dim // 2 and divisors.max() >= 1 and theta > 0 and not scaled:
        angles = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        for factor in (
            float(divisors.max()),
            *FACTORS,
        ):  # the largest divisor is less if no pair turns slowly enough
            known = Llama3Scaling(factor=factor)
            if torch.allclose(known.scale(angles, theta), angles / divisors, rtol=1e-5, atol=0):
                return {"rope_type": "llama3", **vars(known)}
    raise InvalidInput(
        f"{file.path}: {FREQUENCIES} changes the angles differently from Llama 3.1: no stock class can represent that."
    )


def read_weights(file: File, config: GPTConfig, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return all weights under our names, deferred, in float32.

    `shapes` are those of our model. Raises InvalidInput naming tensors of the file that do not match them.
    """
    family = families[file.facts["general.architecture"]]
    named = names(file.facts["general.architecture"], config.n_layer)
    wanted = {named(weight.theirs): weight.ours[0] for weight in family.weights(config)}
    held = file.entries.keys() - {FREQUENCIES}
    require_names(file.path, held, wanted.keys(), "tensors", "metadata")
    weights: dict[str, Tensor] = {}
    for name, ours in wanted.items():
        if file.entries[name].shape != shapes[ours]:
            raise InvalidInput(
                f"{file.path}: {name} has shape {list(file.entries[name].shape)}, its metadata describes "
                f"{list(shapes[ours])}."
            )
        weights[ours] = file.deferred(name)
        if file.facts["general.architecture"] == "llama" and (".attn_q." in name or ".attn_k." in name):
            first = config.attention[0]
            assert isinstance(first, GroupedConfig)
            weights[ours] = map_deferred(partial(half_split, head_dim=first.head_dim), weights[ours])
    return weights


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of each query or key head from llama.cpp's pairs (2i, 2i + 1) to (i, i + E/2)."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(rows.shape)
