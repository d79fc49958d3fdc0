"""The start of a run: its text, vocabulary, model and pretrained weights."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import torch

from rehead.checkpoint import load, read_at, read_config, resolve
from rehead.checkpoint.companions import companions
from rehead.checkpoint.files.publish import MANIFEST
from rehead.checkpoint.hub import CARD, pinned
from rehead.config import GPTConfig, ModelConfig, ModelOptions, RunOptions, flags
from rehead.config.differing import DROPOUT, differing
from rehead.conversion.origin import carried, kept_card
from rehead.data import Tokens, source_of, tokenize
from rehead.errors import ConfigError
from rehead.measure import parameters
from rehead.measure.forecast import FLOAT, loss_bytes, step_bytes
from rehead.model import LanguageModel, build
from rehead.system.memory import require_memory
from rehead.tokenizer import Tokenizer, train
from rehead.training import state
from rehead.training.frozen import require_trainable, share_frozen
from rehead.training.heal import require_its_tokenizer, require_same_vocabulary

POSITIONS = "embed_positions.weight"
TRAINING_BYTES = 16
"""Bytes per parameter: a float32 weight, its gradient and AdamW's two moments."""


def located(options: RunOptions) -> RunOptions:
    """Return the options to write down: with absolute paths and without `resume`.

    Names of models on the Hub are kept.
    """

    def whole(path: str | None) -> str | None:
        if path is None or (pinned(path) and not os.path.exists(path)):
            return path
        return os.path.abspath(path)

    data, model, trainer = options.data, options.model, options.trainer
    return replace(
        options,
        data=replace(data, path=whole(data.path)),
        model=replace(model, pretrained_folder=whole(model.pretrained_folder), folder=whole(model.folder)),
        trainer=replace(trainer, teacher=whole(trainer.teacher), resume=False),
    )


def read_text(options: RunOptions, store: Path, checkpoint: Path | None) -> tuple[Tokenizer, Tokens]:
    """Return the tokenizer and the tokens of the text, which are written to the file `store`.

    The tokenizer comes from the checkpoint to resume or the folder to start from; otherwise it is trained
    on the text. Raises ConfigError, before the text is read, for options that do not fit the folder.
    """
    if options.model.folder and checkpoint is None:
        _require_folder(options, options.model.folder)
    data, text = options.data, source_of(options.data)
    pretrained = options.model.pretrained_folder or options.model.folder
    before = checkpoint or (resolve(Path(pretrained)) if pretrained else None)
    tokenizer = Tokenizer.load(before) if before else train(data.tokenizer, text, data.vocab_size)
    if pretrained and checkpoint is None:
        require_its_tokenizer(tokenizer, data, pretrained)
    return tokenizer, tokenize(text, tokenizer, store)


def _require_folder(run: RunOptions, folder: str) -> None:
    """Raise ConfigError for a run that cannot train the model in `folder`, by its config."""
    run.model.require_folder_only()
    config = read_at(Path(folder), read_config)
    require_trainable(config, run.trainer)
    if run.data.block_size > config.block_size:
        raise ConfigError(
            f"data.block_size={run.data.block_size} is above the {config.block_size} of {folder}: use "
            f"{config.block_size} or less."
        )


def start_model(
    run: RunOptions, vocab_size: int, device: torch.device, *, in_memory: bool = True
) -> LanguageModel:
    """Return a model on the CPU with fresh weights from the run's seed, or with those of `pretrained_folder`.

    With `pretrained_folder` the vocabulary has that model's size, which may be padded beyond the
    tokenizer's. With `folder` the result is the model in that folder, of which `in_memory=False` leaves the weights
    there. Raises ResourceError, before allocating, for a new model too large for this machine's memory; gradients and
    moments count if `device`, which is to train it, is a CPU.
    """
    options, block_size = run.model, run.data.block_size
    torch.manual_seed(run.system.seed)
    if options.folder is not None:
        # bfloat16 would round most steps away
        return load(options.folder, dtype=torch.float32, in_memory=in_memory)
    place = options.pretrained_folder
    trained = None if place is None else load(place)
    config = options.resolve(trained.config.vocab_size if trained else vocab_size, block_size)
    _require_memory(config, device)
    model = build(config)
    if place is not None and trained is not None:
        _warm_start(model, trained, place)
    return model


