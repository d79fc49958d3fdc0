"""Language models: a GPT with any attention, and an Elman network."""

from rehead.model.base import LanguageModel, assembled, build, skeleton
from rehead.model.gpt import GPT
from rehead.model.modes import evaluated, evaluating, modes_kept
from rehead.model.rnn import RNN, both_seen
from rehead.model.state import StateCache

__all__ = [
    "GPT",
    "RNN",
    "LanguageModel",
    "StateCache",
    "assembled",
    "both_seen",
    "build",
    "evaluated",
    "evaluating",
    "modes_kept",
    "skeleton",
]
