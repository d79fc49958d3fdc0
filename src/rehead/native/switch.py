"""The switch for rehead's own kernels. PyTorch computes everything else."""

from rehead.errors import UsageError

MODES = {
    "0": "PyTorch alone",
    "1": "PyTorch and the C++ kernels on a CPU",
    "gpu": "these and the GPU kernels, never run on a GPU yet: CUDA graphs, flash windows, MLA in Triton",
}
_mode = "1"


def use(mode: str) -> None:
    """Set the mode of this process, one of `MODES`; the default is "1". Call it before computing anything."""
    global _mode
    if mode not in MODES:
        meanings = "; ".join(f"{name} for {meaning}" for name, meaning in MODES.items())
        raise UsageError(f"REHEAD_NATIVE={mode} is unknown: it chooses the kernels that run. Use {meanings}.")
    _mode = mode


def mode() -> str:
    """Return the current mode, one of `MODES`."""
    return _mode


def disable() -> None:
    """Compute with PyTorch alone, as `use("0")` does."""
    use("0")


def gpu_refusal() -> str | None:
    """Return the reason why the kernels for GPUs are off; None if they are on."""
    return None if _mode == "gpu" else "not switched on (REHEAD_NATIVE=gpu)"
