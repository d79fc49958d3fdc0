"""rehead's own kernels: C++ for CPUs, built on first use, and the switch for all compiled kernels."""

from rehead.native.build import KernelUnavailable, library, out_of_memory
from rehead.native.switch import disable, mode, use, use_environment

__all__ = ["KernelUnavailable", "disable", "library", "mode", "out_of_memory", "use", "use_environment"]
