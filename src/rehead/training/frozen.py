"""Training of the attentions alone: what else a model has is frozen, and its teacher need not hold it again."""

import torch
from torch import nn

from rehead.checkpoint.files.deferred import materialise
from rehead.config import GPTConfig, ModelConfig, TrainerOptions
from rehead.errors import ConfigError
from rehead.model import GPT, LanguageModel
from rehead.stages import staged


def freeze(model: LanguageModel, options: TrainerOptions) -> None:
    """Freeze all weights except those that `trainer.train` names. Raises as `require_trainable`."""
    require_trainable(model.config, options)
    if options.train == "attention":
        assert isinstance(model, GPT)
        model.requires_grad_(requires_grad=False)
        for layer in model.layers:
            layer.self_attn.requires_grad_()


def require_trainable(config: ModelConfig, options: TrainerOptions) -> None:
    """Raise ConfigError for `train` or `recompute` on an RNN, and for training experts.

    No loss keeps their load even.
    """
    if not isinstance(config, GPTConfig):
        for key, usual in (("train", "all"), ("recompute", False)):
            value = getattr(options, key)
            if value != usual:
                raise ConfigError(f"trainer.{key}={value} needs a model.type=gpt. Use trainer.{key}={usual}.")
    elif options.train != "attention" and config.experts is not None:
        raise ConfigError(
            f"trainer.train={options.train} would train experts and their routers, and rehead has no loss that "
            "keeps the routers from choosing only a few of them. Use trainer.train=attention."
        )


def share_frozen(model: LanguageModel, teacher: LanguageModel) -> None:
    """Give a teacher the frozen weights of the model where its own are equal, and read its other ones.

    The teacher's weights may be deferred, so that the equal ones are never in memory twice.
    """
    ours = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    theirs = list(teacher.named_parameters())
    for name, weight in staged(theirs, "reading the teacher", len(theirs), "tensors"):
        value, mine = materialise(weight).to(model.device), ours.get(name)
        same = mine is not None and mine.dtype == value.dtype and torch.equal(mine, value)
        owner, _, leaf = name.rpartition(".")
        kept = mine if mine is not None and same else nn.Parameter(value, requires_grad=False)
        setattr(teacher.get_submodule(owner), leaf, kept)
    teacher.tie()
    teacher.to(model.device)
