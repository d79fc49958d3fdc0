"""Files beside a model that rehead does not use but passes on: its chat template, and how other software samples."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from rehead.checkpoint.files.strict import strict_json, text_of
from rehead.checkpoint.huggingface.stock import LARGEST, special_ids

TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
TEMPLATES = "additional_chat_templates"
TOKENIZER_CONFIG, TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
MARKS = ("bos", "eos", "pad")
NAMED = (*MARKS, "unk")
"""What tokenizer_config.json names; no model's config names the last."""
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""How to sample: numbers of generation_config.json or, without that file, of config.json."""
NOT_PASSED = ("transformers_version", "_from_model_config", "cache_implementation", "cache_config")
"""Keys of generation_config.json that are about one model or one run of transformers; all others go along."""


def companions(folder: Path) -> dict[str, str]:
    """Return the files, by name, that a model made from this one needs beside it, as far as they exist."""
    return chat_template(folder) | _generation(folder) | _marks(folder)


def special_tokens(folder: Path) -> dict[str, Any]:
    """Return the special tokens that tokenizer_config.json names (`bos_token`, ...), null included.

    As in transformers, the older special_tokens_map.json goes before one without `added_tokens_decoder`.
    """
    table = json_table(folder / TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in table:
        table |= json_table(folder / TOKENS_MAP)
    return {key: table[key] for name in NAMED if (key := f"{name}_token") in table}


def _marks(folder: Path) -> dict[str, str]:
    """Return what tokenizer_config.json says of special tokens and padding."""
    kept = special_tokens(folder)
    if (side := json_table(folder / TOKENIZER_CONFIG).get("padding_side")) is not None:
        kept["padding_side"] = side
    return {TOKENIZER_CONFIG: json.dumps(kept, indent=2) + "\n"} if kept else {}


def chat_template(folder: Path) -> dict[str, str]:
    """Return the template that makes a text of a chat (Jinja, for other software), as a file by name, if there is one.

    It is chat_template.jinja or, as older folders have it, a string of tokenizer_config.json, or the `default` of
    several. A warning names the others, which have no place in one file.
    """
    file = folder / TEMPLATE
    _warn_of_others(folder, [one.stem for one in sorted((folder / TEMPLATES).glob("*.jinja"))], TEMPLATES)
    if os.path.lexists(file):
        return {TEMPLATE: text_of(file, LARGEST)}
    named = json_table(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(named, list):
        named = _default(folder, [one for one in named if isinstance(one, dict)])
    return {TEMPLATE: named} if isinstance(named, str) else {}


def _default(folder: Path, templates: list[dict[str, Any]]) -> object:
    """Return the template named `default`, if there is one; warn of the others."""
    others = [f"{one.get('name')}" for one in templates if one.get("name") != "default"]
    _warn_of_others(folder, others, f"chat_template in {TOKENIZER_CONFIG}")
    return next((one.get("template") for one in templates if one.get("name") == "default"), None)


def _warn_of_others(folder: Path, names: list[str], place: str) -> None:
    if names:
        shown = ", ".join(name[:40] for name in names)
        warnings.warn(
            f"{folder}: of its chat templates only the default is passed on, not {shown:.300}: copy {place} to use "
            "them",
            stacklevel=4,
        )


def _generation(folder: Path) -> dict[str, str]:
    """Return generation_config.json with the ids of special tokens, which may stand in config.json alone.

    Without the file, transformers reads these keys from a stock config.json, and is greedy unless they say otherwise.
    """
    ids, found = special_ids(folder), json_table(folder / GENERATION)
    mine = (*SAMPLING, *NOT_PASSED, *(f"{name}_token_id" for name in MARKS))
    others = {key: value for key, value in found.items() if key not in mine and value is not None}
    if not (folder / GENERATION).is_file():
        config = json_table(folder / "config.json")
        own = "format" in config
        found = {"do_sample": True, "temperature": 1.0} if own else {"do_sample": False} | config
    sampling = {key: found[key] for key in SAMPLING if isinstance(found.get(key), int | float)}
    told = sampling | others | ids
    return {GENERATION: json.dumps(told, indent=2) + "\n"} if told else {}


def json_table(file: Path) -> dict[str, Any]:
    """Return the table in a JSON file; an empty one if there is none."""
    found = strict_json(file, LARGEST) if os.path.lexists(file) else {}
    return found if isinstance(found, dict) else {}
