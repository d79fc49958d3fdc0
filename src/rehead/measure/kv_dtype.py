"""Number formats in which engines keep a KV cache: their bytes, scales included, and what rounding to them changes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from rehead.attention import AttentionConfig, LatentConfig, LayerCache
from rehead.config import GPTConfig, ModelConfig
from rehead.errors import ConfigError
from rehead.measure.q8_0 import BLOCK, q8_0
from rehead.model import LanguageModel
from rehead.registry import Registry

LARGEST_FP8 = 448.0
"""Largest number of float8_e4m3fn; larger ones become it."""
TURNED = 64
"""llama.cpp rotates heads whose width is a multiple of this: values in parts this wide, keys in wider ones."""


class KVDtype(ABC):
    """How the rows of a token are kept: keys and values per head, or a latent."""

    name: ClassVar[str]
    is_coarse: ClassVar[bool] = True
    """Whether it has fewer than 16 bits a number."""

    def require(self, config: ModelConfig) -> None:
        """Raise ConfigError for a model whose cache cannot have this format."""
        if fault := self.fault(config):
            raise ConfigError(f"kv dtype {self.name}: {fault}")

    def fault(self, config: ModelConfig) -> str:
        """Return why a model's cache cannot have this format, or an empty text."""
        if not isinstance(config, GPTConfig):
            return "an RNN has no KV cache."
        faults = (self._scaled(layer) or self.fault_of(layer) for layer in config.attention)
        return next(filter(None, faults), "")

    def fault_of(self, layer: AttentionConfig) -> str:
        """Return why a layer's rows cannot have this format, or an empty text."""
        return ""

    def _scaled(self, layer: AttentionConfig) -> str:
        """Return an error for a row with 1 / RMS of keys in it, which a coarse format would change by per cents."""
        if not (self.is_coarse and isinstance(layer, LatentConfig) and layer.n_key_scale):
            return ""
        return f"too coarse for the 1 / RMS of {layer.n_key_scale} keys in each latent row. Use bf16."

    def token_bytes(self, layer: AttentionConfig, tp: int = 1) -> int:
        """Return the bytes that a token adds to a layer's cache, on the fullest of `tp` GPUs that share its heads."""
        rows = layer.cache_rows().values()
        return sum(
            math.prod(math.ceil(n / tp) for n in heads) * self.row_bytes(layer, width)
            for *heads, width in rows
        )

    @abstractmethod
    def row_bytes(self, layer: AttentionConfig, width: int) -> int:
        """Return the bytes of one row of `width` numbers of a head, or of a latent."""

    @abstractmethod
    def rounded(self, row: str, rows: Float[Tensor, "*N E"]) -> Float[Tensor, "*N E"]:
        """Return rows as read back, in their own dtype; `row` is their name in `cache_rows`."""


kv_dtypes: Registry[type[KVDtype]] = Registry("kv dtype")


class _Plain(KVDtype):
    """A format that stores every number by itself."""

    dtype: ClassVar[torch.dtype]

    def row_bytes(self, layer: AttentionConfig, width: int) -> int:
        """Return the bytes of the numbers."""
        return width * self.dtype.itemsize

    def rounded(self, row: str, rows: Tensor) -> Tensor:
        """Return the nearest numbers of the type."""
        return rows.to(self.dtype).to(rows.dtype)


@kv_dtypes.add("fp32")
class Float32(_Plain):
    """4 bytes a number."""

    name, dtype, is_coarse = "fp32", torch.float32, False


@kv_dtypes.add("bf16")
class BFloat16(_Plain):
    """2 bytes a number."""

    name, dtype, is_coarse = "bf16", torch.bfloat16, False


@kv_dtypes.add("fp16")
class Float16(_Plain):
    """2 bytes a number."""

    name, dtype, is_coarse = "fp16", torch.float16, False


