"""A model folder as one that other software loads: stock classes, their names, a card."""

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from rehead.attention import LatentConfig
from rehead.checkpoint import Family, publish, read_at
from rehead.checkpoint.companions import TOKENIZER_CONFIG
from rehead.checkpoint.hub import CARD
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.gpt2 import GPT2
from rehead.checkpoint.own import read_config, stored_dtype
from rehead.config import GPTConfig
from rehead.conversion.arguments import require_apart
from rehead.conversion.certificate import CERTIFICATE, Certificate
from rehead.conversion.export.card import Card
from rehead.conversion.export.computed import not_computed
from rehead.conversion.export.deepseek import for_every_engine, to_deepseek
from rehead.conversion.export.engines import ENGINES, Engine
from rehead.conversion.export.fit import SERVERS, Asked, architecture_of, require_fit
from rehead.conversion.export.storable import LOSING, has_identity_norm, lost_by, require_wide
from rehead.conversion.finite import require_finite
from rehead.conversion.history import after, exported_of
from rehead.conversion.origin import Origin
from rehead.conversion.page import PAGE, page
from rehead.conversion.source import Source
from rehead.measure.stored import Storage
from rehead.model import LanguageModel
from rehead.system.allocator import return_freed_memory
from rehead.tokenizer import open_model

log = logging.getLogger("rehead")


def export_folder(
    source: Path,
    destination: Path,
    kind: str = "auto",
    engine: Engine | None = None,
    name: str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[str, Certificate | None]:
    """Write the model in `source` as a stock folder of family `kind`; return its class and any new certificate.

    `auto` takes the first family that can represent all of the model or, without one, DeepSeek's, to which other
    models convert exactly: for transformers with any rope or none, for vLLM fewer. Without an `engine`, a converted
    model is one that vLLM takes, and a warning names what vLLM or SGLang compute differently. The card calls the
    model `name`, by default as the folder. Weights have `dtype`, by default the source's. Raises ConfigError naming
    what the class or the engine cannot represent and the ways out, NumericError for weights that are not finite.
    """
    require_apart(source, destination)
    return_freed_memory()
    with publish(destination) as aside, tempfile.TemporaryDirectory(dir=aside) as scratch:
        _require_fit(source, Asked.of(kind, engine), dtype)
        opened = open_model(source, dtype=dtype, in_memory=False)
        opened.tell_unread()
        before, origin = exported_of(source, opened.folder), Origin.read(source, opened.folder)
        texts, keys = opened.texts(), opened.tokenizer_keys()
        opened.require_standing()
        require_finite(opened.model)
        if dtype == torch.bfloat16 and stored_dtype(opened.folder) != dtype:
            log.warning(
                "the weights are rounded to bfloat16: `rehead check %s` measures what that changes.", source
            )
        read = Source(opened.model, opened.folder)
        model, family, certificate = as_stock(opened.model, Asked.of(kind, engine), Path(scratch))
        assert isinstance(model.config, GPTConfig)
        certificate = None if certificate is None else after(before, certificate)
        card = Card(
            name=name or destination.name,
            architecture=family.architecture,
            config=model.config,
            origin=origin,
            before=before,
            made=certificate,
            identity_norm=has_identity_norm(model),
            lost=_lost(model),
            has_tokenizer=opened.tokenizer is not None,
            dtype=str(model.head.weight.dtype).removeprefix("torch."),
        )
        files = texts | {CARD: card.text()}
        files.pop(TOKENIZER_CONFIG, None)  # the class has one of its own
        if (last := certificate or before) is not None:
            files |= {CERTIFICATE: last.to_json(), PAGE: page(last)}
        stock.write(model, aside, family, files, opened.special, keys)
        read.require_unchanged()
    return family.architecture, certificate


def _require_fit(source: Path, asked: Asked, dtype: torch.dtype | None) -> None:
    """Refuse what the class or the engine cannot represent, before any weights are read."""
    found = require_fit(read_at(source, read_config), asked)
    if found.converted:
        require_wide(dtype or read_at(source, stored_dtype))


def _lost(model: LanguageModel) -> Mapping[str, Mapping[Storage, float]]:
    """Return the shares of rows that smaller number formats lose, and warn of them."""
    lost = lost_by(model, tuple(LOSING))
    if lost:
        names = ", ".join(name.removesuffix(".weight") for name in lost)
        kinds = [words for kind, words in LOSING.items() if any(shares.get(kind) for shares in lost.values())]
        log.warning(
            "keep this export in bfloat16 or float32, or measure with `rehead check` what smaller formats cost: %s "
            "would lose rows of %s, whose numbers are very small or very large. Its README.md says which.",
            " and ".join(kinds),
            names,
        )
    return lost


def as_stock(
    model: LanguageModel, asked: Asked, scratch: Path
) -> tuple[LanguageModel, Family, Certificate | None]:
    """Return the model as one of the first family that can represent it, or converted to DeepSeek's if that is asked.

    Raises ConfigError naming what the class or the engine cannot represent, and the ways out.
    """
    certificate, engine = None, asked.engine
    found = require_fit(model.config, asked)
    family = found.family
    if found.converted:
        model, certificate = to_deepseek(model, engine, scratch)
    else:
        if family.deepseek_kernels and engine != "transformers":
            model = for_every_engine(model)
        assert isinstance(model.config, GPTConfig)
        first = model.config.attention[0]
        if engine is None and isinstance(first, LatentConfig) and first.down_bias:
            log.warning(
                "vLLM, SGLang and llama.cpp leave out the biases of this MLA: serve it with transformers or mlx-lm."
            )
        if engine is None:
            _warn_of_servers(model.config, family)
        if engine == "llama.cpp" and not isinstance(first, LatentConfig) and architecture_of(family) is None:
            log.warning(
                "what llama.cpp computes of %s was never compared: compare its predictions before you serve it.",
                family.architecture,
            )
    if engine == "mlx" and isinstance(family, GPT2):
        family = GPT2(prefix="")  # the names of weights that mlx-lm reads
    return model, family, certificate


def _warn_of_servers(config: GPTConfig, family: Family) -> None:
    """Warn of what vLLM and SGLang compute otherwise of a class."""
    for engine in SERVERS:
        if found := [name for name, bad in not_computed(config, family, engine).items() if bad]:
            log.warning(
                "%s's %s does not compute this model as transformers does (%s): serve it with another engine. "
                "--for %s refuses it.",
                ENGINES[engine].name,
                family.architecture,
                "; ".join(found),
                engine,
            )
