"""What happened to a model before and after its conversion, as its certificate lists it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Healing:
    """A training that learned the source's predictions. `kl` and `loss` are before and after it; None is unknown.
    `teacher` is a model of the Hub at its commit, or the name of a folder without its path."""

    steps: int
    teacher: str
    distillation: float
    train: str
    learning_rate: float
    batch_tokens: int
    kl: list[float | None]
    loss: list[float | None]


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A conversion that made the source of another one, in brief.

    `source` and `result` are the attentions of its first layer; `kl` is measured against its own source and `loss`,
    before and after it, on its own text; both include `healed` steps of healing."""

    source: str
    result: str
    exact: bool
    kl: float
    loss: list[float] | None
    kv_bytes_per_token: list[int]
    healed: int
