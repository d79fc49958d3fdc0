"""The options of a run, flat and with defaults: the flags of `rehead train`.

Names and defaults are those of CMU 10-423's first homework (document B in docs/sources.md).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from rehead.config.differing import DROPOUT
from rehead.config.model_options import ModelOptions
from rehead.errors import ConfigError
from rehead.fields import require_types

MOST_SAMPLE_TOKENS = 1_000_000
"""Tokens of a sample text."""


@dataclass(kw_only=True)
class SystemOptions:
    """The folder of a run, and its seed."""

    work_dir: str = "out/run"
    """folder of the run: its options, metrics and checkpoints; a study uses runs/PRESET"""
    seed: int = 3407
    """seed of the fresh weights, the order of batches, dropout and samples"""

    __no_type_check__ = True  # __post_init__ checks what is given

    def __post_init__(self) -> None:
        require_types(self, "system.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"system.seed={self.seed}. Use 0 up to {2**32 - 1}.")


@dataclass(kw_only=True)
class DataOptions:
    """The text: a file or folder at `path`, or a corpus by `name`. Its last `val_fraction` is for validation."""

    path: str | None = None
    """a UTF-8 text, or a folder of .txt and .md files [default: a text known by name]"""
    name: str | None = None
    """a text known by name: python-docs, or shakespeare, which is downloaded [default: python-docs]"""
    block_size: int = 128
    """tokens the model sees at once, in training and in generation"""
    tokenizer: Literal["char", "byte", "bpe"] = "char"
    """char: one token per character of the text; byte: one per byte; bpe: trained on the text"""
    vocab_size: int | None = None
    """bpe only, where it is required: the largest number of tokens to make, at least 256 [default: none]"""
    val_fraction: float = 0.1
    """share of the text, taken from its end, for validation"""

    __no_type_check__ = True

    def __post_init__(self) -> None:
        require_types(self, "data.")
        if self.block_size < 1:
            raise ConfigError(
                f"data.block_size={self.block_size}: a block has at least 1 token. Use 128, for example."
            )


@dataclass(kw_only=True)
class TrainerOptions:
    """How long and how to train: the homework's defaults, plus evaluation and saving.

    With a `teacher`, a model folder, the share `distillation` of the loss is the divergence from its
    predictions; the rest is the loss on the text.
    """

    max_iters: int = 600
    """optimizer steps in all"""
    batch_size: int = 64
    """blocks per forward pass, summed over all processes of torchrun"""
    grad_accumulation: int = 1
    """forward passes per optimizer step"""
    learning_rate: float = 5e-4
    """AdamW's learning rate after the warm-up"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning rate after the warm-up: constant, or a cosine down to min_learning_rate"""
    warmup_iters: int = 0
    """steps over which the learning rate rises from 0"""
    min_learning_rate: float = 0.0
    """learning rate at the end of the cosine"""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient"""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient"""
    weight_decay: float = 0.1
    """AdamW's weight decay, on the weights of linear layers"""
    grad_norm_clip: float = 1.0
    """a gradient with a larger norm is scaled down to this norm"""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda if the machine has it"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 for autocast: the weights stay in float32"""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """how processes of torchrun train one model: each holds all weights (ddp) or a share of them (fsdp)"""
    compile: bool = False
    """compile the model with torch.compile"""
    recompute: bool = False
    """keep only the inputs of layers, and recompute the rest in the backward pass: less memory, a third more time"""
    train: Literal["all", "attention"] = "all"
    """weights to train: all, or only those of the attention layers; a teacher then shares the frozen weights
    that are equal"""
    eval_every: int = 100
    """steps between validations"""
    eval_batches: int = 8
    """batches per validation"""
    save_every: int = 200
    """steps between checkpoints"""
    keep: int = 2
    """newest checkpoints to keep"""
    save_async: bool = False
    """write checkpoints in a thread while training continues; takes memory for a copy of weights and optimizer state"""
    sample_every: int = 200
    """steps between sample texts; 0 for none"""
    sample_tokens: int = 500
    """tokens per sample text"""
    sample_prompt: str | None = None
    """prompt of sample texts [default: the beginning of the validation text]"""
    sample_temperature: float = 1.0
    """divides the logits of sample texts; 0 takes the likeliest token"""
    sample_top_k: int | None = 10
    """sample texts use this many of the likeliest tokens; null for all"""
    report_to: list[Literal["tensorboard", "trackio", "wandb"]] | None = None
    """where metrics go besides metrics.jsonl; each needs a package of its own, and wandb sends them to a
    server [default: none]"""
    resume: bool = False
    """continue the run in system.work_dir from its newest checkpoint"""
    teacher: str | None = None
    """a model folder whose predictions the model learns [default: none]"""
    distillation: float = 1.0
    """with a teacher: share of the loss that is the divergence from its predictions; the rest is the loss
    on the text"""

    __no_type_check__ = True

    def __post_init__(self) -> None:
        require_types(self, "trainer.")
        if not 0 <= self.distillation <= 1:
            raise ConfigError(
                f"trainer.distillation={self.distillation} is not a share of the loss. Use 0 to 1."
            )
        if self.compile and self.recompute:
            raise ConfigError("trainer.compile=True and trainer.recompute=True: use one of them.")
        if self.compile and self.parallel != "none":
            raise ConfigError(f"trainer.compile=True and trainer.parallel={self.parallel}: use one of them.")
        if self.report_to and len(set(self.report_to)) < len(self.report_to):
            raise ConfigError(f"trainer.report_to={self.report_to} names one twice. Leave it out.")
        for name in ("batch_size", "grad_accumulation", "eval_every", "eval_batches", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}={getattr(self, name)}. Use 1 or more.")
        if self.sample_tokens > MOST_SAMPLE_TOKENS:
            raise ConfigError(f"trainer.sample_tokens={self.sample_tokens}. Use 0 to {MOST_SAMPLE_TOKENS:,}.")
        for name in ("max_iters", "warmup_iters", "sample_every", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"trainer.{name}={getattr(self, name)}. Use 0 or more.")
        if not 0 <= self.sample_temperature < float("inf"):
            raise ConfigError(f"trainer.sample_temperature={self.sample_temperature}. Use 0 or more.")
        if self.sample_top_k is not None and self.sample_top_k < 1:
            raise ConfigError(f"trainer.sample_top_k={self.sample_top_k}. Use 1 or more, or null for all.")
        if self.sample_prompt == "":
            raise ConfigError(
                "trainer.sample_prompt is empty. Give a text, or null to use the validation text."
            )
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"trainer.learning_rate={self.learning_rate}. Use a number above 0, like 5e-4.")
        if not self.grad_norm_clip > 0:
            raise ConfigError(
                f"trainer.grad_norm_clip={self.grad_norm_clip}. Use a number above 0, like 1.0."
            )
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ConfigError(
                f"trainer.min_learning_rate={self.min_learning_rate} with learning_rate={self.learning_rate}. "
                "Use 0 up to the learning rate."
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError(f"trainer.beta1={self.beta1}, beta2={self.beta2}. Use numbers from 0 below 1.")
        if not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(f"trainer.weight_decay={self.weight_decay}. Use 0 or more.")


@dataclass(kw_only=True)
class RunOptions:
    """The options of a run, in four groups."""

    system: SystemOptions = field(default_factory=SystemOptions)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)

    def at(self, work_dir: str) -> "RunOptions":
        """Return the same options for a run in `work_dir`, which may have been moved since they were written."""
        return replace(self, system=replace(self.system, work_dir=work_dir))

    def unused(self) -> dict[str, str]:
        """Return the flags that a run would not use, each with why, and the way out."""
        model, trainer, found = self.model, self.trainer, {}
        if trainer.schedule == "constant" and trainer.min_learning_rate:
            found["trainer.min_learning_rate"] = (
                "with trainer.schedule=constant. Leave it out, or use trainer.schedule=cosine."
            )
        if trainer.teacher is None and trainer.distillation != TrainerOptions.distillation:
            found["trainer.distillation"] = "without a teacher. Leave it out, or give trainer.teacher."
        given = {
            name for name in DROPOUT
            if getattr(model, name) not in (0, getattr(ModelOptions, name))
        }  # fmt: skip
        for name in sorted(given - {"embd_pdrop"}) if model.type == "rnn" else ():
            found[f"model.{name}"] = "with model.type=rnn. Leave it out, or use model.embd_pdrop."
        for name in sorted(given) if trainer.teacher is not None and model.folder is None else ():
            found[f"model.{name}"] = (
                "with trainer.teacher, from which a model learns without dropout. Leave it out."
            )
        if model.type == "rnn" and model.n_query_head != ModelOptions.n_query_head:
            found["model.n_query_head"] = "with model.type=rnn, which has no heads. Leave it out."
        return found

    def refuse_unused(self, began: "RunOptions | None" = None) -> None:
        """Raise ConfigError for flags that a run would not use, but for those that it `began` with."""
        known = {} if began is None else began.unused()
        for key, why in self.unused().items():
            if known.get(key) == why:
                continue
            group, name = key.split(".")
            raise ConfigError(f"{key}={getattr(getattr(self, group), name)} has no effect {why}")