@kv_dtypes.add("fp8")
class Float8(_Plain):
    """float8_e4m3 without scales, as vLLM's `--kv-cache-dtype fp8` is for a checkpoint that has none."""

    name, dtype = "fp8", torch.float8_e4m3fn

    def rounded(self, row: str, rows: Tensor) -> Tensor:
        """Return the nearest numbers, at most 448 in size."""
        return super().rounded(row, rows.clamp(-LARGEST_FP8, LARGEST_FP8))


@kv_dtypes.add("int8")
class Int8(KVDtype):
    """Whole numbers up to 127, and a float32 scale per token and head: vLLM's `int8_per_token_head`.

    A latent has one scale per token; no engine was found that keeps one so.
    """

    name = "int8"

    def row_bytes(self, layer: AttentionConfig, width: int) -> int:
        """Return the bytes of the numbers and of the scale."""
        return width + 4

    def rounded(self, row: str, rows: Tensor) -> Tensor:
        """Return the nearest multiples of the scale, by which the largest number is 127."""
        # A scale in bfloat16 would shift all numbers of its row.
        exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
        scale = (exact.abs().amax(-1, keepdim=True) / 127).float().to(exact.dtype)
        whole = (exact / torch.where(scale > 0, scale, 1)).round().clamp(-127, 127)
        return (whole * scale).to(rows.dtype)


@kv_dtypes.add("q8_0")
class Q8(KVDtype):
    """llama.cpp's `-ctk q8_0 -ctv q8_0`: whole numbers up to 127, and a float16 scale per 32 of them.

    Keys and values of heads whose width is a multiple of 64 are rotated before that, as llama.cpp does unless
    LLAMA_ATTN_ROT_DISABLE=1 (its pull request 21038); a latent is not.
    """

    name = "q8_0"

    def fault_of(self, layer: AttentionConfig) -> str:
        """Return an error for a row that is not a whole number of blocks."""
        for row, (*_, width) in layer.cache_rows().items():
            if width % BLOCK:
                return f"its {row} has {width} numbers, not a multiple of {BLOCK}. Use int8."
        return ""

    def row_bytes(self, layer: AttentionConfig, width: int) -> int:
        """Return the bytes of the numbers and of the scales."""
        return width // BLOCK * (BLOCK + 2)

    def rounded(self, row: str, rows: Tensor) -> Tensor:
        """Return the nearest multiples of each scale, of rotated heads rotated back."""
        width = rows.shape[-1]
        if row == "latent" or width % TURNED:
            return q8_0(rows)
        turn = hadamard(TURNED if row == "value" else width & -width)
        turn = turn.to(torch.promote_types(rows.dtype, torch.float32)).to(rows.device)
        parts = rows.to(turn.dtype).unflatten(-1, (-1, len(turn))) @ turn
        return (q8_0(parts) @ turn).flatten(-2).to(rows.dtype)


def hadamard(n: int) -> Float64[Tensor, "N N"]:
    """Return Sylvester's Hadamard matrix for a power of two, orthonormal: symmetric, and its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(n)


class RoundedCache(LayerCache):
    """The cache of `layer` whose rows are rounded to `kind` as they come in; every query reads them so."""

    def __init__(self, layer: AttentionConfig, kind: KVDtype, **sizes: Any) -> None:
        super().__init__(layer.cache_rows(), window=layer.window, **sizes)
        self._kind = kind

    def append(
        self, positions: Int[Tensor, "#B L"] | None = None, **new: Tensor
    ) -> tuple[dict[str, Tensor], Int[Tensor, "B S"] | None]:
        """Store new rows, rounded; return all as `LayerCache.append` does."""
        kept = {name: self._kind.rounded(name, rows) for name, rows in new.items()}
        return super().append(positions, **kept)


def rounded_caches(model: LanguageModel, kind: KVDtype, ids: Int[Tensor, "B L"]) -> Sequence[LayerCache]:
    """Return an empty cache per layer, for a forward pass of a GPT over `ids`."""
    config, dtype = model.config, model.head.weight.dtype
    assert isinstance(config, GPTConfig)
    sizes = {"batch_size": len(ids), "capacity": ids.shape[1], "dtype": dtype, "device": ids.device}
    return [RoundedCache(layer, kind, **sizes) for layer in config.attention]
