"""C++ for a CPU, built on first use; where it cannot be built or is disabled, PyTorch does the same."""

from rehead.native.build import NoKernel, disable, is_disabled, library

__all__ = ["NoKernel", "disable", "is_disabled", "library"]
