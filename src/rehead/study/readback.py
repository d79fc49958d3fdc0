"""Reads an exported folder back with other software, and compares it with the source model."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rehead import checkpoint
from rehead.data import Ids
from rehead.model import LanguageModel

MOST_TOKENS = 512


@torch.no_grad()
def read_back(source: LanguageModel, folder: Path, ids: Ids) -> dict[str, Any]:
    """Compare the logits of the stock `folder` with those of `source` on the first tokens of `ids`.

    `reader` is transformers if it is installed, otherwise rehead. `max_error` is the largest difference of
    two logits, `relative_error` that divided by the largest logit of the source, and `same_choice` the share
    of tokens whose likeliest successor is the same.
    """
    length = min(MOST_TOKENS, source.config.context_limit or MOST_TOKENS, len(ids))
    tokens = torch.from_numpy(ids[:length].astype("int64"))[None]
    ours = source.eval()(tokens.to(source.device)).float().cpu()
    reader, theirs = _logits(folder, tokens)
    error = float((ours - theirs).abs().max())
    return {
        "reader": reader,
        "architecture": json.loads((folder / "config.json").read_text())["architectures"][0],
        "tokens": length,
        "max_error": error,
        "relative_error": error / float(ours.abs().max()),
        "same_choice": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    }


def _logits(folder: Path, tokens: Tensor) -> tuple[str, Tensor]:
    """Return the name of the reader, and its logits (1, L, vocab)."""
    if find_spec("transformers") is not None:
        try:
            return _of_transformers(folder, tokens)
        except Exception as error:  # such as a version that lacks the class of this model
            warnings.warn(
                f"the installed transformers cannot read {folder} ({str(error)!r:.100}): rehead reads it back",
                stacklevel=2,
            )
    return "rehead", checkpoint.load(folder).eval()(tokens).float()


def _of_transformers(folder: Path, tokens: Tensor) -> tuple[str, Tensor]:
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return f"transformers {transformers.__version__}", model.eval()(tokens).logits.float()
