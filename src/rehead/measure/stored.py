"""What a model loses when its weights are stored in a smaller number format, as engines and quantisers do."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention import LatentConfig
from rehead.checkpoint.files.deferred import Deferred, map_deferred, map_weights, materialise
from rehead.config import GPTConfig, ModelConfig
from rehead.data import Ids, evaluation_blocks, shown
from rehead.errors import NumericError
from rehead.measure.fidelity import Caches, Comparison, compare
from rehead.measure.q8_0 import BLOCK, q8_0
from rehead.measure.quality import blocks_of_text
from rehead.model import LanguageModel, assembled
from rehead.model.base import keeps_dtype
from rehead.nn.rows import by_rows, row_parts
from rehead.stages import staged
from rehead.system.memory import require_memory

Storage = Literal["fp16", "bf16", "q8_0"]
LOST = 0.1
"""Relative error of a row from which on it counts as lost; rounding to 8 bits changes one by about 0.01."""
KEYS_AND_VALUES = re.compile(r"layers\.(\d+)\.self_attn\.kv_b_proj\.weight")
"""Name of the matrix that a latent's keys and values come from."""
WHOLE = ("embed_positions.weight", ".gate.weight")
"""Ends of the names of matrices that llama.cpp keeps in float32."""
BATCH = 4096
"""Tokens read at once, at most."""


def keeps(name: str, kind: Storage) -> bool:
    """Whether a weight stays as it is: the bias of a router and, in llama.cpp's files, routers and position tables."""
    return keeps_dtype(name) or (kind == "q8_0" and name.endswith(WHOLE))


def rounded(weight: Float[Tensor, "*N E"], kind: Storage) -> Float[Tensor, "*N E"]:
    """Return a weight as read back from storage, in its own dtype.

    `q8_0` is llama.cpp's: 32 numbers of a row are whole numbers times one scale, which is a float16. As there, vectors
    stay as they are, and matrices whose rows have no whole number of such blocks become float16.
    """
    if kind == "q8_0" and weight.ndim < 2:
        return weight
    if kind == "q8_0" and weight.shape[-1] % BLOCK == 0:
        return by_rows(q8_0, weight)
    return by_rows(lambda rows: rows.to(torch.bfloat16 if kind == "bf16" else torch.float16), weight)


def as_in_file(
    name: str, weight: Float[Tensor, "M E"], kind: Storage, config: ModelConfig
) -> Float[Tensor, "M E"]:
    """Return a weight as read back from storage, where llama.cpp's files have those of a latent's keys transposed."""
    layer = _latent_of(name, config)
    if kind != "q8_0" or layer is None:
        return rounded(weight, kind)
    sizes = (layer.qk_nope_head_dim, layer.v_head_dim)
    keys, values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return torch.cat([rounded(keys.mT.contiguous(), kind).mT, rounded(values, kind)], dim=1).flatten(0, 1)


def as_stored(model: LanguageModel, kind: Storage) -> LanguageModel:
    """Return the model with its weights as read back from storage; it computes in its own dtype.

    Raises NumericError for a weight that such storage cannot hold, ResourceError if there is no room for a copy.
    """
    held = sum(weight.nbytes for weight in model.parameters() if not isinstance(weight, Deferred))
    require_memory(
        f"the weights as {kind}",
        {"copy": held},
        "Use a smaller model or, with `eval`, --dtype bf16.",
        model.device,
    )
    for name, weight in model.named_parameters():
        if keeps(name, kind):
            continue
        if not as_in_file(name, materialise(weight.detach()), kind, model.config).isfinite().all():
            raise NumericError(f"{name} leaves the range of {kind}: keep this model in bf16 or fp32.")

    def stored(name: str, weight: Tensor) -> Tensor:
        change = partial(as_in_file, name, kind=kind, config=model.config)
        return weight if keeps(name, kind) else map_deferred(change, weight)

    return assembled(model.config, map_weights(model, stored))


def changed(
    exact: LanguageModel,
    stored: LanguageModel,
    ids: Ids,
    length: int,
    stride: int | None = None,
    bos: int | None = None,
    caches: Caches | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Return by how much storage changes the predictions on a whole text, read in the blocks of `evaluate_text`.

    `kl` is the mean of KL(exact || stored) in nats, `argmax_flips` the share of tokens whose likeliest successor
    differs, `loss_exact` the loss before. `caches` are those of the stored model, as in `compare`.
    """
    cached = caches is not None
    blocks = blocks_of_text(stored, ids, length, stride, batch_size, bos, use_cache=cached, n_model=2)
    found = compare(exact, stored, shown(blocks, "comparing with the exact weights", len(ids) - 1), caches)
    return {"kl": found.kl, "argmax_flips": found.argmax_flips, "loss_exact": found.losses[0]}


def comparison(
    exact: LanguageModel, stored: LanguageModel, ids: Ids, length: int, tokens: int, bos: int | None = None
) -> Comparison:
    """Compare the predictions of two models on as many blocks as have `tokens`, at least one, spread over a text."""
    blocks = evaluation_blocks(ids, length, max(1, BATCH // length), max(1, tokens // length), bos=bos)
    return compare(exact, stored, shown(blocks, "comparing with the exact weights", None))


@torch.no_grad()
def lost_rows(model: LanguageModel, *kinds: Storage) -> dict[str, dict[Storage, float]]:
    """Return, per kind of weight, the share of its rows that each storage loses; without those that lose none.

    A row is lost if its relative error is above `LOST`, or if it is no longer finite. A kind of weight is the name
    within a layer, as `self_attn.o_proj.weight`.
    """
    rows: dict[str, int] = {}
    lost: dict[str, dict[Storage, int]] = {}
    weights = list(model.named_parameters())
    for name, weight in staged(weights, "checking number formats", len(weights), "tensors"):
        kind_of = name.split(".", 2)[2] if name.startswith("layers.") else name
        whole = materialise(weight)
        for part in _parts(name, whole, model.config):
            exact = part.float()
            size = exact.norm(dim=-1)
            rows[kind_of] = rows.get(kind_of, 0) + int((size > 0).sum())
            for kind in kinds:
                if keeps(name, kind):
                    continue
                stored = (
                    rounded(exact[0], kind)
                    if weight.ndim < 2
                    else as_in_file(name, exact, kind, model.config)
                )
                error = (stored - exact).norm(dim=-1)
                count = int((~(error <= LOST * size)).sum())  # also those that are NaN
                if count:
                    lost.setdefault(kind_of, dict.fromkeys(kinds, 0))[kind] += count
    return {name: {kind: count / rows[name] for kind, count in found.items()} for name, found in lost.items()}


def _latent_of(name: str, config: ModelConfig) -> LatentConfig | None:
    """Return the latent that a weight expands to keys and values; None for any other weight."""
    match = KEYS_AND_VALUES.fullmatch(name)
    if match is None or not isinstance(config, GPTConfig):
        return None
    layer = config.attention[int(match[1])]
    return layer if isinstance(layer, LatentConfig) else None


def _parts(name: str, weight: Tensor, config: ModelConfig) -> Iterator[Tensor]:
    """Yield the rows of a weight in parts, those of a latent's keys and values head by head."""
    layer = _latent_of(name, config)
    if layer is not None:
        yield from weight.unflatten(0, (layer.n_kv_head, -1))
        return
    for _, part in row_parts(weight[None] if weight.ndim < 2 else weight.flatten(0, -2)):
        yield part
