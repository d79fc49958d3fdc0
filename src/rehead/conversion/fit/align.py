"""Turn heads onto each other before they are pooled.

A turn of a key head and of the queries that read it leaves every score as it is; so does a turn of a
value head and of the output columns that read it. With rope a turn must commute with the rotation of
every pair of numbers, so it is one angle per pair.

Each function takes the M heads of one group, M x E x C with the bias as the last column, and the second
moment of [x; 1], the identity where it is None. It returns the turned heads, their turns (M E E) and the head
that replaces them.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

Covariance = Float64[Tensor, "C C"] | None
Aligned = tuple[Float64[Tensor, "M E C"], Float64[Tensor, "M E E"], Float64[Tensor, "E C"]]
Align = Callable[[Tensor, Covariance], Aligned]
ROUNDS = 30
"""Times the heads are aligned to their mean and the mean is taken again; it converges long before."""


def energy(rows: Float64[Tensor, "*M E C"], moment: Covariance) -> Float64[Tensor, "*M E"]:
    """Return E[(w.x)^2] of every row w."""
    return (_seen(rows, moment) * rows).sum(dim=-1)


def _seen(rows: Tensor, moment: Covariance) -> Tensor:
    """Return rows times the moment."""
    return rows if moment is None else rows @ moment


def procrustes(heads: Float64[Tensor, "M E C"], moment: Covariance) -> Aligned:
    """Turn each head by the orthogonal matrix that brings it nearest to the mean, by SVD."""
    turned, turns = heads, torch.eye(heads.shape[1], dtype=heads.dtype).repeat(len(heads), 1, 1)
    mean, seen = heads[0], _seen(heads, moment).mT
    for _ in range(ROUNDS):
        left, _, right = torch.linalg.svd(mean @ seen)
        turns = left @ right
        turned = turns @ heads
        mean = turned.mean(dim=0)
    return turned, turns, _restored(turned, mean, moment, per_row=False)


def planar_half_split(heads: Float64[Tensor, "M E C"], moment: Covariance) -> Aligned:
    """Turn each head by one angle per pair (i, i + E/2)."""
    width = heads.shape[1]
    pairs = torch.complex(heads[:, : width // 2], heads[:, width // 2 :])
    turned, phases = _planar(pairs, moment)
    eye = torch.diag_embed(phases)
    turns = torch.cat(
        [torch.cat([eye.real, -eye.imag], dim=2), torch.cat([eye.imag, eye.real], dim=2)], dim=1
    )
    rows = torch.cat([turned.real, turned.imag], dim=1)
    return rows, turns, _restored(rows, rows.mean(dim=0), moment, per_row=True)


def planar_interleaved(heads: Float64[Tensor, "M E C"], moment: Covariance) -> Aligned:
    """Turn each head by one angle per pair (2i, 2i + 1)."""
    width = heads.shape[1]
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    back = order.argsort()
    rows, turns, one = planar_half_split(heads[:, order], moment)
    return rows[:, back], turns[:, back][:, :, back], one[back]


def in_parts(find: Align, width: int, heads: Float64[Tensor, "M E C"], moment: Covariance) -> Aligned:
    """Turn the first `width` numbers of each head with `find`, and the others, which do not rotate, by `procrustes`."""
    if width == heads.shape[1]:
        return find(heads, moment)
    parts = find(heads[:, :width], moment), procrustes(heads[:, width:], moment)
    (first, turn, one), (others, their, another) = parts
    turns = torch.stack([torch.block_diag(*each) for each in zip(turn, their, strict=True)])
    return torch.cat([first, others], dim=1), turns, torch.cat([one, another])


def _planar(pairs: Tensor, moment: Covariance) -> tuple[Tensor, Tensor]:
    """Return complex rows (M F C), each turned by a phase, and the phases (M F)."""
    mean, turned, phases = pairs[0], pairs, torch.ones_like(pairs[..., 0])
    seen = torch.complex(_seen(pairs.real, moment), -_seen(pairs.imag, moment))
    for _ in range(ROUNDS):
        along = (mean * seen).sum(dim=-1)
        size = along.abs()
        phases = torch.where(size > 0, along / size.clamp(min=1e-300), torch.ones_like(along))
        turned = phases[..., None] * pairs
        mean = turned.mean(dim=0)
    return turned, phases


def _restored(heads: Tensor, mean: Tensor, moment: Covariance, *, per_row: bool) -> Tensor:
    """Scale `mean` to the average energy of the heads: per rotated pair, or per head."""
    have, want = energy(mean, moment), energy(heads, moment).mean(dim=0)
    if per_row:
        have, want = (part.unflatten(0, (2, -1)).sum(dim=0).repeat(2) for part in (have, want))
    else:
        have, want = have.sum(), want.sum()
    scale = torch.where(have > 1e-24 * want, (want / have.clamp(min=1e-300)).sqrt(), torch.ones_like(have))
    scale = torch.where((scale - 1).abs() < 1e-12, torch.ones_like(scale), scale)
    return mean * (scale[:, None] if per_row else scale)
