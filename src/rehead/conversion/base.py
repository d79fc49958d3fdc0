"""The contract of a conversion: from one attention to another, with a promise.

A conversion knows one step. `search.py` finds a sequence of steps, `converter.py` applies it to a model,
and `certificate.py` reports the result, in the same way for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, variants
from rehead.checkpoint.files.deferred import materialise
from rehead.errors import ConfigError
from rehead.registry import Registry

S = TypeVar("S", bound=AttentionConfig)
R = TypeVar("R", bound=AttentionConfig)
Weights = dict[str, Tensor]
"""The float64 weights of one attention, by the names of its module."""


def projections(weights: Weights, *names: str) -> Weights:
    """Return the weights and biases of these projections."""
    return {name: weight for name, weight in weights.items() if name.partition(".")[0] in names}


def with_bias(weights: Weights, name: str) -> Float64[Tensor, "N C"]:
    """Return a weight and its bias, zero without one, as one projection of [x; 1]."""
    weight = weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias", weight.new_zeros(len(weight)))
    return torch.cat([weight, bias[:, None]], dim=1)


def in_parts(name: str, both: Float64[Tensor, "N C"], *, biased: bool) -> Weights:
    """Return the weight and the bias of a projection of [x; 1]; the weight alone if it has none."""
    parts = {f"{name}.weight": both[:, :-1], f"{name}.bias": both[:, -1]}
    return parts if biased else {f"{name}.weight": both[:, :-1]}


class CannotConvert(ConfigError):
    """No conversion gives what is asked for.

    `reason` is the first obstacle, without the way around it; `step` the conversion that meets it, if one does.
    """

    def __init__(self, message: str, reason: str = "", step: str = "") -> None:
        super().__init__(message)
        self.reason, self.step = reason, step


@dataclass(frozen=True, kw_only=True)
class Promise:
    """`exact`: the same function up to rounding, for all weights. `why` is the reason."""

    exact: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of one layer over a text: second moments, summed in float64 over its tokens.

    `inputs` is E[x x^T] of x, what the keys and values are made from, with a constant 1 as its last
    number, which biases multiply. `pair` is that of `rehead.conversion.fit.pair`, of x without the constant
    and of the loss's gradient g with respect to the stacked keys and values: how much an error in each
    of them matters, and on which inputs. `turns` is that of `rehead.conversion.fit.turns`: how much the
    rotation of each pair of a head's numbers matters.
    """

    inputs: Float64[Tensor, "C C"] | None = None
    pair: tuple[Float64[Tensor, "D D"], Float64[Tensor, "N N"]] | None = None
    turns: Float64[Tensor, "S H F"] | None = None

    @classmethod
    def of(cls, tensors: "Weights") -> "Statistics":
        """Return the statistics whose `tensors()` these are."""
        pair = (tensors["pair.inputs"], tensors["pair.outputs"]) if "pair.inputs" in tensors else None
        return cls(inputs=tensors.get("inputs"), pair=pair, turns=tensors.get("turns"))

    def tensors(self) -> "Weights":
        """Return the statistics by name, as stored in files."""
        both = (None, None) if self.pair is None else self.pair
        named = {"inputs": self.inputs, "pair.inputs": both[0], "pair.outputs": both[1], "turns": self.turns}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def in_memory(self) -> "Statistics":
        """Return the statistics in memory, with deferred ones read from their file."""
        return Statistics.of({name: materialise(tensor) for name, tensor in self.tensors().items()})

    def weighing(self, needs: tuple[str, ...]) -> tuple[Tensor | None, Tensor | None]:
        """Return the moments of inputs and outputs by which a method weighs an error; None for equal weights."""
        if "pair" in needs:
            assert self.pair is not None
            return self.pair
        if "inputs" in needs:
            assert self.inputs is not None
            return self.inputs[:-1, :-1], None
        return None, None


@dataclass(frozen=True, kw_only=True)
class Converted:
    """New weights, and the error in what makes the keys and values, as a share of their energy.

    `lost` weighs it as the method does, by the statistics of a text; `residual` counts all weights alike, so
    directions that do not occur in the text count too.
    """

    weights: Weights
    lost: float = 0.0
    residual: float = 0.0


class Conversion(ABC, Generic[S, R]):
    """One step from configs S to configs R. Its docstring is its entry in docs/convert.md."""

    takes: ClassVar[type[AttentionConfig] | UnionType]
    """S. The search calls `steps` with no other config."""
    source: ClassVar[str]
    target: ClassVar[str]
    costs: ClassVar[str]
    """Its effect on cache, parameters and speed, in a sentence."""
    methods: ClassVar[dict[str, tuple[str, ...]]] = {}
    """For an approximation: its methods, the preferred first, and which `Statistics` each one needs."""
    fitted: ClassVar[frozenset[str]] = frozenset()
    """The methods whose weights depend on the calibration text, if there is one."""

    @abstractmethod
    def steps(self, source: S, target: AttentionConfig, d_model: int) -> Iterator[R]:
        """Yield what this conversion can make of `source` that may lead to `target`."""

    @abstractmethod
    def promise(self, source: S, result: R, d_model: int) -> Promise:
        """Return what holds for every model."""

    @abstractmethod
    def convert(
        self, weights: Weights, source: S, result: R, statistics: Statistics, method: str
    ) -> Converted:
        """Return the weights of `result`. `method` is one of `methods`, or empty where there are none."""

    def serves(self, target: AttentionConfig) -> bool:
        """Whether it can be a step towards `target` at all."""
        return True

    def refusal(self, source: S) -> str:
        """Return why it cannot start from `source`, empty if it can."""
        return ""

    def unusable(self, source: S) -> dict[str, str]:
        """Return those of its methods that cannot start from `source`, with the reasons."""
        return {}


