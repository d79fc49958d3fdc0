"""Models on disk. Importing a family here registers it."""

from rehead.checkpoint import deepseek, gpt2, llama
from rehead.checkpoint.family import Family, families
from rehead.checkpoint.find import newest_step, read_at, resolve
from rehead.checkpoint.native import load, read_config, save
from rehead.checkpoint.publish import publish, verify

__all__ = [
    "Family",
    "deepseek",
    "families",
    "gpt2",
    "llama",
    "load",
    "newest_step",
    "publish",
    "read_at",
    "read_config",
    "resolve",
    "save",
    "verify",
]
