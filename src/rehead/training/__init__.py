"""Training: the loop, its optimizer, its run folder, and what is needed to go on exactly."""

from rehead.training.run import train

__all__ = ["train"]
