"""Who else looks at an operation while it is computed."""

import torch


def is_traced() -> bool:
    """Return True where a graph is compiled or `torch.func` transforms: both know PyTorch's operators only."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