class ExactConversion(Conversion[S, R]):
    """A conversion that is exact for all weights, so it has no methods and reads no text."""

    why: ClassVar[str]
    """The reason of its promise."""

    def promise(self, source: S, result: R, d_model: int) -> Promise:
        """Promise exactness."""
        return Promise(exact=True, why=self.why)

    def convert(
        self, weights: Weights, source: S, result: R, statistics: Statistics, method: str
    ) -> Converted:
        """Return the weights of `result`, with no error."""
        return Converted(weights=self.rewrite(weights, source, result))

    @abstractmethod
    def rewrite(self, weights: Weights, source: S, result: R) -> Weights:
        """Return the weights of `result`."""


def common(config: GroupedConfig | LatentConfig) -> dict[str, Any]:
    """Return the fields that mean the same in every variant, for a config of another one."""
    names = ("n_query_head", "v_head_dim", "qk_norm_eps", "qkv_bias", "o_bias")
    shared = ("d_context", "causal", "window", "rope", "attn_pdrop")
    return {name: getattr(config, name) for name in names + shared}


conversions: Registry[type[Conversion[Any, Any]]] = Registry("conversion")


def summary(name: str) -> str:
    """Return what a conversion does, in a sentence: the first of its docstring."""
    return (conversions[name].__doc__ or "").partition("\n\n")[0]


def starts_from(conversion: type[Conversion[Any, Any]], kind: type[AttentionConfig]) -> bool:
    """Whether a conversion takes configs of a class; one derived from what it takes is another attention."""
    return kind in (get_args(conversion.takes) or (conversion.takes,))


def heads_of(config: AttentionConfig) -> GroupedConfig | LatentConfig:
    """Return `config`, or an equivalent config that conversions can start from.

    Raises ConfigError for a variant that no conversion knows.
    """
    equal = config.equivalent()
    if type(equal) is GroupedConfig or type(equal) is LatentConfig:
        return equal
    known = [
        name for name in variants if any(starts_from(conversions[c], variants[name]) for c in conversions)
    ]
    raise ConfigError(
        f"{config.name}: no conversion starts from this attention, only from {', '.join(known)}. Keep it as it is."
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """A conversion applied to a config."""

    name: str
    source: AttentionConfig
    result: AttentionConfig
    promise: Promise

    @property
    def conversion(self) -> Conversion[Any, Any]:
        """The conversion registered under the name."""
        return conversions[self.name]()

    def method(self, wanted: str | None, *, calibrated: bool) -> str:
        """Return the method to use: `wanted` if this step has it, else the first whose statistics are available.

        Returns an empty text for an exact step. Raises ConfigError for one that reads a text where there is none.
        """
        methods = {} if self.promise.exact else self.conversion.methods
        unusable = self.conversion.unusable(self.source)
        known = {name: needs for name, needs in methods.items() if name not in unusable}
        if wanted in known:
            if known[wanted] and not calibrated:
                raise ConfigError(
                    f"method={wanted} reads a text. Give a calibration text, or use the method svd."
                )
            return str(wanted)
        return next((name for name, needs in known.items() if calibrated or not needs), "")

    def is_fitted(self, method: str) -> bool:
        """Whether `method` is fitted to a calibration text."""
        return method in self.conversion.fitted


def methods() -> dict[str, list[str]]:
    """Return every method's name, and the conversions that have it."""
    found: dict[str, list[str]] = {}
    for name in conversions:
        for method in conversions[name].methods:
            found.setdefault(method, []).append(name)
    return found


def require_method(name: str | None, steps: list[Step]) -> None:
    """Refuse a method that none of the steps uses, or that one of them cannot use."""
    for step in steps if name is not None else ():
        unusable = step.conversion.unusable(step.source)
        if name in unusable and not step.promise.exact:
            others = " or ".join(other for other in step.conversion.methods if other not in unusable)
            raise ConfigError(f"method={name!r} with {unusable[name]}. Use {others}.")
    if name is None or any(name in step.conversion.methods for step in steps):
        return
    usable = list(dict.fromkeys(method for step in steps for method in step.conversion.methods))
    if name not in methods():
        raise ConfigError(f"method={name!r} is unknown. Use one of {', '.join(methods())}.")
    way = ", ".join(dict.fromkeys(step.name for step in steps)) or "anything to be done here"
    hint = f"Use one of {', '.join(usable)}" if usable else "Leave it out"
    raise ConfigError(f"method={name!r} belongs to {', '.join(methods()[name])}, not to {way}. {hint}.")
