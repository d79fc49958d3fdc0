"""Which programs decode.cpp can run."""

from collections import defaultdict

from torch import nn

from rehead.attention.key_scales import are_plain
from rehead.attention.program import (
    Add,
    Attend,
    AttendRebuilt,
    Call,
    Embed,
    Gate,
    Linear,
    Norm,
    Op,
    PerHead,
    Program,
    Rotate,
)
from rehead.attention.rope import Rotary
from rehead.attention.slot import Slot
from rehead.config import ModelConfig
from rehead.decoding.lowering import only_forward
from rehead.decoding.native_program import Span, span_of
from rehead.nn.few_rows import is_plain
from rehead.nn.norm import ZeroCenteredRMSNorm


def refusal(program: Program) -> str | None:
    """Return the reason why decode.cpp cannot run a program; None if it can."""
    previous: Op | None = None
    readers = defaultdict[int, list[tuple[Op, Span]]](list)
    for op in program.ops:
        for slot in op.reads:
            readers[slot.source].append((op, span_of(slot.source, slot)))
    for op in program.ops:
        modules: tuple[nn.Module, ...] = ()
        match op:
            case Linear(layers=layers):
                modules = tuple(layer for layer in layers if not is_plain(layer))
            case Norm(module=module):
                modules = () if _is_plain_norm(module) else (module,)
            case Embed(tokens=tokens, positions=positions):
                modules = tuple(
                    table for table in (tokens, positions) if table is not None and not _is_plain_table(table)
                )
            case Call(module=module):
                return f"it has {only_forward(module)}"
            case AttendRebuilt(key_norm=norm) if norm is not None:
                modules = () if are_plain(norm) and norm.weight is not None else (norm,)
            case Add(x=x) if not _can_add(previous, x):
                return "an addition that does not follow a linear layer or a norm"
        if modules:
            return f"it has a {type(modules[0]).__name__}"
        if (misfit := _misfit(op)) is not None:
            return misfit
        if any(_is_read_elsewhere(readers[slot.source], op, slot) for slot in _moved(op)):
            return f"a result that is read again after {type(op).__name__}"
        previous = op
    return None


def short_table(program: Program, config: ModelConfig) -> str | None:
    """Return the reason against a model with fewer embeddings than its config says: C++ would read beyond them."""
    for op in program.ops:
        if isinstance(op, Embed):
            tables = (op.tokens, config.vocab_size), (op.positions, config.context_limit)
            if any(table is not None and len(table.weight) < (least or 0) for table, least in tables):
                return "an embedding with fewer rows than the config says"
    return None


def _misfit(op: Op) -> str | None:
    """Return the reason against weights of sizes that do not fit, beyond which C++ would read."""
    match op:
        case Linear(x=x, layers=layers) if any(
            layer.get_parameter("weight").shape[1] != x.width for layer in layers
        ):
            return "a linear layer of another width than its input"
        case Linear(layers=layers) if any(
            isinstance(layer, nn.Linear) and layer.bias is not None and len(layer.bias) != len(layer.weight)
            for layer in layers
        ):
            return "a bias of another width than its linear layer"
        case Embed(tokens=tokens, positions=positions) if (
            positions is not None and positions.weight.shape[1] != tokens.weight.shape[1]
        ):
            return "embeddings of different widths"
        case PerHead(weight=weight, bias=bias, transposed=transposed) if (
            bias is not None and not transposed
        ) or weight[0].stride() != (weight.shape[2], 1):
            return "matrices of heads in an order that C++ does not read"
        case Rotate(rotary=rotary) | AttendRebuilt(rotary=rotary) if type(rotary) is not Rotary:
            return "a rotation of its own"
        case Rotate(xs=xs, rotary=rotary) if any(not rotary.width <= x.width == xs[0].width for x in xs):
            return "heads of other widths than their rotation"
        case Attend(query=(query, *_), n_kv_head=n_kv_head) if query.heads % n_kv_head:
            return "query heads that its KV heads do not divide"
        case Add(x=x, onto=onto) if x.width != onto.width:
            return "a sum of different widths"
        case Gate(gate=gate, up=up) if gate.width != up.width:
            return "a gate of another width than what it multiplies"
        case Norm(x=x, module=norm) if norm.get_parameter("weight").numel() != x.width:
            return "a norm of another width than its input"
        case AttendRebuilt(key_up=up, key_norm=norm) if (
            norm is not None and norm.weight.numel() != up.shape[1]
        ):
            return "a norm of another width than its keys"
    return None


def _can_add(op: Op | None, x: Slot) -> bool:
    """Whether an operation can add its result x instead of storing it."""
    if isinstance(op, Norm):
        return op.y == x and x.heads == 1
    return isinstance(op, Linear) and op.parts == [x] and not op.gelu


def _is_plain_norm(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.weight is not None and _is_unchanged(norm)


def _is_plain_table(table: nn.Embedding) -> bool:
    return table.max_norm is None and _is_unchanged(table)


def _is_unchanged(module: nn.Module) -> bool:
    """Whether a module is of a type that decode.cpp knows, with an unpatched `forward`."""
    known = nn.LayerNorm, nn.RMSNorm, ZeroCenteredRMSNorm, nn.Embedding
    return type(module) in known and "forward" not in vars(module)


def _moved(op: Op) -> tuple[Slot, ...]:
    """Return the slots that C++ computes in another place for the sake of `op`, or overwrites there."""
    match op:
        case Add(x=x):
            return (x,)
        case Gate(gate=gate):
            return (gate,)
        case Attend(query=query) if len(query) > 1:
            return query
    return ()


def _is_read_elsewhere(readers: list[tuple[Op, Span]], reader: Op, slot: Slot) -> bool:
    span = span_of(slot.source, slot)
    return any(op is not reader and span.overlaps(other) for op, other in readers)
