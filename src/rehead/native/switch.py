"""Which of rehead's own kernels may run. PyTorch computes whatever they do not."""

from rehead.errors import UsageError

MODES = {
    "0": "PyTorch alone",
    "1": "the C++ on a CPU, too",
    "gpu": "also the kernels for GPUs, which have not run on one yet: CUDA graphs, flash windows, MLA in Triton",
}
_mode = "1"


def use(mode: str) -> None:
    """Choose one of `MODES` for this process, "1" unless chosen. Call it before anything is computed."""
    global _mode
    if mode not in MODES:
        meanings = "; ".join(f"{name} is {meaning}" for name, meaning in MODES.items())
        raise UsageError(f"REHEAD_NATIVE={mode}: which of rehead's own kernels run. {meanings}.")
    _mode = mode


def mode() -> str:
    """The one of `MODES` that was chosen."""
    return _mode


def disable() -> None:
    """`use("0")`: compute with PyTorch alone."""
    use("0")


def gpu_refusal() -> str | None:
    """Why the kernels for GPUs do not run; None where they were asked for."""
    return None if _mode == "gpu" else "not switched on (REHEAD_NATIVE=gpu)"
