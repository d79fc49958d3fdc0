"""A model folder as one file for llama.cpp."""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rehead import __version__
from rehead.checkpoint import own, read_at
from rehead.checkpoint.companions import GENERATION, TEMPLATE, companions
from rehead.checkpoint.files.publish import publish_file
from rehead.checkpoint.gguf.architectures import Architecture, architectures
from rehead.checkpoint.gguf.file import package
from rehead.checkpoint.gguf.names import names
from rehead.checkpoint.gguf.origin import KEYS
from rehead.checkpoint.gguf.sampling import facts_of
from rehead.checkpoint.gguf.vocabulary import tell_unwritten, vocabulary
from rehead.checkpoint.gguf.writing import FILE_TYPES, Type, type_of, write_file
from rehead.checkpoint.hub import HUB
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.base import families
from rehead.config import GPTConfig
from rehead.conversion.arguments import require_apart
from rehead.conversion.certificate import Certificate
from rehead.conversion.export.fit import Asked, require_fit
from rehead.conversion.export.folder import as_stock
from rehead.conversion.export.storable import LOSING, lost_by
from rehead.conversion.finite import require_finite
from rehead.conversion.history import after, exported_of
from rehead.conversion.origin import REPOSITORY, Origin
from rehead.conversion.source import Source
from rehead.errors import UsageError
from rehead.model import LanguageModel
from rehead.system.allocator import return_freed_memory
from rehead.tokenizer import OpenedModel, load_tokenizer, open_model

log = logging.getLogger("rehead")
TYPES: dict[str, Type] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
STORED: dict[torch.dtype, Type] = {torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class Written:
    """Facts about a GGUF file."""

    architecture: str
    """The stock class that it is one of."""
    types: dict[str, int]
    """Number of tensors by their type in ggml."""
    certificate: Certificate | None
    """That of a conversion to a class that llama.cpp computes, if one was needed."""


def export_gguf(source: Path, file: Path, dtype: str | None = None) -> Written:
    """Write the model in `source` as a GGUF file, with matrices in `dtype` or that of the weights.

    The file is published atomically. Raises ConfigError naming what llama.cpp computes otherwise, NumericError for
    weights that are not finite.
    """
    if file.suffix != ".gguf":
        raise UsageError(f"{str(file)!r}: --format gguf writes a file. Give a name that ends in .gguf.")
    package()
    require_apart(source, file)
    return_freed_memory()
    with publish_file(file) as place, tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        opened = open_model(source, dtype=_dtype_to_read(source), in_memory=False)
        passed, before = companions(opened.folder), exported_of(source, opened.folder)
        origin = Origin.read(source, opened.folder)
        opened.require_standing()
        require_finite(opened.model)
        read = Source(opened.model, opened.folder)
        model, family, certificate = as_stock(opened.model, Asked.of("gguf"), Path(scratch))
        config, kind = model.config, architectures[families.name_of(family)]
        assert isinstance(config, GPTConfig)
        keys = {f"{kind.name}.{name}": value for name, value in kind.keys(config).items()}
        words = _vocabulary(opened, config, passed.get(TEMPLATE))
        asked = TYPES[dtype] if dtype else STORED.get(own.stored_dtype(opened.folder) or torch.float32, "F32")
        tensors, exact = _tensors(model, kind, stock.weights(model, family), _lost(model, asked))
        types = {name: type_of(name, tuple(weight.shape), asked, exact) for name, weight in tensors.items()}
        about = _about(before, file, family.architecture, asked, certificate)
        about |= _origin(origin) | facts_of(json.loads(passed.get(GENERATION, "{}")))
        facts = {"general.architecture": kind.name, **about, **keys, **words}
        write_file(place, facts, tensors, types)
        read.require_unchanged()
    return Written(
        architecture=family.architecture,
        types=dict(Counter(types.values()).most_common()),
        certificate=certificate,
    )


def _dtype_to_read(source: Path) -> torch.dtype | None:
    """Return the dtype to read weights in, None for their own; they are written in any.

    Raises ConfigError, before they are read, for what config.json or the tokenizer refuses.
    """
    config = read_at(source, own.read_config)
    found = require_fit(config, Asked.of("gguf"))
    vocabulary(load_tokenizer(source).to_json(), config.vocab_size, read_at(source, stock.special_ids))
    narrow = found.converted and read_at(source, own.stored_dtype) == torch.float16
    return torch.float32 if narrow else None  # for the identity norm of DeepSeek's class


def _tensors(
    model: LanguageModel, kind: Architecture, weights: Mapping[str, Tensor], lost: tuple[str, ...]
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the tensors of the file, and the names of those that the type asked for would lose."""
    assert isinstance(model.config, GPTConfig)
    named = names(kind.name, model.config.n_layer)
    tensors, exact = kind.computed(model.config), set()
    for theirs, weight in weights.items():
        for part, tensor in kind.tensors(theirs, weight, model.config):
            tensors[named(part)] = tensor
            if theirs.endswith(lost):
                exact.add(named(part))
    return tensors, exact


def _lost(model: LanguageModel, asked: Type) -> tuple[str, ...]:
    """Return the kinds of weights of a latent that the type asked for would lose, which stay F32."""
    names = tuple(lost_by(model, [kind for kind in LOSING if TYPES[kind] == asked]))
    if names:
        log.warning("%s stay F32: %s would lose their small numbers.", ", ".join(names), asked)
    return names


def _vocabulary(opened: OpenedModel, config: GPTConfig, template: str | None) -> dict[str, Any]:
    """Return the keys of the tokenizer, and the chat template, if the folder has one."""
    tokenizer = opened.require_tokenizer()
    words = vocabulary(tokenizer.to_json(), config.vocab_size, opened.special_ids())
    tell_unwritten(tokenizer.to_json())
    return words if template is None else words | {"tokenizer.chat_template": template}


def _about(
    before: Certificate | None, file: Path, architecture: str, asked: Type, made: Certificate | None
) -> dict[str, Any]:
    """Return the keys `general.*`, and the certificate of the last conversion."""
    about = {
        "general.type": "model",
        "general.name": file.stem,
        "general.description": f"A {architecture}, written by rehead {__version__}.",
        "general.file_type": FILE_TYPES[asked],
        "general.quantization_version": 2,
    }
    made = before if made is None else after(before, made)
    return about if made is None else about | {"rehead.certificate": made.to_json()}


def _origin(origin: Origin) -> dict[str, Any]:
    """Return the keys `general.*` of the licence and the base models."""
    facts: dict[str, Any] = {"general.license": origin.licence} if origin.licence else {}
    facts |= {KEYS[key]: value for key, value in origin.named}
    if origin.bases:
        facts["general.base_model.count"] = len(origin.bases)
    for index, base in enumerate(origin.bases):
        facts[f"general.base_model.{index}.name"] = base
        if REPOSITORY.fullmatch(base):
            facts[f"general.base_model.{index}.repo_url"] = HUB + base
        if origin.commit:
            facts[f"general.base_model.{index}.version"] = origin.commit
    return facts
