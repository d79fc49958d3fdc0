"""Refuses arguments of a conversion that can be told wrong before any work."""

from numbers import Integral
from pathlib import Path

from rehead.checkpoint.own import require_described
from rehead.config import GPTConfig
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.model import LanguageModel, skeleton
from rehead.model.base import require_model


def require_seed(seed: int) -> None:
    """Refuse a seed that a generator does not take."""
    if not isinstance(seed, Integral) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed!r:.40}. Use 0 up to {2**63 - 1}.")


def require_passes(teach: int) -> None:
    """Refuse what is no number of passes."""
    if not isinstance(teach, int) or isinstance(teach, bool) or teach < 0:
        raise ConfigError(f"teach={teach!r:.40}. Give the number of passes over the calibration, 0 for none.")


def nothing_to_learn(teach: int) -> ConfigError:
    """Return the error for passes of a conversion that loses nothing."""
    return ConfigError(
        f"teach={teach}: this conversion is exact, so there is nothing to learn. Leave it out."
    )


def require_text(passes: int, some: object) -> None:
    """Refuse passes without a text."""
    if passes and not some:
        raise ConfigError(f"teach={passes} without a text to learn from. Give a calibration text.")


def require_apart(source: Path, destination: Path) -> None:
    """Refuse a destination that is the source, in it, or around it, and one without a name of its own, as "." is."""
    here, there = source.resolve(), destination.resolve()
    if here == there or here in there.parents or there in here.parents:
        both = (
            f"{source} is inside {destination}"
            if there in here.parents
            else f"{destination} is inside {source}"
        )
        found = f"{destination} is the source itself" if here == there else both
        raise UsageError(f"{found}: the source is never touched. Choose another folder for the result.")
    if destination.name in ("", ".."):
        raise InvalidInput(f"{destination} exists: choose another name.")


def require_source(model: object) -> None:
    """Refuse anything but a model that its config describes, in weights and in parts, without hooks.

    The result computes what the config says.
    """
    require_model(model)
    assert isinstance(model, LanguageModel)
    require_described(model)
    kinds = {name: type(part) for name, part in skeleton(model.config).named_modules()}
    for name, part in model.named_modules():
        found = ""
        if type(part) is not kinds.get(name):
            built = kinds[name].__name__ if name in kinds else "none"
            found = f"is of class {type(part).__name__}, by its config of {built}"
        elif "forward" in vars(part):
            found = "has a forward of its own"
        elif part._forward_hooks or part._forward_pre_hooks:
            found = "has hooks"
        if found:
            raise UsageError(
                f"{name or 'the model'} {found}: the result would compute without it. Convert the model as it was "
                "built, and change the result."
            )


def require_heads(model: LanguageModel) -> GPTConfig:
    """Return the config of a model with attention; ConfigError for any other."""
    if not isinstance(model.config, GPTConfig):
        raise ConfigError(
            f"a model of type {model.config.model_type} has no heads to convert: only a gpt has any."
        )
    return model.config
