"""Which directions of the keys keep their rotation, and by which angles they turn."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from rehead.conversion.fit.turns import REACH

TINY, TINY_SHARE = 1e-300, 1e-12
"""Floors that prevent division by zero: absolute, and as a share of the largest value."""


class Rotated(NamedTuple):
    """The rotary part of `queries` and `keys`, what of the keys is `left`, and how much the rotation `saves`."""

    queries: Complex128[Tensor, "H P N"]
    keys: Complex128[Tensor, "P D"]
    left: Complex128[Tensor, "K F D"]
    saves: float


class Directions:
    """Directions of the keys of all KV heads that turn by one angle, in one pair of rotated numbers or several.

    The keys z are K F complex numbers. In a pair that is not rotated, `constant` (H, F) is the number in place of the
    rotation that costs least. In one that turns by the angle of a pair near it, `beside` (H, F) is the number in place
    of the rest of its rotation, for each step from -`REACH` to `REACH` between the two. `matters` is the cost if
    nothing rotates.
    """

    def __init__(self, turns: Float64[Tensor, "S H F"], keys: Complex128[Tensor, "K F K F"]) -> None:
        """`keys` is E[z z^H]."""
        total, (cos, sin) = turns[0], turns[1:].chunk(2)
        self.keys = keys
        floor = total.max().clamp(min=TINY) * TINY_SHARE
        self.constant, *near = torch.complex(cos, sin) / total.clamp(min=floor)
        self.beside = torch.stack([*near[:REACH], torch.ones_like(self.constant), *near[REACH:]])
        saved = total * (self.beside.abs().square() - self.constant.abs().square())
        self._saved = saved.clamp(min=0).unflatten(1, (len(keys), -1)).sum(2)  # 2 REACH + 1, K, F
        self.matters = float(self._saved[REACH].sum())

    def saved(self, pair: int, to: int) -> Float64[Tensor, " K"]:
        """Return what all keys of a pair save that turn by the angle of the pair `to`."""
        return self._saved[to - pair + REACH, :, pair]

    def carriers(self, used: Iterable[int]) -> dict[int, list[int]]:
        """Return for each of the pairs `used` the pairs that turn by its angle: itself, and others if that saves."""
        chosen: dict[int, list[int]] = {pair: [pair] for pair in used}
        for pair in sorted(set(range(self._saved.shape[2])) - chosen.keys()):
            near = {to: float(self.saved(pair, to).sum()) for to in chosen if abs(to - pair) <= REACH}
            best = max(near, key=near.__getitem__, default=pair)
            if near.get(best):
                chosen[best].append(pair)
        return chosen

    def saving(self, pairs: Sequence[int], to: int) -> Float64[Tensor, " K"]:
        """Return what the best K directions of `pairs` save that turn by the angle of the pair `to`, the best first."""
        _, weighed = self._weighed(pairs, to)
        return torch.linalg.eigvalsh(weighed).flip(0)[: len(self.keys)].clamp(min=0)

    def along(
        self, pairs: Sequence[int], to: int, many: int
    ) -> tuple[Complex128[Tensor, "M K P"], Complex128[Tensor, "M K P"], Float64[Tensor, " M"]]:
        """Return what takes these directions from the keys, what makes keys of them again, and what each saves."""
        root, weighed = self._weighed(pairs, to)
        values, basis = torch.linalg.eigh(weighed)
        values, basis = values.flip(0)[:many].clamp(min=0), basis.flip(1)[:, :many].mT
        turns = torch.stack([(self.saved(pair, to) > 0) | (pair == to) for pair in pairs], dim=1).flatten()
        shape = (many, len(self.keys), len(pairs))
        return (basis.conj() * root).view(shape), torch.where(turns, basis / root, 0).view(shape), values

    def _weighed(self, pairs: Sequence[int], to: int) -> tuple[Tensor, Tensor]:
        """Return the roots of what keys of `pairs` save per energy, and the keys' moment between these roots."""
        keys = self.keys[:, pairs][:, :, :, pairs].flatten(2).flatten(0, 1)
        held = keys.diagonal().real
        saved = torch.stack([self.saved(pair, to) for pair in pairs], dim=1).flatten()
        cost = saved / held.clamp(min=held.max() * TINY_SHARE + TINY)
        root = cost.clamp(min=cost.max() * TINY_SHARE + TINY).sqrt()
        return root, root[:, None] * keys * root

    def rotated(
        self, query: Complex128[Tensor, "H F N"], key: Complex128[Tensor, "K F D"], slots: Sequence[int]
    ) -> Rotated:
        """Return a rotary part with the angles of the pairs `slots`: as many directions of a pair as it is there."""
        n_head, n_kv_head = len(query), len(key)
        queries = query.new_empty(n_head, len(slots), query.shape[2])
        keys, left, saves = key.new_empty(len(slots), key.shape[2]), key.clone(), 0.0
        own = torch.arange(n_head) // (n_head // n_kv_head)
        for to, carried in self.carriers(Counter(slots)).items():
            places = [place for place, pair in enumerate(slots) if pair == to]
            taken, made, saved = self.along(carried, to, len(places))
            turned = torch.einsum("mkp,kpd->md", taken, key[:, carried])
            left[:, carried] -= torch.einsum("mkp,md->kpd", made, turned)
            if len(carried) == 1 and len(places) == n_kv_head:
                left[:, to] = 0  # all of it rotates: no rounding errors
            times = _as_large(turned, key[:, to])
            beside = torch.stack([self.beside[to - pair + REACH, :, pair] for pair in carried], dim=1)  # H P
            asking = (made / times[:, :, None])[:, own] * beside
            queries[:, places] = torch.einsum("hpd,mhp->hmd", query[:, carried], asking.conj())
            keys[places] = turned * times
            saves += float(saved.sum())
        return Rotated(queries, keys, left, saves)


def _as_large(turned: Complex128[Tensor, "M D"], key: Complex128[Tensor, "K D"]) -> Float64[Tensor, "M 1"]:
    """Return the powers of 2 that make the rows of the rotary part as large as those of the keys.

    Directions are in units of what they matter. So small numbers would vanish in an 8-bit cache, and steps of Adam, of
    one size for all numbers, would replace them.
    """
    have, want = turned.norm(dim=1, keepdim=True), key.norm(dim=1).mean()
    times = torch.exp2((want / have.clamp(min=TINY)).log2().round())
    return torch.where((have > 0) & (want > 0), times, 1.0)
