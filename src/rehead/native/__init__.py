"""Decoding on a CPU as one call per token, in C++ built on first use; where it cannot be built, PyTorch does it."""

from rehead.native.gpt import decoder, why_not

__all__ = ["decoder", "why_not"]
