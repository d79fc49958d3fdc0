"""Decoding on a CPU as one call per token, in C++ built on first use; without a compiler PyTorch does it."""

from rehead.native.gpt import decoder, why_not

__all__ = ["decoder", "why_not"]
