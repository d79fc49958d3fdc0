"""Identity norms with numbers that smaller formats hold, such as float16 and whole numbers of 8 bits.

An identity norm needs a latent far below the root of its eps (`IdentityNorm`), but float16 ends at 2**-24. So the
factor is no smaller here than exactness needs. Two weights share it: the norm before the attention, whose other
readers undo it, and the rows of the latent, which become alike in size, in the cache too. All factors are powers of
two: nothing is rounded in float32 and bfloat16.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention import LatentConfig
from rehead.attention.latent import NORM_EPS
from rehead.checkpoint.files.deferred import map_deferred, materialise
from rehead.config import GPTConfig
from rehead.errors import ConfigError
from rehead.measure.stored import Storage, lost_rows
from rehead.model import LanguageModel, assembled

ERROR = 2e-6
"""What an identity norm may change of a latent, relative to it, whatever the text."""
SPREAD = 2.0**-20
"""Rows of the latent below this share of the largest are scaled as if they had it, and so stay smaller."""
LARGEST = 2.0**14
"""The largest weight that the projections to queries and rotated keys may get; float16 ends at four times that."""
NEGLIGIBLE = 0.01
"""The mean square of a latent, relative to the eps of its norm, below which only the eps counts."""
LOSING: Mapping[Storage, str] = {"fp16": "float16", "q8_0": "formats of 8 bits"}
"""Smaller formats whose lost rows are counted."""


def require_wide(dtype: torch.dtype | None) -> None:
    """Refuse a number format that cannot hold DeepSeek's class."""
    if dtype == torch.float16:
        raise ConfigError(
            "float16 cannot hold the identity norm's small numbers: use bfloat16 or float32 (--dtype bf16 or fp32)."
        )


def lost_by(model: LanguageModel, kinds: Sequence[Storage]) -> dict[str, dict[Storage, float]]:
    """Return the shares of rows that smaller formats lose, by weight; none for a model without latents."""
    assert isinstance(model.config, GPTConfig)
    latent = any(isinstance(layer, LatentConfig) for layer in model.config.attention)
    return lost_rows(model, *kinds) if kinds and latent else {}


def has_identity_norm(model: LanguageModel) -> bool:
    """Whether the norm of some latent divides by its eps alone, so small is what comes before it."""
    state = model.state_dict()
    for name in (name for name in state if name.endswith("kv_a_layernorm.weight")):
        here = name.removesuffix("kv_a_layernorm.weight")
        norm = materialise(state[here.removesuffix("self_attn.") + "input_layernorm.weight"]).double()
        down = materialise(state[here + "kv_a_proj_with_mqa.weight"])[: len(state[name])].double()
        if float((down * norm).square().sum(1).mean()) < NEGLIGIBLE * NORM_EPS:
            return True
    return False


def storable(model: LanguageModel, layers: Collection[int], folded: Collection[int] = ()) -> LanguageModel:
    """Return the same function with other factors in the identity norms of `layers`, and of queries in `folded`."""
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    for index in layers:
        before, here = f"layers.{index}.input_layernorm.weight", f"layers.{index}.self_attn."
        query = next(here + name for name in ("q_proj.weight", "q_a_proj.weight") if here + name in state)
        down, up = here + "kv_a_proj_with_mqa.weight", here + "kv_b_proj.weight"
        rank = state[up].shape[1]
        norm, latent, reader = (materialise(state[name]) for name in (before, down, query))
        bias = here + "kv_a_proj_with_mqa.bias"
        shift = materialise(state[bias])[:rank] if bias in state else norm.new_zeros(rank)
        asked = _of_constant(norm, reader) if index in folded else norm.new_zeros(())
        shared, rows = _powers(norm, latent, shift, reader * torch.exp2(asked), rank)
        cached, all_rows = rows.mean().round(), torch.cat([rows, rows.new_zeros(len(latent) - rank)])
        powers = {
            before: -shared,
            query: shared + asked,
            down: all_rows[:, None] + shared,
            here + "kv_a_layernorm.weight": -cached,
            up: cached - rows,
        }
        if bias in state:
            powers[bias] = all_rows
        if index in folded:
            powers |= {here + "q_a_proj.bias": asked, here + "q_a_layernorm.weight": -asked}
        for name, power in powers.items():
            state[name] = map_deferred(partial(_times, power=power), state[name])
    return copy.deepcopy(assembled(model.config, state))


def _powers(
    norm: Float[Tensor, " D"],
    down: Float[Tensor, "N D"],
    shift: Float[Tensor, " R"],
    query: Float[Tensor, "M D"],
    rank: int,
) -> tuple[Float[Tensor, ""], Float[Tensor, " R"]]:
    """Return the powers of two for all readers of a norm, and for the rows of the latent on top.

    What comes out of the norm is at most sqrt(D) long but for its weights g. So a latent W (g x) + b has an RMS of at
    most (|W diag(g)| sqrt(D) + |b|) / sqrt(R), and the identity norm changes it by half the square of that over eps.
    """
    seen = torch.cat([down[:rank].double() * norm.double(), shift.double()[:, None]], dim=1)
    sizes = seen.norm(dim=1)
    if not sizes.any():  # nothing to keep small
        return sizes.new_zeros(()), sizes
    alike = -sizes.clamp(min=SPREAD * float(sizes.max())).log2().round()
    level = seen * torch.exp2(alike)[:, None]
    stretched = torch.linalg.eigvalsh(level[:, :-1] @ level[:, :-1].mT)[-1].clamp(min=0)
    longest = (stretched * len(norm)).sqrt() + level[:, -1].norm()
    most = math.sqrt(2 * ERROR * NORM_EPS * rank)
    alike = torch.where(sizes > 0, alike, alike[sizes > 0].mean().round())
    rows = alike + (most / longest).log2().floor()
    entries = down[:rank].double() * torch.exp2(rows)[:, None]
    shared = ((_size(norm) / _size(entries)).log2() / 2).round()
    largest = max(float(query.abs().max()), float(down[rank:].abs().max()))
    room = math.floor(math.log2(LARGEST / largest)) if largest else math.inf
    return shared.clamp(min=0, max=max(room, 0)), rows


def _of_constant(norm: Float[Tensor, " D"], query: Float[Tensor, "M D"]) -> Float[Tensor, ""]:
    """Return the power of two for a latent of the queries that is an input and a constant, times a small number.

    The norm's output g x and a 1 have an RMS of at most the largest of |g| and 1.
    """
    most = math.sqrt(2 * ERROR * NORM_EPS) / max(1.0, float(norm.abs().max()))
    return (most / query.double().abs().max()).log2().floor()


def _size(weight: Tensor) -> Tensor:
    return weight.double().square().mean().sqrt()


def _times(weight: Tensor, power: Tensor) -> Tensor:
    return (weight.double() * torch.exp2(power.to(weight.device))).to(weight.dtype)
