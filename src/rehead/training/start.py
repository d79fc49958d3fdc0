"""What a run starts from: device, text, vocabulary, model, and weights trained before."""

import dataclasses
import os
from dataclasses import replace
from pathlib import Path

import torch

from rehead.attention import AttentionConfig
from rehead.checkpoint import load, resolve
from rehead.checkpoint.hub import pinned
from rehead.config import GPTConfig, ModelConfig, ModelOptions, RunOptions
from rehead.data import Tokens, source_of, tokenize
from rehead.errors import ConfigError, ResourceError
from rehead.measure import parameters
from rehead.model import LanguageModel, build
from rehead.system.machine import physical_memory
from rehead.tokenizer import Tokenizer, train
from rehead.training.heal import require_same_vocabulary

TRAINING_BYTES = 16
"""Per parameter: a float32 weight, its gradient and AdamW's two moments."""


def located(options: RunOptions) -> RunOptions:
    """The same options with paths that hold from any folder; a model's name on the Hub stays a name."""

    def whole(path: str | None) -> str | None:
        if path is None or (pinned(path) and not os.path.exists(path)):
            return path
        return os.path.abspath(path)

    data, model, trainer = options.data, options.model, options.trainer
    return replace(
        options,
        data=replace(data, path=whole(data.path)),
        model=replace(model, pretrained_folder=whole(model.pretrained_folder), folder=whole(model.folder)),
        trainer=replace(trainer, teacher=whole(trainer.teacher)),
    )


def read_text(options: RunOptions, store: Path, checkpoint: Path | None) -> tuple[Tokenizer, Tokens]:
    """The vocabulary and the tokens, which are written to the file `store`.

    The vocabulary comes from the checkpoint that is resumed, or the folder that is built on, or is
    made from the text.
    """
    data, text = options.data, source_of(options.data)
    pretrained = options.model.pretrained_folder or options.model.folder
    before = checkpoint or (resolve(Path(pretrained)) if pretrained else None)
    tokenizer = Tokenizer.load(before) if before else train(data.tokenizer, text, data.vocab_size)
    return tokenizer, tokenize(text, tokenizer, store)


def start_model(options: ModelOptions, vocab_size: int, block_size: int, seed: int) -> LanguageModel:
    """A fresh model drawn from `seed`, with the weights of `pretrained_folder` where one is given.

    Its vocabulary is then as large as that folder's, which may be padded beyond the tokenizer's. With
    `folder`, the model that lies there.
    """
    torch.manual_seed(seed)
    if options.folder is not None:
        options.require_folder_only()
        found = load(options.folder).float()  # bfloat16 would round most steps away
        _require_memory(found.config)
        if block_size > found.config.block_size:
            raise ConfigError(
                f"data.block_size={block_size} is above the {found.config.block_size} of {options.folder}: use that "
                "or less."
            )
        return found
    place = options.pretrained_folder
    trained = None if place is None else load(place)
    config = options.resolve(trained.config.vocab_size if trained else vocab_size, block_size)
    _require_memory(config)
    model = build(config)
    if place is not None and trained is not None:
        _warm_start(model, trained, place)
    return model


def read_teacher(options: RunOptions, model: LanguageModel, device: torch.device) -> LanguageModel | None:
    """The model whose predictions are learned, if there is one, in eval mode."""
    place = options.trainer.teacher
    if place is None:
        return None
    teacher = load(place, device=device)
    require_same_vocabulary(model, teacher, place)
    return teacher.requires_grad_(False)


def _require_memory(config: ModelConfig) -> None:
    """Refuse, before anything is allocated, a model that cannot be trained in this machine's memory."""
    need, have = parameters(config) * TRAINING_BYTES, physical_memory()
    if need > have:
        raise ResourceError(
            f"{parameters(config):,} parameters need {need / 1e9:,.0f} GB to train ({TRAINING_BYTES} bytes each), this "
            f"machine has {have / 1e9:,.0f} GB: use a smaller model.n_embd or model.n_layer."
        )


def _warm_start(model: LanguageModel, trained: LanguageModel, folder: str) -> None:
    """Copy trained weights; a longer position table keeps its first rows and draws the rest (B20).

    Raises ConfigError naming every field in which the two models differ beyond length and dropout.
    """
    differing = _differences(model.config, trained.config)
    if differing:
        raise ConfigError(
            f"model.pretrained_folder={folder} holds another model: {'; '.join(differing)}. Give the flags it was "
            "trained with, or convert it first."
        )
    old_block, new_block = trained.config.block_size, model.config.block_size
    if new_block < old_block:
        raise ConfigError(
            f"data.block_size={new_block} is below the {old_block} that {folder} was trained with: weights are "
            f"extended, never cut. Use {old_block} or more."
        )
    weights = trained.state_dict()
    for name, weight in model.state_dict().items():
        rows = slice(0, len(weights[name])) if name == "embed_positions.weight" else slice(None)
        weight[rows] = weights[name]


def _differences(new: ModelConfig, old: ModelConfig) -> list[str]:
    """Fields that decide what weights mean and that differ, as "name: new here, old there"."""
    free = {"block_size", "embd_pdrop", "resid_pdrop", "attn_pdrop"}

    def table(config: ModelConfig | AttentionConfig) -> dict[str, object]:
        fields = [field.name for field in dataclasses.fields(config) if field.name not in free]
        return {name: getattr(config, name) for name in fields}

    found = {}
    if type(new) is not type(old):
        return [f"model.type is {type(old).__name__} there"]
    for name, value in table(new).items():
        there = getattr(old, name)
        if name != "attention" and value != there:
            found[name] = (value, there)
    if isinstance(new, GPTConfig) and isinstance(old, GPTConfig):
        if new.n_layer != old.n_layer:
            found["n_layer"] = (new.n_layer, old.n_layer)
        for here, there in zip(new.attention, old.attention, strict=False):
            if type(here) is not type(there):
                found["attention"] = (here.name, there.name)
                continue
            for name, value in table(here).items():
                if value != getattr(there, name):
                    found[name] = (value, getattr(there, name))
    return [f"{name} is {here} here and {there} there" for name, (here, there) in found.items()]
