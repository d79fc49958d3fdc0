"""rehead's own model folder: config.json, model.safetensors, generation_config.json, MANIFEST.json.

A tokenizer.json lies beside them when the model was trained here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rehead.checkpoint.find import read_at
from rehead.checkpoint.publish import MANIFEST, publish, verify
from rehead.config import ModelConfig, decode, encode
from rehead.errors import IntegrityError, InvalidInput
from rehead.model import LanguageModel, build

FORMAT = "rehead-1"
WEIGHTS = "model.safetensors"
LARGEST_CONFIG = 4 * 2**20


def save(
    model: LanguageModel,
    path: str | Path,
    *,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model folder; `files` are further texts to lay in it, such as tokenizer.json.

    The folder appears whole or not at all. Raises InvalidInput if `path` exists.
    """
    with publish(Path(path), overwrite=overwrite) as folder:
        write(model, folder, files or {})


def write(model: LanguageModel, folder: Path, files: Mapping[str, str]) -> None:
    """The files of a model folder, into a folder being published."""
    tied = {name for name, _ in model.named_parameters()}  # a shared tensor has one name here
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items() if k in tied}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = {"format": FORMAT, **encode(model.config), "dtype": str(model.head.weight.dtype)[6:]}
    limit = model.config.context_limit
    generation = {"do_sample": True, "temperature": 1.0} | ({"max_length": limit} if limit else {})
    texts = {"config.json": _json(config), "generation_config.json": _json(generation), **files}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def load(path: str | Path, *, device: torch.device | str = "cpu") -> LanguageModel:
    """The model in a model folder, or the newest good checkpoint of a run folder, in eval mode.

    Weights keep the dtype they were saved in. Raises InvalidInput for a folder that is no model and
    for weights that do not fit the config, IntegrityError for a damaged file.
    """

    def read(folder: Path) -> LanguageModel:
        if (folder / MANIFEST).exists():
            verify(folder)
        config = read_config(folder)
        with torch.device("meta"):
            model = build(config)
        _assign(model, _read_weights(folder / WEIGHTS), folder)
        return model

    return read_at(Path(path), read).to(device).eval()


def read_config(folder: Path) -> ModelConfig:
    """The config of a model folder, without its weights; or of its config.json itself."""
    path = folder if folder.suffix == ".json" else folder / "config.json"
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise InvalidInput(f"{path} has more than {LARGEST_CONFIG} bytes: that is no config.")
        text = path.read_text(encoding="utf-8")
        table = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except OSError as error:
        raise InvalidInput(
            f"{path}: {error.strerror}: expected a model folder with a config.json."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}.") from error
    if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
        raise InvalidInput(
            f"{path} does not say format={FORMAT!r}: it was not written by this version of rehead."
        )
    table.pop("dtype", None)
    config = decode(ModelConfig, table, str(path))
    assert isinstance(config, ModelConfig)
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name).clone() for name in names}  # the file may change later
    except (OSError, RuntimeError) as error:  # RuntimeError: gone since safetensors looked at it
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(f"{path}: {reason or 'cannot be read'}: expected the model's weights.") from error
    except SafetensorError as error:
        raise IntegrityError(f"{path} is no intact safetensors file: {error}.") from error


def _assign(model: LanguageModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Put `weights` in place of the model's own, name by name and shape by shape."""
    expected = dict(model.named_parameters())
    for problem, names in (
        ("lacks", expected.keys() - weights.keys()),
        ("holds, beyond what its config describes,", weights.keys() - expected.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:10])
            raise InvalidInput(f"{folder / WEIGHTS} {problem} {len(names)} weights: {listed:.300}.")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise InvalidInput(
                f"{folder / WEIGHTS}: {name} has shape {list(weight.shape)}, the config says "
                f"{list(expected[name].shape)}."
            )
        if not weight.is_floating_point():
            raise InvalidInput(f"{folder / WEIGHTS}: {name} holds {weight.dtype}, expected floating point.")
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(weight))
    model.tie()


def _json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2) + "\n"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")
