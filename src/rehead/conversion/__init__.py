"""Convert one attention into another, each step with its promise. Importing this package registers all steps."""

from rehead.conversion.base import Conversion, Promise, Statistics, Step, conversions, methods
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
from rehead.conversion.target import Target, targets

__all__ = [
    "Certificate",
    "Conversion",
    "Decouple",
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
    "Statistics",
    "Step",
    "SumQueries",
    "Target",
    "conversions",
    "convert",
    "factor",
    "gqa_to_mla",
    "methods",
    "path",
    "reduced_matrices",
    "targets",
]
