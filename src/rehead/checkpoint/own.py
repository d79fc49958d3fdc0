"""rehead's own model folder: config.json, weights, generation_config.json, MANIFEST.json and any tokenizer.json."""

import functools
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rehead.checkpoint.files.deferred import map_deferred, materialise
from rehead.checkpoint.files.publish import MANIFEST, publish, verify
from rehead.checkpoint.files.shards import DTYPES, INDEX, SINGLE, Shards, require_names
from rehead.checkpoint.files.strict import strict_json
from rehead.checkpoint.files.writing import json_text, write_weights
from rehead.checkpoint.find import path_of, read_at
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.base import families
from rehead.checkpoint.huggingface.sizes import for_sizes
from rehead.config import GPTConfig, ModelConfig, decode, encode
from rehead.errors import InvalidInput, NumericError, UsageError
from rehead.model import LanguageModel, skeleton
from rehead.model.base import keeps_dtype, require_model
from rehead.stages import staged
from rehead.system.device import choose_device
from rehead.system.huge_pages import HugePages
from rehead.system.memory import require_memory

FORMAT = "rehead-1"
LARGEST_CONFIG = 4 * 2**20
WAY_OUT = "Where there is --dtype, it chooses another format."


def save(
    model: LanguageModel,
    path: str | Path,
    *,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model folder atomically; `files` are further texts to put in it, such as tokenizer.json.

    Without tokenizer.json, the command line can neither generate with the model nor evaluate it. `overwrite`
    replaces a folder that rehead wrote. Raises InvalidInput if anything else is at `path`, for a name in `files`
    that leads out of the folder or is that of the model's own config, weights or manifest, and for a model changed by
    hand to weights that its config does not describe, which `load` would refuse.
    """
    require_model(model)
    require_described(model)
    for name in files or {}:
        _require_free(name)
    with publish(path_of(path), overwrite=overwrite) as folder:
        write(model, folder, files or {})


def require_described(model: LanguageModel) -> None:
    """Refuse a model whose weights are not those of its config."""
    has = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    wants = {name: tuple(weight.shape) for name, weight in skeleton(model.config).named_parameters()}
    for name in [*wants, *has]:
        if has.get(name) != wants.get(name):
            shapes = (str(list(weights[name])) if name in weights else "none" for weights in (has, wants))
            raise InvalidInput(
                "{}: the model has {}, its config says {}. Saved, it could not be loaded: change model.config "
                "with the weights.".format(name, *shapes)
            )


def write(model: LanguageModel, folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a model folder into a folder being published; `files` may replace generation_config.json."""
    tied = {name for name, _ in model.named_parameters()}  # a shared tensor has one name here
    write_weights(folder, {name: weight for name, weight in model.state_dict().items() if name in tied})
    config = {"format": FORMAT, **encode(model.config), "dtype": str(model.head.weight.dtype)[6:]}
    generation = {"do_sample": True, "temperature": 1.0}
    texts = {"config.json": json_text(config), "generation_config.json": json_text(generation), **files}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _require_free(name: str) -> None:
    """Refuse the name of a further file that is not one in the folder, or is one of the model's own."""
    if Path(name).name != name or name in ("", "..") or "\\" in name or not name.isprintable():
        raise InvalidInput(f"files has the name {name!r:.80}: give the plain name of a file in the folder.")
    if name in ("config.json", MANIFEST) or name.startswith("model.") or name.endswith(".safetensors"):
        raise InvalidInput(f"files has the name {name!r:.80}, which is the model's own: choose another.")


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    in_memory: bool = True,
) -> LanguageModel:
    """Return the model in a model folder, or the newest good checkpoint of a run folder, in eval mode.

    A model folder is rehead's own or Hugging Face's of a family in `rehead.checkpoint.huggingface`; a path
    that does not exist and has the form org/name@commit is fetched from the Hub. `device` is cpu, cuda[:N] or auto.
    Weights are converted to `dtype`, by default the one they are stored in (the widest if there are several);
    a router's correction bias always keeps its own. With
    `in_memory=False` they stay in their files and are read whenever an operation needs them, one at a
    time: slower, for models larger than the memory. Raises UsageError for a device that is not available,
    InvalidInput for a folder that is not a model and for weights that do not fit the config, IntegrityError
    for a damaged file, NumericError for weights that `dtype` cannot hold.
    """
    chosen = choose_device(str(device))
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UsageError(
            f"dtype={dtype!r:.40}: weights are held in torch.float32, bfloat16, float16 or float64."
        )

    def read(folder: Path) -> tuple[LanguageModel, str]:
        if os.path.lexists(folder / MANIFEST):
            verify(folder)
        table = _table(folder / "config.json")
        config = _config(table, str(folder / "config.json"))
        model = skeleton(config)
        if table.get("format") == FORMAT:
            shards = Shards(folder)
            weights: dict[str, Tensor] = {name: shards.deferred(name) for name in shards.entries}
        else:
            assert isinstance(config, GPTConfig)
            weights = stock.read_weights(folder, table, config)
        assign(model, weights, str(folder / SINGLE), in_memory, dtype, chosen)
        _look_over(model, weights, folder)
        return model, _other_dtype(_named_dtype(table, str(folder / "config.json")), weights)

    model, other = read_at(path_of(path), read)
    if other and dtype is None:
        warnings.warn(f"{path}: {other} {WAY_OUT}", stacklevel=2)
    return model.to(chosen).eval()


