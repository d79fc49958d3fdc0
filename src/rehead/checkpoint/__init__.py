"""Models on disk. Importing a family here registers it."""

from rehead.checkpoint.files.publish import publish, verify
from rehead.checkpoint.find import newest_step, read_at, resolve
from rehead.checkpoint.huggingface import deepseek, deepseek_v2, gpt2, llama, minicpm3, youtu
from rehead.checkpoint.huggingface.base import Family, families
from rehead.checkpoint.own import load, read_config, save

__all__ = [
    "Family",
    "deepseek",
    "deepseek_v2",
    "families",
    "gpt2",
    "llama",
    "load",
    "minicpm3",
    "newest_step",
    "publish",
    "read_at",
    "read_config",
    "resolve",
    "save",
    "verify",
    "youtu",
]
