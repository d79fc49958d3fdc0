"""Converts a GGUF file to a stock Hugging Face folder."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from rehead.checkpoint.files.deferred import map_deferred
from rehead.checkpoint.files.writing import json_text
from rehead.checkpoint.gguf.file import File
from rehead.checkpoint.gguf.names import read_config, read_weights
from rehead.checkpoint.gguf.origin import card_of
from rehead.checkpoint.gguf.sampling import generation_of
from rehead.checkpoint.gguf.tokenizer import Vocabulary
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.base import families
from rehead.checkpoint.own import assign
from rehead.errors import InvalidInput
from rehead.model import skeleton


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Facts about an imported model."""

    architecture: str
    """The stock class, such as LlamaForCausalLM."""
    parameters: int
    types: dict[str, int]
    """Number of tensors of the file by their type in ggml."""
    vocab_size: int
    chat_template: bool
    """Whether the file has one; it is copied and never run."""


def import_file(path: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Imported:
    """Write a GGUF file of llama.cpp as a folder that `transformers` and rehead load.

    Quantised weights are dequantised by the package `gguf` to float32 and then rounded to `dtype`. The folder
    is published atomically. Raises InvalidInput or IntegrityError naming the part that cannot be read.
    """
    file = File(path)
    table, config = read_config(file)
    vocabulary = Vocabulary(file, config.vocab_size)
    model = skeleton(config)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    weights = {
        name: map_deferred(lambda numbers, name=name: _rounded(numbers, dtype, f"{path}: {name}"), weight)
        for name, weight in read_weights(file, config, shapes).items()
    }
    assign(model, weights, str(path), in_memory=False)
    files, special = vocabulary.files(config.block_size) | card_of(file.facts), vocabulary.special_ids()
    if sampling := generation_of(file.facts):
        files["generation_config.json"] = json_text(sampling | special)
    stock.export(model, folder, families[table["model_type"]], files, special)
    return Imported(
        architecture=families[table["model_type"]].architecture,
        parameters=sum(weight.numel() for weight in model.parameters()),
        types=dict(Counter(entry.type for entry in file.entries.values()).most_common()),
        vocab_size=config.vocab_size,
        chat_template="chat_template.jinja" in files,
    )


def _rounded(numbers: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Return the numbers in `dtype`. Raises InvalidInput for those beyond its range."""
    rounded = numbers.to(dtype)
    if not numbers.is_meta and not rounded.isfinite().all():
        raise InvalidInput(f"{where} has numbers beyond {str(dtype)[6:]}: use bf16 or fp32.")
    return rounded
