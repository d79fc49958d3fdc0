"""What a user may set for a run, flat and with defaults: the flags of `rehead train`.

Names and defaults are the homework's (seeds B17, B18).
"""

from dataclasses import dataclass, field
from typing import Literal

from rehead.config.model_options import ModelOptions
from rehead.errors import ConfigError
from rehead.fields import require_types

MOST_SAMPLE_TOKENS = 1_000_000
"""Of one sample text."""


@dataclass(kw_only=True)
class SystemOptions:
    """Where a run lives, and its seed."""

    work_dir: str = "out/run"
    """folder of the run: its options, metrics and checkpoints; a study has runs/PRESET"""
    seed: int = 3407
    """of the fresh weights, the order of batches, dropout and samples"""

    __no_type_check__ = True  # __post_init__ checks what is given

    def __post_init__(self) -> None:
        require_types(self, "system.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"system.seed={self.seed}. Use 0 up to {2**63 - 1}.")


@dataclass(kw_only=True)
class DataOptions:
    """Text: a file or folder at `path`, or a corpus by `name`; the last `val_fraction` validates."""

    path: str | None = None
    """a UTF-8 text, or a folder of .txt and .md files [default: a text known by name]"""
    name: str | None = None
    """a text known by name: python-docs, or shakespeare, which is downloaded [default: python-docs]"""
    block_size: int = 128
    """tokens the model sees at once, in training and after it"""
    tokenizer: Literal["char", "byte", "bpe"] = "char"
    """char: one token per character of the text; byte: one per byte; bpe: trained on the text"""
    vocab_size: int | None = None
    """tokens of the bpe tokenizer at most, 256 or more; needed for bpe only [default: none]"""
    val_fraction: float = 0.1
    """share of the text, at its end, kept for validation"""

    __no_type_check__ = True

    def __post_init__(self) -> None:
        require_types(self, "data.")


@dataclass(kw_only=True)
class TrainerOptions:
    """How long and how to train; defaults are the homework's, plus evaluation and saving.

    With a `teacher`, a model folder, `distillation` parts of the loss are the divergence from its
    predictions, the rest is the text's own.
    """

    max_iters: int = 600
    """optimizer steps in all"""
    batch_size: int = 64
    """blocks per forward pass"""
    grad_accumulation: int = 1
    """forward passes per optimizer step"""
    learning_rate: float = 5e-4
    """of AdamW, after the warm-up"""
    schedule: Literal["constant", "cosine"] = "constant"
    """how the learning rate goes on: unchanged, or down to min_learning_rate along a cosine"""
    warmup_iters: int = 0
    """steps over which the learning rate rises from 0"""
    min_learning_rate: float = 0.0
    """where the cosine ends"""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient"""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient"""
    weight_decay: float = 0.1
    """AdamW's, on the weights of linear layers"""
    grad_norm_clip: float = 1.0
    """the gradient is scaled down to this norm where it is larger"""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto, which takes cuda or mps where the machine has one"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 for autocast: the weights stay in float32"""
    compile: bool = False
    """run the model through torch.compile"""
    eval_every: int = 100
    """steps between validations"""
    eval_batches: int = 8
    """batches per validation"""
    save_every: int = 200
    """steps between checkpoints"""
    keep: int = 2
    """newest checkpoints to keep"""
    sample_every: int = 200
    """steps between sample texts; 0 for none"""
    sample_tokens: int = 500
    """tokens per sample text"""
    sample_prompt: str | None = None
    """what sample texts continue [default: the beginning of the validation text]"""
    sample_temperature: float = 1.0
    """divides the logits of sample texts; 0 takes the likeliest token"""
    sample_top_k: int | None = 10
    """sample texts draw from this many of the likeliest tokens; null for all"""
    resume: bool = False
    """continue the run in system.work_dir from its newest checkpoint"""
    teacher: str | None = None
    """a model folder whose predictions the model learns [default: none]"""
    distillation: float = 1.0
    """with a teacher: the share of its predictions in the loss; the rest is the text's own"""

    __no_type_check__ = True

    def __post_init__(self) -> None:
        require_types(self, "trainer.")
        if not 0 <= self.distillation <= 1:
            raise ConfigError(f"trainer.distillation={self.distillation}: the teacher's share. Use 0 to 1.")
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
            raise ConfigError("trainer.sample_prompt is empty. Give a text, or null for the text's own.")
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