def carried_files(options: ModelOptions, checkpoint: Path | None) -> dict[str, str]:
    """Return what checkpoints keep of the trained model that began them, as files: origin, chat template, sampling."""
    place = options.pretrained_folder or options.folder
    if place is None:
        return {}
    if checkpoint is not None:
        return kept_card(checkpoint) | companions(checkpoint)
    source = Path(place)
    return read_at(source, lambda folder: {CARD: carried(source, folder), **companions(folder)})


def read_teacher(options: RunOptions, model: LanguageModel, device: torch.device) -> LanguageModel | None:
    """Load the teacher, if there is one, in eval mode and, as the model is, in float32.

    It shares those frozen weights of the model that are equal. If it will be sharded, it shares none, and its weights
    are left in their files.
    """
    place = options.trainer.teacher
    if place is None:
        return None
    sharded, partly = options.trainer.parallel == "fsdp", options.trainer.train != "all"
    later = partly or sharded
    teacher = load(place, device="cpu" if later else device, dtype=torch.float32, in_memory=not later)
    require_same_vocabulary(model, teacher, place)
    if partly and not sharded:  # a sharded model has no whole weights to share
        share_frozen(model, teacher)
    return teacher.requires_grad_(False)


def teacher_sha256(options: RunOptions) -> str | None:
    """Return the sha256 of the teacher's manifest; else of its config and its weights' names and sizes.

    None without a teacher.
    """

    def read(folder: Path) -> str:
        if (folder / MANIFEST).is_file():
            return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        files = sorted(folder.glob("*.safetensors"))
        sizes = repr([(file.name, file.stat().st_size) for file in files])
        return hashlib.sha256((folder / "config.json").read_bytes() + sizes.encode()).hexdigest()

    place = options.trainer.teacher
    return None if place is None else read_at(Path(place), read)


def require_same_run(
    checkpoint: Path, config: Path, options: RunOptions, text: str, teacher: str | None
) -> None:
    """Raise ConfigError for another text or teacher (by their sha256), model or seed than the run of `config` has.

    Also for a last step before that of `checkpoint`.
    """
    recorded, place = state.read_numbers(checkpoint), config.parent
    if options.trainer.max_iters < recorded["step"]:
        raise ConfigError(
            f"trainer.max_iters={options.trainer.max_iters} is below step {recorded['step']}, which {place} has "
            "reached: give more steps, or start a new system.work_dir."
        )
    if recorded["text_sha256"] != text:
        raise ConfigError(
            f"the text has changed since {checkpoint} (sha256 {text[:12]}... now, "
            f"{recorded['text_sha256'][:12]}... before): give the same data, or start a new system.work_dir."
        )
    before, given = located(flags.read([], (config,))), located(options)
    if recorded.get("teacher_sha256", teacher) != teacher:
        raise ConfigError(
            f"trainer.teacher={given.trainer.teacher} is not the model that the run to resume learned from, which was "
            f"{before.trainer.teacher}: give that model (of a run that was trained further, its checkpoint of then), "
            "or start a new system.work_dir."
        )
    by_path = () if "teacher_sha256" in recorded else ("teacher",)
    for group, names in (
        ("model", vars(before.model)),
        ("data", ("block_size", "val_fraction", "tokenizer", "vocab_size")),
        ("system", ("seed",)),
        ("trainer", ("batch_size", "grad_accumulation", *by_path, "distillation", "train")),
    ):
        for name in names:
            was, now = getattr(getattr(before, group), name), getattr(getattr(given, group), name)
            if was != now:
                raise ConfigError(
                    f"{group}.{name}={now} was {was} in the run to resume: leave it out, or start a new "
                    "system.work_dir."
                )


