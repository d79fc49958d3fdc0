"""Programs in PyTorch: every operation is bound once to its weights and operands, as a function."""

from collections.abc import Callable, Sequence
from functools import singledispatch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rehead.attention import LayerCache
from rehead.attention.kernels.latent_token import attend_latent_token
from rehead.attention.kernels.token import attend_scaled_token, attend_token, token_weights
from rehead.attention.key_scales import inverse_rms
from rehead.attention.program import (
    Add,
    Attend,
    AttendRebuilt,
    Call,
    Embed,
    Gate,
    InverseRMS,
    Linear,
    Norm,
    Op,
    PerHead,
    Program,
    Rotate,
    Scale,
    SoftCap,
    Store,
)
from rehead.attention.slot import Slot, side_by_side
from rehead.decoding.called import called_decoder
from rehead.decoding.check import Check
from rehead.decoding.lowering import lowered, stored_layers
from rehead.decoding.token import Token, next_token
from rehead.model import LanguageModel
from rehead.model.base import Decode
from rehead.nn.few_rows import JoinedLinear

Values = list[Tensor]
"""Results of operations by register: rows (B, n)."""
Run = Callable[[Values, Token], Tensor]
Read = Callable[[Values], Tensor]


def torch_decoder(model: LanguageModel) -> Decode:
    """Return a decoder that runs the model's program in PyTorch, or `forward` if it has no program."""
    program = lowered(model)
    if program is None:
        return called_decoder(model)
    run, layers, check = TorchProgram(program), stored_layers(program), Check(model)

    def decode(ids: Tensor | np.ndarray, caches: Sequence[LayerCache]) -> Tensor:
        with next_token(check(ids, caches), caches, layers) as token:
            return run(token)

    return decode


class TorchProgram:
    """The operations of a program with the current weights; small weights of the same input are concatenated."""

    def __init__(self, program: Program) -> None:
        allocated, self._n_register = registers(program)
        reader = Reader(allocated)
        self._runs = [(allocated[op.y.source], bind(op, reader)) for op in program.ops]

    @torch.no_grad()
    def __call__(self, token: Token) -> Tensor:
        """Return the last operation's result; for a model the logits, (B, vocab)."""
        values: Values = [token.ids] * self._n_register
        for register, run in self._runs:
            values[register] = run(values, token)
        return values[self._runs[-1][0]]


def registers(program: Program) -> tuple[list[int], int]:
    """Assign a register to each operation's result; return these and their number.

    A register is free again after the last operation that reads it.
    """
    last_reader = {slot.source: index for index, op in enumerate(program.ops) for slot in op.reads}
    allocated: list[int] = []
    free: list[int] = []
    n = 0
    for index in range(len(program.ops)):
        if free:
            allocated.append(free.pop())
        else:
            allocated.append(n)
            n += 1
        free += [allocated[source] for source, end in last_reader.items() if end == index]
        if index not in last_reader:  # the result is not read
            free.append(allocated[index])
    return allocated, n


class Reader:
    """Builds functions that read slots from the registers."""

    def __init__(self, registers: Sequence[int]) -> None:
        self._registers = registers

    def one_head(self, slot: Slot) -> Read:
        """Return a function that reads a slot of one head, (B, width)."""
        register, width, row, offset = self._registers[slot.source], slot.width, slot.row_width, slot.offset
        assert slot.heads == 1
        if width == row:
            return lambda values: values[register]
        return lambda values: values[register].narrow(1, offset, width)

    def heads(self, slot: Slot) -> Read:
        """Return a function that reads the heads of a slot, (B, H, width)."""
        register, row, offset = self._registers[slot.source], slot.row_width, slot.offset
        heads, stride, width = slot.heads, slot.stride, slot.width

        def read(values: Values) -> Tensor:
            x = values[register].contiguous()  # a module may return a view of other rows
            return x.as_strided((len(x), heads, width), (row, stride, 1), x.storage_offset() + offset)

        return read


@singledispatch
def bind(op: Op, read: Reader) -> Run:
    """Return the function that computes an operation from the results of others."""
    raise NotImplementedError(type(op).__name__)


@bind.register
def _(op: Embed, read: Reader) -> Run:
    def run(values: Values, token: Token) -> Tensor:
        x = op.tokens(token.ids)
        if op.scale != 1:
            x = x * op.scale
        return x if op.positions is None else x + op.positions(token.table_rows())

    return run


@bind.register
def _(op: Norm, read: Reader) -> Run:
    module = op.module
    if op.x.heads == 1:
        row = read.one_head(op.x)

        def norm(values: Values, _: Token) -> Tensor:
            x = row(values)
            y: Tensor = module(x)
            return y.clone() if y is x else y  # x may be added to before y is read

        return norm
    heads = read.heads(op.x)
    return lambda values, _: module(heads(values)).flatten(1)


@bind.register
def _(op: InverseRMS, read: Reader) -> Run:
    heads, eps = read.heads(op.x), op.eps
    return lambda values, _: inverse_rms(heads(values), eps)


@bind.register
def _(op: Linear, read: Reader) -> Run:
    x, product = read.one_head(op.x), JoinedLinear(*op.layers)
    if op.gelu:
        form = "none" if op.gelu == "erf" else "tanh"
        return lambda values, _: F.gelu(product(x(values)), approximate=form)
    return lambda values, _: product(x(values))


