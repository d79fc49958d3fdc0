"""One attention into another, each step with its promise. Importing a module here registers its steps."""

from rehead.conversion.base import Conversion, Evidence, Promise, Step, conversions, methods
from rehead.conversion.certificate import Certificate
from rehead.conversion.convert import convert
from rehead.conversion.factor import Factors, SharedLatent, factor, gqa_to_mla
from rehead.conversion.heads import PoolHeads, RepeatHeads
from rehead.conversion.latent import Factor, PadRank
from rehead.conversion.layout import HeadMap, RopeLayout
from rehead.conversion.multiplied import Expand, Reduce, Reduced, reduced_matrices
from rehead.conversion.path import path
from rehead.conversion.stock import Decouple, IdentityNorm, PadToStock
from rehead.conversion.summed import SumQueries
from rehead.conversion.target import Wish, targets

__all__ = [
    "Certificate",
    "Conversion",
    "Decouple",
    "Evidence",
    "Expand",
    "Factor",
    "Factors",
    "HeadMap",
    "IdentityNorm",
    "PadRank",
    "PadToStock",
    "PoolHeads",
    "Promise",
    "Reduce",
    "Reduced",
    "RepeatHeads",
    "RopeLayout",
    "SharedLatent",
    "Step",
    "SumQueries",
    "Wish",
    "conversions",
    "convert",
    "factor",
    "gqa_to_mla",
    "methods",
    "path",
    "reduced_matrices",
    "targets",
]