def _require_memory(config: ModelConfig, device: torch.device) -> None:
    """Raise ResourceError for a model too large for this machine's memory; if a GPU trains it, only weights count."""
    n_parameter = parameters(config)
    parts: dict[str, int | float] = {"weights": n_parameter * FLOAT}
    if device.type == "cpu":
        parts["gradients and moments"] = n_parameter * (TRAINING_BYTES - FLOAT)
    require_memory(
        f"training {n_parameter:,} parameters", parts, "Use a smaller model.n_embd or model.n_layer."
    )


def require_step(
    options: RunOptions, model: LanguageModel, device: torch.device, world: int = 1, *, sharded: bool = False
) -> None:
    """Raise ResourceError, before the first step, if what a step adds to the weights exceeds the device's memory.

    For an RNN only gradients and moments count. A GPU holds one of `world` shares of the batch and, if `sharded`, of
    the weights, which are not there yet. Processes on a CPU share one memory, in which each keeps gradients and moments
    of its own unless they are `sharded`; then DDP also has the gradients in buckets.
    """
    config, size, length = model.config, options.trainer.batch_size, options.data.block_size
    shares = 1 if device.type == "cpu" else world
    size //= shares
    n_parameter = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    parts = {"gradients and moments": n_parameter * (TRAINING_BYTES - FLOAT) / (shares if sharded else 1)}
    if world > 1 and not sharded:
        parts["gradients and moments"] += n_parameter * FLOAT
        parts["gradients and moments"] *= world // shares
    if options.trainer.save_async:
        n_copied = sum(weight.numel() for weight in model.parameters()) + 2 * n_parameter
        copy = {"a copy to save, with moments": FLOAT * n_copied}
        if device.type == "cpu":
            parts |= copy
        else:
            require_memory("trainer.save_async=True", copy, "Leave it out.")
    if sharded and device.type != "cpu":
        whole = 2 * config.vocab_size * config.n_embd  # embeddings and head are needed whole
        parts["weights"] = FLOAT * (sum(weight.numel() for weight in model.parameters()) / world + whole)
    way_out = "Use a smaller model.n_embd or model.n_layer."
    if isinstance(config, GPTConfig):
        recompute = options.trainer.recompute
        draws = device.type == "cpu" and options.trainer.teacher is None  # with a teacher there is no dropout
        parts["activations"] = step_bytes(config, size, length, recompute=recompute, draws=draws)
        parts["logits"] = 2 * loss_bytes(config, size * length, torch.float32)
        if options.trainer.compile:  # which computes all at once
            parts["logits"] = 3 * FLOAT * size * length * config.vocab_size
        way_out = (
            "Use " + "trainer.recompute=True, or " * (not recompute) + "a smaller trainer.batch_size (with "
            "trainer.grad_accumulation for as many tokens), data.block_size or model."
        )
    require_memory(f"a step of {size} x {length:,} tokens", parts, way_out, device)


def _warm_start(model: LanguageModel, trained: LanguageModel, folder: str) -> None:
    """Copy trained weights. A longer position table gets their rows first, and random rows after them.

    Raises ConfigError with every field in which the models differ, except length and dropout.
    """
    free = {"block_size", *DROPOUT}
    if differ := differing(model.config, trained.config, free):
        named = "; ".join(
            f"{name} is {here} here and {there} there" for name, (here, there) in differ.items()
        )
        raise ConfigError(
            f"model.pretrained_folder={folder} holds another model: {named}. Give the flags it was "
            "trained with, or convert it first."
        )
    old_block, new_block = trained.config.block_size, model.config.block_size
    weights = trained.state_dict()
    if new_block < old_block and POSITIONS in weights:
        raise ConfigError(
            f"data.block_size={new_block} is below the {old_block} that {folder} was trained with: a position table is "
            f"extended, never cut. Use {old_block} or more."
        )
    for name, weight in model.state_dict().items():
        rows = slice(0, len(weights[name])) if name == POSITIONS else slice(None)
        weight[rows] = weights[name]