@bind.register
def _(op: PerHead, read: Reader) -> Run:
    x, bias = read.heads(op.x), op.bias
    weight = op.weight.transpose(1, 2) if op.transposed else op.weight
    K, H, N, M = len(weight), op.x.heads, op.x.width, weight.shape[2]

    def run(values: Values, token: Token) -> Tensor:
        by_head = x(values).unflatten(1, (K, H // K)).transpose(0, 1).reshape(K, -1, N)
        y = torch.bmm(by_head, weight).view(K, -1, H // K, M).transpose(0, 1)
        return (y if bias is None else y + bias[:, None]).reshape(-1, H * M)

    return run


@bind.register
def _(op: Gate, read: Reader) -> Run:
    gate, up = read.one_head(op.gate), read.one_head(op.up)
    if op.has_gelu:
        return lambda values, _: F.gelu(gate(values), approximate="tanh") * up(values)
    return lambda values, _: F.silu(gate(values)) * up(values)


@bind.register
def _(op: Rotate, read: Reader) -> Run:
    xs, rotary = [read.heads(x) for x in side_by_side(op.xs)], op.rotary

    def run(values: Values, token: Token) -> Tensor:
        x = xs[0](values) if len(xs) == 1 else torch.cat([x(values) for x in xs], dim=1)
        return rotary.apply(x, *token.cos_sin(rotary, x.dtype)).flatten(1)

    return run


@bind.register
def _(op: Store, read: Reader) -> Run:
    rows = [(name, [read.heads(part) for part in parts]) for name, parts in op.rows.items()]

    def run(values: Values, token: Token) -> Tensor:
        cache, row = token.caches[op.layer], token.row(op.layer)
        for name, parts in rows:
            cache.write_token(name, row, joined(parts, values))
        return values[0]

    return run


@bind.register
def _(op: Attend, read: Reader) -> Run:
    query, K, layer, scale = [read.heads(part) for part in op.query], op.n_kv_head, op.layer, op.scale
    H, E, V = op.query[0].heads, sum(part.width for part in op.query), op.width

    def one_shared_row(values: Values, token: Token) -> Tensor:
        n_row, q = token.row(layer).n_used, joined(query, values)
        rows = token.caches[layer].rows_until(op.key, n_row)
        bias = token.bias(layer, 1, q.dtype)
        return attend_latent_token(q, rows, V, scale, bias).flatten(1)

    def grouped(values: Values, token: Token) -> Tensor:
        n_row, q, cache = token.row(layer).n_used, joined(query, values), token.caches[layer]
        if op.modular:
            q = q.unflatten(1, (-1, K)).transpose(1, 2).flatten(1, 2)
        q = q.reshape(-1, H // K, E)
        bias = token.bias(layer, K, q.dtype)
        keys, rows = cache.rows_until(op.key, n_row), cache.rows_until(op.value, n_row)
        y = attend_token(q, keys, rows, scale, bias, op.softcap)
        if op.modular:
            y = y.view(-1, K, H // K, V).transpose(1, 2)
        return y.reshape(-1, H * V)

    def one_scaled_row(values: Values, token: Token) -> Tensor:
        q, rows = joined(query, values), token.caches[layer].rows_until(op.key, token.row(layer).n_used)
        return attend_scaled_token(q, rows, V, scale, token.bias(layer, 1, q.dtype)).flatten(1)

    one_row = one_scaled_row if op.n_scale else one_shared_row
    return one_row if op.key == op.value and K == 1 and op.softcap is None else grouped


@bind.register
def _(op: AttendRebuilt, read: Reader) -> Run:
    query, (K, N, R), H = read.heads(op.query), op.key_up.shape, op.query.heads

    def run(values: Values, token: Token) -> Tensor:
        cache, n_row, q = token.caches[op.layer], token.row(op.layer).n_used, query(values)
        latents = cache.rows_until("latent", n_row).narrow(2, 0, R)  # B S R
        keys = torch.einsum("bsr,knr->bskn", latents, op.key_up)
        if op.key_bias is not None:
            keys = keys + op.key_bias
        if op.key_norm is not None:
            keys = op.key_norm(keys)
        keys = op.rotary.apply(keys, *token.key_cos_sin(op.rotary, keys.dtype, op.layer))  # B S K N
        bias = token.bias(op.layer, K, q.dtype)
        weights = token_weights(q.reshape(-1, H // K, N), keys.transpose(1, 2).flatten(0, 1), op.scale, bias)
        return torch.bmm(weights.view(-1, H, n_row), latents).flatten(1)

    return run


@bind.register
def _(op: Add, read: Reader) -> Run:
    onto, x, scale = read.one_head(op.onto), read.one_head(op.x), op.scale
    return lambda values, _: onto(values).add_(x(values), alpha=scale)


@bind.register
def _(op: Scale, read: Reader) -> Run:
    x, factor = read.one_head(op.x), op.factor
    return lambda values, _: x(values) * factor


@bind.register
def _(op: SoftCap, read: Reader) -> Run:
    x, cap = read.one_head(op.x), op.cap
    return lambda values, _: cap * torch.tanh(x(values) / cap)


@bind.register
def _(op: Call, read: Reader) -> Run:
    x, module, layer = read.one_head(op.x), op.module, op.layer
    if layer is None:
        return lambda values, _: module(x(values)[:, None])[:, 0].contiguous()
    return lambda values, token: module(x(values)[:, None], cache=token.caches[layer])[:, 0].contiguous()


def joined(parts: Sequence[Read], values: Values) -> Tensor:
    """Read the parts and concatenate them."""
    return parts[0](values) if len(parts) == 1 else torch.cat([part(values) for part in parts], dim=-1)
