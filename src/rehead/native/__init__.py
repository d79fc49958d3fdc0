"""C++ for a CPU, built on first use; where it cannot be built, PyTorch does the same."""

from rehead.native.build import NoKernel, library

__all__ = ["NoKernel", "library"]
