"""Models on disk. Importing a family here registers it."""

from rehead.checkpoint.files.publish import publish, verify
from rehead.checkpoint.find import newest_step, read_at, read_without_weights, resolve
from rehead.checkpoint.huggingface import (  # noqa: F401 (each registers its families)
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
    "families",
    "load",
    "newest_step",
    "publish",
    "read_at",
    "read_config",
    "read_without_weights",
    "resolve",
    "save",
    "verify",
]
