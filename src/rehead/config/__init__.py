"""Configs of models, options of runs, and how both are read and written."""

from rehead.config.codec import decode, encode
from rehead.config.experts import ExpertsConfig
from rehead.config.model import GPTConfig, ModelConfig, RNNConfig, model_types
from rehead.config.model_options import ModelOptions
from rehead.config.options import DataOptions, RunOptions, SystemOptions, TrainerOptions

__all__ = [
    "DataOptions",
    "ExpertsConfig",
    "GPTConfig",
    "ModelConfig",
    "ModelOptions",
    "RNNConfig",
    "RunOptions",
    "SystemOptions",
    "TrainerOptions",
    "decode",
    "encode",
    "model_types",
]
