"""One attention into another, each step with its promise. Importing a module here registers its steps."""

from rehead.conversion.base import Conversion, Evidence, Promise, Step, conversions, methods
from rehead.conversion.certificate import Certificate
from rehead.conversion.converter import convert
from rehead.conversion.fit.factor import Factors, SharedLatent, factor, gqa_to_mla
from rehead.conversion.search import path
from rehead.conversion.steps.deepseek import Decouple, IdentityNorm, PadToStock
from rehead.conversion.steps.heads import PoolHeads, RepeatHeads
from rehead.conversion.steps.latent import Factor, PadRank
from rehead.conversion.steps.layout import HeadMap, RopeLayout
from rehead.conversion.steps.summed import SumQueries
from rehead.conversion.steps.unfactor import Expand, Reduce, Reduced, reduced_matrices
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
