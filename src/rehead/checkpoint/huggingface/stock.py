"""Model folders of Hugging Face's own classes, read and written without their code."""

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from rehead.checkpoint.files.deferred import map_deferred
from rehead.checkpoint.files.publish import publish
from rehead.checkpoint.files.shards import Shards, require_names
from rehead.checkpoint.files.strict import strict_json
from rehead.checkpoint.files.writing import json_text, write_weights
from rehead.checkpoint.huggingface.base import Family, Fields, Table, Weight, families, require_plain
from rehead.config import GPTConfig, ModelConfig
from rehead.config.model import MAX_LAYERS
from rehead.errors import ConfigError, InvalidInput
from rehead.model import LanguageModel

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
LARGEST = 4 * 2**20
TOKENIZER: Table = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "padding_side": "left",
    "model_input_names": ["input_ids", "attention_mask"],
}
"""tokenizer_config.json for transformers' generic tokenizer class, which by default pads on the right, where no text
can be continued, and in earlier releases returns `token_type_ids`, which `generate` refuses."""
HEADS = ({"lm_head.weight"}, {"embed_out.weight"})
"""The name that a head has beside a tied embedding."""
NONE = "no format can represent this model as it is."


def is_known(kind: object) -> TypeGuard[str]:
    """Return True for the `model_type` of a family."""
    return isinstance(kind, str) and kind in families


def family_of(table: Table, where: str) -> Family:
    """Return the family that a config.json names."""
    kind = table.get("model_type")
    if is_known(kind):
        return families[kind]
    names = table.get("architectures")
    if kind is None and isinstance(names, list):
        for name in families:
            if families[name].architecture in names:
                raise InvalidInput(f'{where}: model_type is missing: add "model_type": "{name}" to it.')
    text = table.get("text_config")
    if isinstance(text, dict) and is_known(text.get("model_type")):
        raise InvalidInput(
            f"{where}: model_type {kind!r:.80} is multimodal: rehead reads text models, and only `plan` one that is a "
            "part (text_config). Save the text model by itself, with transformers."
        )
    raise InvalidInput(f"{where}: unknown model_type {kind!r:.80}. Known: {', '.join(sorted(families))}.")


def read_config(table: Table, where: str) -> GPTConfig:
    """Return the config that a stock config.json describes. Raises InvalidInput for quantised weights."""
    family = family_of(table, where)
    if found := quantised(table):
        raise InvalidInput(
            f"{where}: {found}: rehead reads weights of float32, bfloat16 and float16. Use the model from before its "
            "quantisation."
        )
    try:
        return family.read(Fields(table, where))
    except ConfigError as error:
        raise InvalidInput(f"{where}: {error}") from error


def quantised(table: Table) -> str:
    """Return what a config.json says of quantised weights; nothing for others."""
    found = table.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    return f"quantization_config{f' (quant_method {method!r:.30})' if method else ''}" if found else ""


def read_weights(folder: Path, table: Table, config: GPTConfig) -> dict[str, Tensor]:
    """Return all weights under our names, deferred.

    Raises InvalidInput naming tensors of the folder that are missing or have no place.
    """
    family = family_of(table, str(folder))
    shards = Shards(folder)
    require_plain(shards.entries, str(folder))
    later = _predicting(table, config, folder, shards.entries)
    stored = {
        known: name
        for name in shards.entries
        if not name.startswith(later) and (known := family.canonical_name(name)) is not None
    }
    wanted = {weight.theirs: weight for weight in family.weights(config)}
    head = stored.keys() - wanted.keys()
    # Of a shared tensor, save_model of safetensors keeps the first name.
    if config.tie_embeddings and head in HEADS:
        (embedding,) = (name for name, weight in wanted.items() if weight.ours == ("embed_tokens.weight",))
        if embedding not in stored:
            stored[embedding] = stored.pop(*head)
            head = set()
    if config.tie_embeddings and head in HEADS:
        require_names(folder, stored.keys() - head, wanted.keys(), "weights", "config")
        _require_tied(shards, stored, wanted, *head)
    else:
        require_names(folder, stored.keys(), wanted.keys(), "weights", "config")
    weights: dict[str, Tensor] = {}
    for theirs, weight in wanted.items():
        tensor = shards.deferred(stored[theirs])
        side = -1 if weight.transposed and tensor.dim() == 2 else 0
        parts = sum(weight.rows) or len(weight.ours) * weight.groups
        if not tensor.shape or (tensor.shape[side] != parts if weight.rows else tensor.shape[side] % parts):
            rule = f"{parts} rows" if weight.rows else f"{parts} equal parts"
            raise InvalidInput(f"{folder}: {theirs} has shape {list(tensor.shape)}, expected {rule}.")
        for index, name in enumerate(weight.ours):
            weights[name] = map_deferred(partial(_part, weight=weight, index=index), tensor)
    return weights


