"""One new token as a list of operations, written down by `lower` of a model, a layer or an attention.

`forward` is the definition, for any number of tokens. `lower` describes the same computation for one new token of every
sequence, as data: PyTorch, CUDA graphs and C++ execute one description (rehead.decoding), and none of them knows a
variant. All numbers are rows of a batch, (B, n).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from rehead.attention.rope import Rotary


@dataclass(frozen=True)
class Slot:
    """`heads` times `width` numbers of a token: head h begins at column `offset` + h * `stride` of a row.

    `source` is the operation that computes the row, which has `row` columns. The stride of one head is its width.
    """

    source: int
    row: int
    offset: int
    heads: int
    stride: int
    width: int

    def split(self, heads: int) -> "Slot":
        """One head cut into equal ones."""
        return replace(self, heads=heads, stride=self.width // heads, width=self.width // heads)

    def head(self, first: int, n: int) -> "Slot":
        """`n` of the heads."""
        stride = self.stride if n > 1 else self.width
        return replace(self, offset=self.offset + first * self.stride, heads=n, stride=stride)

    def columns(self, start: int, n: int) -> "Slot":
        """`n` columns of every head."""
        return replace(self, offset=self.offset + start, width=n, stride=self.stride if self.heads > 1 else n)

    def flat(self) -> "Slot":
        """The heads of a whole row as one."""
        assert self.stride == self.width
        return replace(self, heads=1, stride=self.heads * self.width, width=self.heads * self.width)


@dataclass(eq=False)
class Op(ABC):
    """One operation. `y` is what it computes, of `shape` (heads, width); `Program.add` numbers it."""

    y: Slot = field(init=False)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Heads and their width."""

    @property
    def reads(self) -> Iterator[Slot]:
        """The slots it reads."""
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
    """An operation on x, which gives as many numbers unless it says otherwise."""

    x: Slot

    @property
    def shape(self) -> tuple[int, int]:
        """As x."""
        return self.x.heads, self.x.width


@dataclass(eq=False)
class Embed(Op):
    """The rows of the new ids, times `scale`, plus those of their positions."""

    tokens: nn.Embedding
    positions: nn.Embedding | None
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """The model's width."""
        return 1, self.tokens.embedding_dim


@dataclass(eq=False)
class Norm(Unary):
    """`module`(x), of every head."""

    module: nn.Module


@dataclass(eq=False)
class Linear(Unary):
    """`layers` of the same x, their outputs of `widths` side by side; with `gelu`, its tanh approximation of them."""

    layers: tuple[nn.Module, ...]
    widths: tuple[int, ...]
    gelu: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """All outputs."""
        return 1, sum(self.widths)

    @property
    def parts(self) -> list[Slot]:
        """The output of each layer."""
        ends = [sum(self.widths[: i + 1]) for i in range(len(self.widths))]
        return [self.y.columns(end - width, width) for end, width in zip(ends, self.widths, strict=True)]


@dataclass(eq=False)
class PerHead(Unary):
    """x (H heads of N) times a matrix of each KV head: `weight` (K, N, M), or (K, M, N) and `transposed`.

    Query head h takes matrix h // (H / K); `bias` is (K, M).
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
    """silu(gate) * up."""

    gate: Slot
    up: Slot

    @property
    def shape(self) -> tuple[int, int]:
        """As both."""
        return 1, self.up.width


@dataclass(eq=False)
class Rotate(Op):
    """All heads of `xs`, in this order, rotated by the new token's position."""

    xs: tuple[Slot, ...]
    rotary: Rotary

    @property
    def shape(self) -> tuple[int, int]:
        """All heads."""
        return sum(x.heads for x in self.xs), self.xs[0].width


@dataclass(eq=False)
class Store(Op):
    """The new token's rows in the cache of `layer`, by name; the parts of a row side by side."""

    layer: int
    rows: dict[str, tuple[Slot, ...]]

    @property
    def shape(self) -> tuple[int, int]:
        """Nothing."""
        return 1, 0


@dataclass(eq=False)
class Attend(Op):
    """What the query heads gather from the rows `key` and `value` in the cache of `layer`, the new ones included.

    `query` are the parts of a query head, side by side. `n_kv_head` heads of keys; of a value, the first `width`
    columns. Query head h reads KV head h // (H / K), or h % K if `modular`.
    """

    layer: int
    query: tuple[Slot, ...]
    key: str
    value: str
    n_kv_head: int
    width: int
    scale: float
    modular: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Query heads, and the width of a value."""
        return self.query[0].heads, self.width


@dataclass(eq=False)
class AttendRebuilt(Op):
    """The same over rows `latent`, summing latents: `keys`, (B S R) to (B S K N), rebuilds all keys, to be rotated."""

    layer: int
    query: Slot
    keys: Callable[[Tensor], Tensor]
    rotary: Rotary
    n_kv_head: int
    width: int
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Query heads, and the width of a latent."""
        return self.query.heads, self.width


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
class Call(Unary):
    """`module` as it is, of one token; an attention with the cache of `layer`."""

    module: nn.Module
    width: int
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """As the module gives it."""
        return 1, self.width


class Program:
    """Operations in order; the last one gives the result."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(self, op: Op) -> Slot:
        """Append `op`; returns what it computes."""
        heads, width = op.shape
        op.y = Slot(len(self.ops), heads * width, 0, heads, width, width)
        self.ops.append(op)
        return op.y

    def linear(self, x: Slot, *layers: tuple[nn.Module, int], gelu: bool = False) -> list[Slot]:
        """Append a `Linear` of layers and their widths; returns the output of each."""
        op = Linear(x, tuple(layer for layer, _ in layers), tuple(width for _, width in layers), gelu)
        self.add(op)
        return op.parts

    def call(self, module: nn.Module, x: Slot, width: int, *layer: int) -> Slot:
        """Append what `module.lower` writes, or a call of a module without; an attention is given its `layer`."""
        if describes(module):
            lower: Callable[..., Slot] = module.lower  # type: ignore[assignment]
            return lower(self, x, *layer)
        return self.add(Call(x, module, width, *layer))


def describes(module: nn.Module) -> bool:
    """Whether a module's `lower` says what its `forward` computes: no subclass or patch changed the latter alone."""
    if "forward" in vars(module):
        return False
    for kind in type(module).__mro__:
        if "lower" in vars(kind):
            return True
        if "forward" in vars(kind):
            return False
    return False