def read_config(folder: Path, *, sizes_only: bool = False) -> ModelConfig:
    """Return the config in a model folder or config.json; `sizes_only` is for a model to count (`for_sizes`)."""
    if os.path.lexists(folder / MANIFEST):
        verify(folder, only="config.json")
    path = folder if folder.is_file() else folder / "config.json"
    table = _table(path)
    return _config(for_sizes(table, str(path)) if sizes_only else table, str(path))


def read_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype that config.json names or, without one, the widest of the weights; None without weights.

    `folder` may be the config.json in it.
    """
    path = folder if folder.is_file() else folder / "config.json"
    return _named_dtype(_table(path), str(path)) or stored_dtype(path.parent)


def _named_dtype(table: Mapping[str, Any], where: str) -> torch.dtype | None:
    """Return the dtype that config.json names, if any."""
    named = table.get("dtype") or table.get("torch_dtype")
    _require_dtype("dtype", named, where)
    return next(
        (kind for kind in DTYPES.values() if str(kind)[6:] == str(named).removeprefix("torch.")), None
    )


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the widest dtype of the weights in `folder` but for buffers that no model reads; None without weights."""
    if not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return None
    kind = str(_table(folder / "config.json").get("model_type"))
    family = families[kind] if kind in families else None  # noqa: SIM401 (no dict)
    dtypes = [
        entry.dtype
        for name, entry in Shards(folder).entries.items()
        if entry.dtype.is_floating_point
        and not keeps_dtype(name)
        and (family is None or family.canonical_name(name) is not None)
    ]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _table(path: Path) -> dict[str, Any]:
    table = strict_json(path, LARGEST_CONFIG)
    if not isinstance(table, dict):
        raise InvalidInput(
            f"{path} does not say format={FORMAT!r}: expected a table. Put a whole copy of it there."
        )
    return table


def _config(table: dict[str, Any], where: str) -> ModelConfig:
    for key in ("dtype", "torch_dtype"):
        _require_dtype(key, table.get(key), where)
    if "format" not in table and ("model_type" in table or "architectures" in table):
        return stock.read_config(table, where)
    if "format" in table and table["format"] != FORMAT:
        raise InvalidInput(
            f"{where} has format={table['format']!r:.40}, this version of rehead knows {FORMAT!r}: upgrade rehead, or "
            "use the version that wrote it."
        )
    if "format" not in table:
        raise InvalidInput(
            f"{where} does not say format={FORMAT!r}: it is not rehead's, nor, without model_type, a stock one. Put a "
            "whole copy of it there, or give another folder."
        )
    own = {name: value for name, value in table.items() if name not in ("format", "dtype")}
    config = decode(ModelConfig, own, where)
    assert isinstance(config, ModelConfig)
    return config