def _predicting(table: Table, config: GPTConfig, folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Return the name prefixes of layers that only predict a further token; warn if there are any.

    `num_nextn_predict_layers` counts those of DeepSeek-V3 after the model's own; transformers leaves them out, too.
    """
    n_more = table.get("num_nextn_predict_layers")
    more = range(min(n_more, MAX_LAYERS)) if type(n_more) is int else ()
    later = tuple(f"model.layers.{config.n_layer + index}." for index in more)
    if left_out := [name for name in names if name.startswith(later)]:
        warnings.warn(
            f"{folder}: left out {len(left_out)} weights for multi-token prediction "
            f"(num_nextn_predict_layers={n_more}), such as {left_out[0]:.100}: the model itself does not use them.",
            stacklevel=2,
        )
    return later


def _part(theirs: Tensor, weight: Weight, index: int) -> Tensor:
    """Return one of our weights from a tensor of theirs that holds several."""
    upright = theirs.mT if weight.transposed and theirs.dim() == 2 else theirs
    if weight.rows:
        return upright.split(weight.rows)[index].contiguous()
    grouped = upright.unflatten(0, (weight.groups, len(weight.ours), -1))
    return grouped[:, index].flatten(0, 1).contiguous()


def _whole(*ours: Tensor, weight: Weight) -> Tensor:
    """Return a tensor of theirs from all of our weights that it holds."""
    upright = torch.cat(ours) if len(ours) > 1 else ours[0]
    if weight.groups > 1:
        upright = torch.cat([part.unflatten(0, (weight.groups, -1)) for part in ours], dim=1).flatten(0, 1)
    return (upright.mT if weight.transposed and upright.dim() == 2 else upright).contiguous()


def export(
    model: LanguageModel, path: Path, family: Family, files: dict[str, str], special: Table | None = None
) -> None:
    """Write a folder that `transformers` loads as `family`, atomically."""
    with publish(path) as folder:
        write(model, folder, family, files, special)


def write(
    model: LanguageModel,
    folder: Path,
    family: Family,
    files: dict[str, str],
    special: Table | None = None,
    tokenizer: dict[str, str | None] | None = None,
) -> None:
    """Write the files of a stock folder and further `files`, such as tokenizer.json, into a folder being published.

    `special` are the ids of `special_ids`; a missing one is written as null, since the class has a default.
    `tokenizer` are further keys of tokenizer_config.json.
    Raises ConfigError if the class cannot represent the model.
    """
    assert isinstance(model.config, GPTConfig)
    dtype = str(model.head.weight.dtype).removeprefix("torch.")
    ids = dict.fromkeys(SPECIAL) | (special or {})
    table = family.write(model.config) | {"dtype": dtype} | ids
    if family.zeroes_padding:
        table["pad_token_id"] = None
    write_weights(folder, weights(model, family))
    generation = {"do_sample": True, "temperature": 1.0, **ids}
    texts = {"config.json": json_text(table), "generation_config.json": json_text(generation)}
    if "tokenizer.json" in files:
        own = TOKENIZER | {"model_max_length": model.config.block_size} | (tokenizer or {})
        texts["tokenizer_config.json"] = json_text(own)
    texts |= files
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def weights(model: LanguageModel, family: Family) -> dict[str, Tensor]:
    """Return all weights under the names and in the layout of the class, deferred if the model's are."""
    assert isinstance(model.config, GPTConfig)
    state = model.state_dict()
    return {
        weight.theirs: map_deferred(partial(_whole, weight=weight), *(state[name] for name in weight.ours))
        for weight in family.weights(model.config)
    }


def special_ids(folder: Path) -> Table:
    """Return the ids of the tokens that begin, end and pad a text, if the folder names them."""
    ids: Table = {}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            table = strict_json(folder / name, LARGEST)
            ids |= {
                key: table[key] for key in SPECIAL if isinstance(table, dict) and table.get(key) is not None
            }
    return ids


def fitting(config: ModelConfig, names: Sequence[str]) -> Family:
    """Return the first of these families that can represent all of a model. Raises ConfigError if none can."""
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"no stock class can represent a model of type {config.model_type}.")
    reason = ""
    for name in names:
        try:
            families[name].write(config)
        except ConfigError as error:
            reason = str(error)
            continue
        return families[name]
    raise ConfigError(reason if len(names) == 1 else NONE)


def _require_tied(shards: Shards, stored: dict[str, str], wanted: Iterable[str], head: str) -> None:
    """Refuse a stored head that differs from the embedding it is tied to."""
    embedding = next(name for name in wanted if "embed_" in name or ".wte." in name)
    if not torch.equal(shards.read(stored[head]), shards.read(stored[embedding])):
        raise InvalidInput(
            f"{shards.folder}: {head} differs from the embedding it is tied to: set "
            "tie_word_embeddings=false in config.json to use it."
        )
