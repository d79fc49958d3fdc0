"""Measures the cost and the quality of a model."""

from rehead.measure.memory_in_use import memory
from rehead.measure.quality import evaluate, evaluate_text
from rehead.measure.size import cache_bytes, forward_flops, kv_bytes_per_token, parameters
from rehead.measure.speed import decode_speed

__all__ = [
    "cache_bytes",
    "decode_speed",
    "evaluate",
    "evaluate_text",
    "forward_flops",
    "kv_bytes_per_token",
    "memory",
    "parameters",
]
