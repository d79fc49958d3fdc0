"""What a user may set for a run, flat and with defaults: the flags of `rehead train`.

Names and defaults are the homework's (seeds B17, B18).
"""

from dataclasses import dataclass, field
from typing import Literal

from rehead.config.model_options import ModelOptions
from rehead.errors import ConfigError


@dataclass(kw_only=True)
class SystemOptions:
    """Where a run lives, and its seed."""

    work_dir: str = "out/run"
    seed: int = 3407

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"system.seed={self.seed}. Use 0 up to {2**63 - 1}.")


@dataclass(kw_only=True)
class DataOptions:
    """Text: a file or folder at `path`, or a corpus by `name`; the last `val_fraction` validates."""

    path: str | None = None
    name: str | None = None
    block_size: int = 128
    tokenizer: Literal["char", "byte", "bpe"] = "char"
    vocab_size: int | None = None
    val_fraction: float = 0.1


@dataclass(kw_only=True)
class TrainerOptions:
    """How long and how to train; defaults are the homework's, plus evaluation and saving.

    With a `teacher`, a model folder, `distillation` parts of the loss are the divergence from its
    predictions, the rest is the text's own.
    """

    max_iters: int = 600
    batch_size: int = 64
    grad_accumulation: int = 1
    learning_rate: float = 5e-4
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_iters: int = 0
    min_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    grad_norm_clip: float = 1.0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 200
    keep: int = 2
    sample_every: int = 200
    sample_tokens: int = 200
    resume: bool = False
    teacher: str | None = None
    distillation: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.distillation <= 1:
            raise ConfigError(f"trainer.distillation={self.distillation}: the teacher's share. Use 0 to 1.")
        for name in ("batch_size", "grad_accumulation", "eval_every", "eval_batches", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}={getattr(self, name)}. Use 1 or more.")
        for name in ("max_iters", "warmup_iters", "sample_every", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"trainer.{name}={getattr(self, name)}. Use 0 or more.")
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
    """All groups."""

    system: SystemOptions = field(default_factory=SystemOptions)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
