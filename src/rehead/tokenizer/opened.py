"""A model together with its tokenizer and the ids of its special tokens, from one folder."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rehead.checkpoint import load, read_at
from rehead.checkpoint.companions import (
    MARKS,
    NAMED,
    TOKENIZER_CONFIG,
    companions,
    json_table,
    special_tokens,
)
from rehead.checkpoint.files.opened import changed
from rehead.checkpoint.find import path_of
from rehead.checkpoint.huggingface.stock import special_ids
from rehead.model import LanguageModel
from rehead.tokenizer.tokenizer import Tokenizer
from rehead.tokenizer.unread import FILE, MADE, missing, unread

log = logging.getLogger("rehead")


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """The contents of a model folder. `special` are the ids that begin, end and pad a text, by their config keys."""

    folder: Path
    model: LanguageModel
    tokenizer: Tokenizer | None
    special: dict[str, Any]

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises InvalidInput where the folder has none."""
        if self.tokenizer is None:
            raise missing(self.folder / FILE)
        return self.tokenizer

    def require_standing(self) -> None:
        """Raise IntegrityError if the folder is gone, dropped by its run: what was not found may have been there.

        The weights can still be read.
        """
        if not self.folder.exists():
            raise changed(self.folder)

    def tell_unread(self) -> None:
        """Warn of a tokenizer in files that rehead does not read, which a model made of this one will lack."""
        config = json_table(self.folder / TOKENIZER_CONFIG)
        found = unread(self.folder) + [TOKENIZER_CONFIG] * bool(config)
        if self.tokenizer is None and found:
            log.warning(
                "the tokenizer of %s (%s) is not passed on: rehead reads tokenizer.json. %s",
                self.folder,
                ", ".join(found),
                MADE,
            )
        elif (
            self.tokenizer is not None and config.get("add_bos_token") is True and self.tokenizer.bos is None
        ):
            log.warning(
                "tokenizer_config.json of %s says add_bos_token=true, but its tokenizer.json adds none. rehead adds "
                "none, as transformers 5 does; earlier releases and other engines may.",
                self.folder,
            )

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text; empty if the folder names none."""
        named = self.special.get("eos_token_id", [])
        return frozenset(id for id in (named if isinstance(named, list) else [named]) if type(id) is int)

    def mark(self, name: str) -> int | None:
        """Return the id that begins (`bos`), ends (`eos`) or pads (`pad`) a text, or stands for unknown ones (`unk`).

        As in `transformers`, it is the token that tokenizer_config.json names (`special_tokens`) or, where that has no
        such key, the id in the model's config.
        """
        table = special_tokens(self.folder)
        if self.tokenizer is not None and f"{name}_token" in table:
            named = table[f"{name}_token"]
            named = named.get("content") if isinstance(named, dict) else named
            return self.tokenizer.id_of(named) if isinstance(named, str) else None
        ids = self.special.get(f"{name}_token_id")
        first = next(iter(ids), None) if isinstance(ids, list) else ids
        return first if type(first) is int and 0 <= first < self.model.config.vocab_size else None

    def special_ids(self) -> dict[str, Any]:
        """Return `special` with the tokens that tokenizer_config.json names before the other ones of their kind."""
        found = dict(self.special)
        for name in MARKS:
            key, first = f"{name}_token_id", self.mark(name)
            if first is not None:
                others = found.get(key, [])
                others = others if isinstance(others, list) else [others]
                found[key] = [first, *(id for id in others if id != first)]
        return found

    def tokenizer_keys(self) -> dict[str, str | None]:
        """Return what is kept of tokenizer_config.json: those tokens (`bos_token`, ...) and any `padding_side`."""
        tokens = {name: self.tokenizer.token(self.mark(name)) for name in NAMED} if self.tokenizer else {}
        named = special_tokens(self.folder)
        side = json_table(self.folder / TOKENIZER_CONFIG).get("padding_side")
        marks = {
            f"{name}_token": token or None
            for name, token in tokens.items()
            if token or named.get(f"{name}_token", "") is None
        }
        return marks | ({"padding_side": side} if side in ("left", "right") else {})

    def texts(self) -> dict[str, str]:
        """Return the tokenizer, chat template and sampling settings that the folder has, as files by name."""
        tokenizer = {} if self.tokenizer is None else {FILE: self.tokenizer.to_json()}
        return tokenizer | companions(self.folder)


def open_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    in_memory: bool = True,
) -> OpenedModel:
    """Return the model at `path` with its tokenizer and special ids; for the arguments see `rehead.load`."""

    def read(folder: Path) -> OpenedModel:
        model = load(folder, device=device, dtype=dtype, in_memory=in_memory)
        tokenizer = Tokenizer.load(folder) if os.path.lexists(folder / FILE) else None
        special = special_ids(folder)
        opened = OpenedModel(folder=folder, model=model, tokenizer=tokenizer, special=special)
        opened.require_standing()
        return opened

    return read_at(path_of(path), read)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of whatever `rehead.load` takes, of a tokenizer.json, or of a folder with nothing else.

    `encode(text)` gives ids (N,), `decode(ids)` the text. Raises InvalidInput where there is none.
    """
    place = path_of(path)
    if place.is_file() or (place / FILE).is_file():
        return Tokenizer.load(place)
    return read_at(place, Tokenizer.load)
