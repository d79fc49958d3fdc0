"""Memory in huge pages, for weights that are read from end to end for every token.

With pages of 4 kB the processor looks up where each of them lies, and on a virtual machine such a look-up is itself
several. Linux gives 2 MB pages to memory that asks for them; elsewhere the memory is ordinary.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2**21
"""Bytes."""
BLOCK = 2**26
"""Bytes of a block, which is freed when none of its tensors is used any more."""
ALIGNMENT = 64
"""Bytes; as of PyTorch's own tensors."""


class HugePages:
    """Places tensors one after another in blocks of huge pages; each has a storage of its own.

    Those that go on to a `device` other than the CPU stay where they are: they are read once.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._stay = torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE")
        self._block: mmap.mmap | None = None
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` in huge pages; the tensor itself if there are none or a GPU is to hold it."""
        if self._stay or not tensor.numel():
            return tensor
        if self._block is None or self._used + tensor.nbytes > len(self._block):
            try:
                self._block, self._used = _block(max(BLOCK, tensor.nbytes + PAGE))
            except OSError:  # such as a limit of addresses
                return tensor
        place = torch.frombuffer(self._block, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return place.view(tensor.shape).copy_(tensor)


def _block(n_bytes: int) -> tuple[mmap.mmap, int]:
    """Return memory, which takes up pages only as they are written, and the offset at which its first page begins."""
    block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return block, -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE
