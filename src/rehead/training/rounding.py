"""What the exact bits of a training run depend on besides its options."""

import warnings
from typing import Any

import torch

from rehead.native import KernelUnavailable
from rehead.native.sequence import kernel


def arithmetic(world: int) -> dict[str, Any]:
    """Return the facts that rounding depends on, of one of `world` processes."""
    compiled = not isinstance(kernel(), KernelUnavailable)
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__, "C++ kernel": compiled}
    return {**facts, "processes": world}


def warn_of_rounding(recorded: dict[str, Any], facts: dict[str, Any]) -> None:
    """Warn if a resumed run cannot be bit-identical to an uninterrupted one."""
    changed = [
        f"{key} {recorded[key]} -> {now}" for key, now in facts.items() if recorded.get(key, now) != now
    ]
    if changed:
        warnings.warn(f"the run resumes, but not bit for bit: {', '.join(changed)}", stacklevel=2)
