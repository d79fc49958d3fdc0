"""Models on disk. Importing a family here registers it."""

from rehead.checkpoint.files.publish import publish, verify
from rehead.checkpoint.find import newest_step, read_at, resolve
from rehead.checkpoint.huggingface import (
    deepseek,
    deepseek_v2,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    granite,
    llama,
    minicpm3,
    olmo2,
    phi3,
    qwen3_moe,
    smollm3,
    youtu,
)
from rehead.checkpoint.huggingface.base import Family, families
from rehead.checkpoint.own import load, read_config, save

__all__ = [
    "Family",
    "deepseek",
    "deepseek_v2",
    "families",
    "gemma2",
    "gemma3",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "load",
    "minicpm3",
    "newest_step",
    "olmo2",
    "phi3",
    "publish",
    "qwen3_moe",
    "read_at",
    "read_config",
    "resolve",
    "save",
    "smollm3",
    "verify",
    "youtu",
]
