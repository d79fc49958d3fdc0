"""Llama 3's scaled angles as the nearest yarn, the only scaling that vLLM's and SGLang's DeepSeek class computes."""

import math
from dataclasses import replace
from functools import cache

from rehead.attention import RopeConfig
from rehead.attention.rope_scaling import Llama3Scaling, YarnScaling

FAR = 2048
"""Tokens over which the promise of a conversion counts the difference of two angles."""


@cache
def as_yarn(rope: RopeConfig, width: int) -> RopeConfig | None:
    """Return a rotary part of `width` with a yarn in place of `rope`'s Llama 3 scaling; None if it has another.

    Both keep the fast angles and divide the slow ones by the same factor. In between, yarn ramps over whole numbers
    of pairs: the ramp with the smallest maximum difference is taken. `mscale` and `mscale_all_dim` are equal, so that
    cosine and sine keep their size; the factor that yarn then puts on the scores is divided out of the queries.
    """
    scaling = rope.scaling
    if not isinstance(scaling, Llama3Scaling) or rope.theta == 1:
        return None
    plain = replace(rope, scaling=None, partial_rotary_factor=1.0)
    n_pair = width // 2
    wanted = scaling.scale(plain.frequencies(width), rope.theta)

    def rotations(pair: float) -> float:
        """Return how often a pair turns over the length of the first training."""
        return scaling.original_max_position_embeddings / (2 * math.pi) * rope.theta ** (-pair / n_pair)

    def ramp(first: int, last: int) -> YarnScaling:
        """Return the yarn that keeps the pairs up to `first` and divides those from `last` on."""
        return YarnScaling(
            factor=scaling.factor,
            beta_fast=rotations(first + 0.5),  # rounded down by yarn
            beta_slow=rotations(last - 0.5),  # rounded up
            original_max_position_embeddings=scaling.original_max_position_embeddings,
            mscale=1.0,
            mscale_all_dim=1.0,
        )

    def apart(yarn: YarnScaling) -> float:
        return float((yarn.scale(plain.frequencies(width), rope.theta) - wanted).abs().max())

    ramps = [ramp(first, last) for first in range(n_pair) for last in range(first + 1, 2 * n_pair)]
    return replace(plain, scaling=min(ramps, key=apart))


def reaching(rope: RopeConfig, length: int) -> RopeConfig:
    """Return the same angles with a yarn whose factor times original length is at least `length`.

    vLLM computes as many rows of angles as that product, and a later position is an error. The ramp depends on the
    original length over `beta_fast` and `beta_slow` alone.
    """
    yarn = rope.scaling
    if not isinstance(yarn, YarnScaling) or yarn.factor * yarn.original_max_position_embeddings >= length:
        return rope
    original = math.ceil(length / yarn.factor)
    times = original / yarn.original_max_position_embeddings
    longer = replace(
        yarn,
        original_max_position_embeddings=original,
        beta_fast=yarn.beta_fast * times,
        beta_slow=yarn.beta_slow * times,
    )
    return replace(rope, scaling=longer)


def stands_in(rope: RopeConfig, source: RopeConfig, width: int) -> bool:
    """Whether `rope` of a rotary part of `width` is the yarn in place of `source`'s scaling."""
    return isinstance(rope.scaling, YarnScaling) and rope == as_yarn(source, width)


def drift(rope: RopeConfig, source: RopeConfig, width: int) -> float:
    """Return the largest difference of two angles after `FAR` tokens, in radians, of a yarn and what it stands for."""
    assert source.scaling is not None
    exact = replace(rope, scaling=source.scaling).frequencies(width)
    return FAR * float((rope.frequencies(width) - exact).abs().max())
