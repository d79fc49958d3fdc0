"""One decoded token as a list of operations, which `lower` of a model, a layer or an attention builds.

`forward` is the definition, for any number of tokens. `lower` describes the same computation for one new token of every
sequence, as data. PyTorch, CUDA graphs and C++ execute the same list (rehead.decoding); none of them knows a
variant. Every value is a row per sequence, (B, n).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from rehead.attention.rope import Rotary
from rehead.attention.slot import Slot
from rehead.nn.few_rows import is_plain

Gelu = Literal["", "tanh", "erf"]
"""A form of GELU, or none."""


@dataclass(eq=False)
class Op(ABC):
    """One operation. `y` is its result, of `shape` (heads, width); `Program.add` sets it."""

    y: Slot = field(init=False)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Number of heads of the result, and their width."""

    @property
    def reads(self) -> Iterator[Slot]:
        """The slots that the operation reads."""
        for name, value in vars(self).items():
            if name != "y":
                yield from _slots(value)


def _slots(value: object) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ():
        yield from _slots(part)


@dataclass(eq=False)
class Unary(Op):
    """An operation on x, whose result has the shape of x by default."""

    x: Slot

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of x."""
        return self.x.heads, self.x.width


@dataclass(eq=False)
class Embed(Op):
    """Token embeddings times `scale`, plus position embeddings."""

    tokens: nn.Embedding
    positions: nn.Embedding | None
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """One head of the model's width."""
        return 1, self.tokens.weight.shape[1]


@dataclass(eq=False)
class Norm(Unary):
    """`module`(x), applied to each head."""

    module: nn.Module


@dataclass(eq=False)
class InverseRMS(Unary):
    """1 / RMS of each head, with `eps` added to the mean square."""

    eps: float

    @property
    def shape(self) -> tuple[int, int]:
        """One number per head."""
        return self.x.heads, 1


@dataclass(eq=False)
class Linear(Unary):
    """Linear `layers` applied to the same x, their outputs (of `widths`) concatenated, then `gelu`, if any."""

    layers: tuple[nn.Module, ...]
    widths: tuple[int, ...]
    gelu: Gelu = ""

    @property
    def shape(self) -> tuple[int, int]:
        """One head: all outputs."""
        return 1, sum(self.widths)

    @property
    def parts(self) -> list[Slot]:
        """The outputs of the layers."""
        ends = [sum(self.widths[: i + 1]) for i in range(len(self.widths))]
        return [self.y.columns(end - width, width) for end, width in zip(ends, self.widths, strict=True)]


@dataclass(eq=False)
class PerHead(Unary):
    """Each head of x (H heads of N) times the matrix of its KV head: `weight` (K, N, M), or (K, M, N) if `transposed`.

    Query head h uses matrix h // (H / K); `bias` is (K, M).
    """

    weight: Tensor
    bias: Tensor | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """H heads of M."""
        return self.x.heads, self.weight.shape[1 if self.transposed else 2]


@dataclass(eq=False)
class Gate(Op):
    """silu(gate) * up, or with GELU's tanh form."""

    gate: Slot
    up: Slot
    has_gelu: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of `up`."""
        return 1, self.up.width


@dataclass(eq=False)
class Rotate(Op):
    """The heads of all `xs`, concatenated in this order and rotated by the new token's position."""

    xs: tuple[Slot, ...]
    rotary: Rotary

    @property
    def shape(self) -> tuple[int, int]:
        """The heads of all `xs`, of equal width."""
        return sum(x.heads for x in self.xs), self.xs[0].width


@dataclass(eq=False)
class Store(Op):
    """Store the new token's rows in the cache of `layer`, by name; the parts of a row are concatenated."""

    layer: int
    rows: dict[str, tuple[Slot, ...]]

    @property
    def shape(self) -> tuple[int, int]:
        """A store has no result."""
        return 1, 0


@dataclass(eq=False)
class Attend(Op):
    """Attention over the rows `key` and `value` in the cache of `layer`, the new ones included.

    The parts `query` of a query head are concatenated. There are `n_kv_head` heads of keys; a value is the
    first `width` columns of its row. Query head h reads KV head h // (H / K), or h % K if `modular`. With `softcap`,
    a score s becomes `softcap` tanh(s / `softcap`). With `n_scale`, there is one KV head; its rows end with that many
    numbers, the query heads form as many groups, and number i of a row multiplies the scores of group i.
    """

    layer: int
    query: tuple[Slot, ...]
    key: str
    value: str
    n_kv_head: int
    width: int
    scale: float
    modular: bool = False
    softcap: float | None = None
    n_scale: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Query heads of the width of a value."""
        return self.query[0].heads, self.width


@dataclass(eq=False)
class AttendRebuilt(Op):
    """Attention over the rows `latent`, from which `key_up` (K, N, R) rebuilds the keys; the latents are summed.

    A rebuilt key gets its `key_bias` (K, N), is normed by `key_norm` and rotated by the position of its row.
    """

    layer: int
    query: Slot
    key_up: Tensor
    key_bias: Tensor | None
    key_norm: nn.RMSNorm | None
    rotary: Rotary
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Query heads of the width of a latent."""
        return self.query.heads, self.key_up.shape[2]


@dataclass(eq=False)
class Add(Unary):
    """`onto` += `scale` x, in place."""

    onto: Slot
    scale: float


@dataclass(eq=False)
class Scale(Unary):
    """x times `factor`."""

    factor: float


@dataclass(eq=False)
class SoftCap(Unary):
    """`cap` tanh(x / `cap`)."""

    cap: float


@dataclass(eq=False)
class Call(Unary):
    """A call of `module` with one token; an attention is passed the cache of `layer`."""

    module: nn.Module
    width: int
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """One head of the module's output width."""
        return 1, self.width


class Program:
    """Operations in order; the last one gives the result."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(self, op: Op) -> Slot:
        """Append `op` and return its result."""
        heads, width = op.shape
        op.y = Slot(len(self.ops), heads * width, 0, heads, width, width)
        self.ops.append(op)
        return op.y

    def linear(self, x: Slot, *layers: tuple[nn.Module, int], gelu: Gelu = "") -> list[Slot]:
        """Append a `Linear` of layers and their widths; return the output of each layer."""
        widths = tuple(len(layer.weight) if is_plain(layer) else width for layer, width in layers)
        op = Linear(x, tuple(layer for layer, _ in layers), widths, gelu)
        self.add(op)
        return op.parts

    def call(self, module: nn.Module, x: Slot, width: int, *layer: int) -> Slot:
        """Append the operations of `module.lower`, or a `Call` if it does not describe all; pass on `layer`."""
        if describes(module):
            lower: Callable[..., Slot] = module.lower  # type: ignore[assignment]  # torch types attributes as tensors or modules
            return lower(self, x, *layer)
        return self.add(Call(x, module, width, *layer))


def describes(module: nn.Module) -> bool:
    """Whether `lower` says all that a module computes: its own class defines it, and no method is patched.

    A subclass that changes nothing of it repeats it, `lower = Parent.lower`.
    """
    kind = type(module)
    return "lower" in vars(kind) and not any(callable(getattr(kind, name, None)) for name in vars(module))
