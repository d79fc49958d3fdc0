"""A program packed for decode.cpp: operations over fixed buffers, one call per token."""

from functools import singledispatchmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rehead.attention.program import (
    Add,
    Attend,
    AttendRebuilt,
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
from rehead.attention.rope import Rotary
from rehead.attention.slot import Slot
from rehead.decoding.native_op import PARTS, Kind, NativeOp, is_readable, kernel, panels
from rehead.errors import UsageError
from rehead.native import KernelUnavailable, out_of_memory
from rehead.nn.norm import ZeroCenteredRMSNorm


class Span(NamedTuple):
    """Columns of a buffer or of a cache's rows that an operation reads or writes."""

    of: int
    first: int
    end: int

    def overlaps(self, span: "Span") -> bool:
        """Whether both spans have a column in common."""
        return self.of == span.of and self.first < span.end and span.first < self.end


def span_of(of: int, slot: Slot) -> Span:
    """Return the columns of a slot."""
    return Span(of, slot.offset, slot.offset + (slot.heads - 1) * slot.stride + slot.width)


class NativeProgram:
    """A program bound to cache rows, the `stores` of each layer by name, for positions below `reach`."""

    def __init__(self, program: Program, stores: list[dict[str, Tensor]], reach: int) -> None:
        loaded = kernel()
        if isinstance(loaded, KernelUnavailable):
            raise loaded
        self._library, self._stores, self._reach = loaded, stores, reach
        self._batch = len(next(iter(stores[0].values())))
        self._tables: dict[Rotary, tuple[Tensor, Tensor]] = {}
        self._ops: list[NativeOp] = []
        self._held: list[Tensor] = []  # the tensors that operations point to
        self._pending: list[tuple[list[Span], list[Span]]] = []  # reads and writes since the last barrier
        self._buffers: dict[int, Tensor] = {}
        self._placed = self._join_queries(program)
        for index, op in enumerate(program.ops):
            following = program.ops[index + 1 : index + 2]
            if isinstance(op, Linear | Norm) and following and isinstance(following[0], Add):
                self._placed[op.y] = following[0].onto  # the linear layer or norm adds its result there
                self._pack(op, add=following[0].scale)
            elif isinstance(op, Add):
                self._placed[op.y] = self._resolved(op.onto)
            else:
                self._pack(op)
        self._array: Any = (NativeOp * len(self._ops))(*self._ops)
        self._result = self._address(program.ops[-1].y)[0]

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last operation's result for `ids` (B,) at `positions` (B,), both int64 and contiguous.

        Raises ResourceError if a thread had no memory.
        """
        n_thread = torch.get_num_threads()  # now: a forked process has one
        if self._library.step(
            self._array, len(self._ops), ids.data_ptr(), positions.data_ptr(), self._batch, n_thread
        ):
            raise out_of_memory("a decoded token")
        return self._result

    def _join_queries(self, program: Program) -> dict[Slot, Slot]:
        """Place the parts of each query side by side in one buffer; return the new slots by the original ones."""
        placed: dict[Slot, Slot] = {}
        for index, op in enumerate(program.ops):
            if isinstance(op, Attend) and len(op.query) > 1:
                heads, width, start = op.query[0].heads, sum(part.width for part in op.query), 0
                joint = Slot(-1 - index, heads * width, 0, heads, width, width)
                for part in op.query:
                    placed[part] = joint.columns(start, part.width)
                    start += part.width
        return placed

    def _resolved(self, slot: Slot) -> Slot:
        while slot in self._placed:
            slot = self._placed[slot]
        return slot

    def _address(self, slot: Slot) -> tuple[Tensor, Slot, Span]:
        """Return the buffer from a slot's first column on, the slot as placed, and its span."""
        slot = self._resolved(slot)
        if slot.source not in self._buffers:
            self._buffers[slot.source] = torch.zeros(
                self._batch, slot.row_width, dtype=torch.float32, device="cpu"
            )
        buffer = self._buffers[slot.source]
        return buffer[:, slot.offset :], slot, span_of(buffer.data_ptr(), slot)

    def _emit(
        self,
        kind: Kind,
        x: Slot | None = None,
        y: Slot | None = None,
        store: tuple[Tensor, ...] = (),
        **fields: Tensor | float | int | None,
    ) -> None:
        """Append an operation, with tensors as pointers. Add a barrier before it if it overlaps a pending one."""
        op = NativeOp(kind=kind, heads=1, group=1, scale=1.0)
        reads, writes, operands = [], [], dict[str, Tensor | float | int | None]()
        if x is not None:
            tensor, x, span = self._address(x)
            reads.append(span)
            operands |= {"x": tensor, "x_row": x.row_width, "x_head": x.stride}
        if y is not None:
            tensor, y, span = self._address(y)
            writes.append(span)
            operands |= {"y": tensor, "y_row": y.row_width, "y_head": y.stride}
        rows = [Span(tensor.data_ptr(), 0, 1) for tensor in store]
        (writes if kind == Kind.STORE else reads).extend(rows)
        for name, value in (operands | fields).items():
            if isinstance(value, Tensor):
                self._held.append(value.detach())  # its memory, whatever becomes of the weight
                if value.dtype not in (torch.float32, torch.bfloat16) or not is_readable(value):
                    raise UsageError(
                        f"weights of {value.dtype} that C++ cannot read: the model was changed. Make a new decoder."
                    )
                if name in ("w", "b", "g"):
                    op.bfloat16 = op.bfloat16 or value.dtype == torch.bfloat16
                setattr(op, name, value.data_ptr())
            elif value is not None:
                setattr(op, name, value)
        needs_barrier = any(
            new.overlaps(old)
            for read, written in self._pending
            for new_spans, old_spans in ((reads, written), (writes, read), (writes, written))
            for new in new_spans
            for old in old_spans
        )
        if needs_barrier:
            self._ops[-1].sync = 1
            self._pending.clear()
        self._pending.append((reads, writes))
        self._ops.append(op)

    @singledispatchmethod
    def _pack(self, op: Op, *, add: float | None = None) -> None:
        raise NotImplementedError(type(op).__name__)

    @_pack.register
    def _(self, op: Embed) -> None:
        positions = None if op.positions is None else op.positions.weight
        self._emit(Kind.EMBED, None, op.y, w=op.tokens.weight, w2=positions, n=op.y.width, scale=op.scale)

    @_pack.register
    def _(self, op: Norm, *, add: float | None = None) -> None:
        norm, bias = op.module, None
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        if isinstance(norm, nn.LayerNorm):
            bias = norm.bias
        self._emit(
            Kind.NORM, op.x, op.y, w=norm.weight, b=bias, eps=eps, centred=isinstance(norm, nn.LayerNorm),
            n=op.x.width, heads=op.x.heads, offset=float(isinstance(norm, ZeroCenteredRMSNorm)),
            add=add is not None, scale=1.0 if add is None else add,
        )  # fmt: skip

    @_pack.register
    def _(self, op: InverseRMS) -> None:
        self._emit(Kind.INVERSE_RMS, op.x, op.y, eps=op.eps, n=op.x.width, heads=op.x.heads)

    @_pack.register
    def _(self, op: Linear, *, add: float | None = None) -> None:
        for layer, y in zip(op.layers, op.parts, strict=True):
            assert isinstance(layer, nn.Linear)
            rows, columns = layer.weight.shape
            self._emit(
                Kind.LINEAR, op.x, y, w=layer.weight, b=layer.bias, n=rows, k=columns,
                add=add is not None, scale=1.0 if add is None else add, gelu=("", "tanh", "erf").index(op.gelu),
            )  # fmt: skip

    @_pack.register
    def _(self, op: PerHead) -> None:
        K, rows, columns = op.weight.shape
        self._emit(
            Kind.LINEAR if op.transposed else Kind.EXPAND, op.x, op.y, w=op.weight, n=rows, k=columns,
            heads=op.x.heads, group=op.x.heads // K, w_head=op.weight.stride(0), b=op.bias,
            b_head=None if op.bias is None else op.bias.stride(0),
        )  # fmt: skip

    @_pack.register
    def _(self, op: Gate) -> None:
        self._placed[op.y] = self._resolved(op.gate)
        self._emit(Kind.GATE, op.up, op.y, n=op.up.width, gelu=op.has_gelu)

    @_pack.register
    def _(self, op: Scale) -> None:
        self._emit(Kind.SCALE, op.x, op.y, n=op.x.width, scale=op.factor)

    @_pack.register
    def _(self, op: SoftCap) -> None:
        self._emit(Kind.SCALE, op.x, op.y, n=op.x.width, cap=op.cap)

    @_pack.register
    def _(self, op: Rotate) -> None:
        cos, sin = self._cos_sin(op.rotary)
        first = 0
        for x in op.xs:
            self._emit(
                Kind.ROTATE, x, op.y.head(first, x.heads), cos=cos, sin=sin, k=x.width, heads=x.heads,
                rotated=op.rotary.width, interleaved=op.rotary.config.layout == "interleaved",
            )  # fmt: skip
            first += x.heads

    def _cos_sin(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        if rotary not in self._tables:
            cos, sin = rotary.cos_sin(self._reach, torch.float32, torch.device("cpu"))
            self._tables[rotary] = cos.contiguous(), sin.contiguous()
        return self._tables[rotary]

    @_pack.register
    def _(self, op: Store) -> None:
        for name, parts in op.rows.items():
            store, column = self._stores[op.layer][name], 0
            for part in parts:
                self._emit(
                    Kind.STORE, part, store=(store,), w=store, heads=part.heads, rows=store.shape[-2],
                    k=store.shape[-1], n=part.width, column=column,
                )  # fmt: skip
                column += part.width
            if column != store.shape[-1]:  # C++ would write beyond them; this operation never runs
                raise UsageError(
                    f"layer {op.layer} computes a {name} of {column} numbers, its cache has rows of "
                    f"{store.shape[-1]}: its weights do not fit its config."
                )

    @_pack.register
    def _(self, op: Attend) -> None:
        stores = self._stores[op.layer]
        key, value = stores[op.key], stores[op.value]
        query, H, K = self._resolved(op.query[0]), op.query[0].heads, op.n_kv_head
        query = query.columns(0, sum(part.width for part in op.query))
        # Steps between the heads of a group, and between groups.
        near, far = (K, 1) if op.modular else (1, H // K)
        self._emit(
            Kind.ATTEND, query, op.y, (key, value), w=key, w2=value, heads=K, group=H // K, rows=key.shape[-2],
            k=query.width, n=op.width, w_row=key.shape[-1], w2_row=value.shape[-1], scale=op.scale, scales=op.n_scale,
            cap=op.softcap or 0.0,
            x_head=near * query.stride, x_kv=far * query.stride, y_head=near * op.width, y_kv=far * op.width,
        )  # fmt: skip

    @_pack.register
    def _(self, op: AttendRebuilt) -> None:
        latents, (K, N, R), H = self._stores[op.layer]["latent"], op.key_up.shape, op.query.heads
        norm, (cos, sin), width = op.key_norm, self._cos_sin(op.rotary), PARTS * H * (R + 2)
        eps = None if norm is None else torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        parts = Slot(-1 - op.y.source, width, 0, 1, width, width)
        self._emit(
            Kind.ATTEND_REBUILT, op.query, parts, (latents,), w=latents, w2=panels(op.key_up), heads=K, group=H // K,
            rows=latents.shape[1], n=R, k=N, w_row=latents.shape[2], scale=op.scale,
            b=op.key_bias, b_head=None if op.key_bias is None else op.key_bias.stride(0),
            g=None if norm is None else norm.weight, eps=eps,
            cos=cos, sin=sin, rotated=op.rotary.width, interleaved=op.rotary.config.layout == "interleaved",
        )  # fmt: skip
        self._emit(Kind.JOIN, parts, op.y, heads=H, n=R)
