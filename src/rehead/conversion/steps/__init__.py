"""The steps of conversions: each one exact or approximate move on the weights of one attention.

Between ways that lose equally, the search takes the step that is first here.
"""

# isort: off
from rehead.conversion.steps import latent, heads, layout, unfactor, deepseek, summed

__all__ = ["deepseek", "heads", "latent", "layout", "summed", "unfactor"]
