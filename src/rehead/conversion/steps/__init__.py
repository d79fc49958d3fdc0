"""The steps of conversions: each an exact or approximate change of the weights of one attention.

Between paths that lose equally, the search prefers the step that is imported first here.
"""

# isort: off
from rehead.conversion.steps import (
    latent,
    heads,
    layout,
    unfactor,
    deepseek,
    biases,
    summed,
    rotations,
    narrow,
)

__all__ = ["biases", "deepseek", "heads", "latent", "layout", "narrow", "rotations", "summed", "unfactor"]
