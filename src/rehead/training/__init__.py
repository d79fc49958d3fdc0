"""Training: the loop, its optimizer, its run folder, and the state that makes resuming exact."""

from rehead.training.run import train

__all__ = ["train"]
