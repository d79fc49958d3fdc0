"""The switch for rehead's own kernels. PyTorch computes everything else."""

import os

from rehead.errors import UsageError

MODES = {
    "0": "PyTorch alone",
    "1": "PyTorch and the C++ kernels on a CPU",
    "gpu": "these and the GPU kernels, never run on a GPU yet: CUDA graphs, flash windows, MLA in Triton",
}
_mode: str | None = None


def use(mode: str) -> None:
    """Set the mode of this process, one of `MODES`. Call it before computing anything."""
    global _mode
    if mode not in MODES:
        meanings = "; ".join(f"{name} for {meaning}" for name, meaning in MODES.items())
        raise UsageError(f"REHEAD_NATIVE={mode} is unknown: it chooses the kernels that run. Use {meanings}.")
    _mode = mode


def use_environment() -> None:
    """Set the mode that the variable REHEAD_NATIVE names, or "1" without it."""
    use(os.environ.get("REHEAD_NATIVE") or "1")


def mode() -> str:
    """Return the current mode, one of `MODES`: that of the environment unless `use` has set another."""
    if _mode is None:
        use_environment()
    assert _mode is not None
    return _mode


def disable() -> None:
    """Compute with PyTorch alone, as `use("0")` does."""
    use("0")


def gpu_refusal() -> str | None:
    """Return the reason why the kernels for GPUs are off; None if they are on."""
    return None if mode() == "gpu" else "not switched on (REHEAD_NATIVE=gpu)"
