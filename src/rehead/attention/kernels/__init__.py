"""Attention kernels: the first kernel of a roster that does not refuse a call computes it.

`reference` is the definition; every other kernel must agree with it. `roster.py` has the order.
"""

from rehead.attention.kernels.base import Call, Kernel, ScoreFunction
from rehead.attention.kernels.definition import reference, weights
from rehead.attention.kernels.roster import ROSTER, Choice, attend, choose

__all__ = ["ROSTER", "Call", "Choice", "Kernel", "ScoreFunction", "attend", "choose", "reference", "weights"]