def _require_dtype(key: str, dtype: object, where: str) -> None:
    """Refuse a config whose dtype is not one of weights. Weights keep the dtype of their file."""
    names = [str(one).removeprefix("torch.") for one in DTYPES.values()]
    if dtype is not None and str(dtype).removeprefix("torch.") not in names:
        raise InvalidInput(f"{where}: {key}={dtype!r:.40}: rehead reads weights of {', '.join(names)}.")


def assign(
    model: LanguageModel,
    weights: dict[str, Tensor],
    where: str,
    in_memory: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Replace the model's parameters by `weights`, read from `where`, in `dtype` or the widest of theirs.

    Names and shapes must match. `device` is where the model goes next.
    """
    expected = dict(model.named_parameters())
    require_names(where, weights.keys(), expected.keys(), "weights", "config")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise InvalidInput(
                f"{where}: {name} has shape {list(weight.shape)}, the config says "
                f"{list(expected[name].shape)}."
            )
    sizes = _sizes(weights)
    held = dtype or functools.reduce(torch.promote_types, sizes)
    if dtype is None and 2 * sizes.get(held, 0) < sum(sizes.values()):
        most = max(sizes, key=lambda kind: sizes[kind])
        other = next(name for name in weights if weights[name].dtype != most and not keeps_dtype(name))
        warnings.warn(
            f"{where}: most weights are {str(most)[6:]}, but {other} is {str(weights[other].dtype)[6:]}: all are held "
            f"in {str(held)[6:]}. {WAY_OUT}",
            stacklevel=2,
        )
    if in_memory:
        n_bytes = sum(weight.numel() for weight in weights.values()) * held.itemsize
        way_out = "Free some memory"
        if held.itemsize > 2:
            way_out += ", or use --dtype bf16. Where there is no --dtype, use a smaller model"
        require_memory(f"loading {where}", {f"weights in {str(held)[6:]}": n_bytes}, f"{way_out}.")
    pages = HugePages(device)
    for name, weight in staged(weights.items(), "reading the weights", len(weights), "tensors"):
        owner, _, leaf = name.rpartition(".")
        keeps = weight.dtype == held or keeps_dtype(name)
        same = weight if keeps else map_deferred(lambda other: other.to(held), weight)
        placed = pages.keep(materialise(same)) if in_memory else same
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(placed))
    model.tie()


def _sizes(weights: Mapping[str, Tensor]) -> dict[torch.dtype, int]:
    """Return how many numbers there are of each dtype, without those that keep theirs."""
    sizes: dict[torch.dtype, int] = {}
    for name, weight in weights.items():
        if not keeps_dtype(name):
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    return sizes


def _other_dtype(named: torch.dtype | None, weights: Mapping[str, Tensor]) -> str:
    """Return what to say of weights that are, and are held in, another dtype than the one config.json names."""
    sizes = _sizes(weights)
    most = max(sizes, key=lambda kind: sizes[kind])
    if named in (None, most) or most != functools.reduce(torch.promote_types, sizes):
        return ""
    return f"config.json says {str(named)[6:]}, but the weights are {str(most)[6:]} and are held so."


def _look_over(model: LanguageModel, saved: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse weights that left the range of their dtype, warn about those that were `saved` with NaN or infinity.

    Generation and measurements refuse the latter.
    """
    weights = list(model.named_parameters())
    damaged = [
        name
        for name, weight in staged(weights, "looking over the weights", len(weights), "tensors")
        if not torch.stack(materialise(weight).aminmax()).isfinite().all()
    ]
    for name in damaged:
        if materialise(saved[name]).isfinite().all():
            kind = str(model.get_parameter(name).dtype).removeprefix("torch.")
            wider = "bfloat16 or float32" if kind == "float16" else "the format it was saved in"
            raise NumericError(f"{folder}: {name} leaves the range of {kind}: use {wider}.")
    if damaged:
        listed = ", ".join(sorted(damaged)[:10])
        warnings.warn(f"{folder}: {len(damaged)} weights hold NaN or infinity: {listed:.300}", stacklevel=2)
