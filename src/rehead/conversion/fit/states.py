"""Hidden states of a text on disk, so that a model is read one layer at a time."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.checkpoint.files.shards import bytes_of
from rehead.data.files import resource


class States:
    """The hidden states of every batch of a text at one depth, (B, L, D) each, in one file.

    The file appears when all of them have been written, so a file that exists is whole.
    """

    def __init__(
        self, file: Path, batches: Sequence[tuple[int, int]], width: int, dtype: torch.dtype
    ) -> None:
        self.file, self.batches, self.width, self.dtype = file, batches, width, dtype

    @property
    def exists(self) -> bool:
        """Whether all states have been written, and not removed."""
        tokens = sum(rows * length for rows, length in self.batches)
        return self.file.exists() and self.file.stat().st_size == tokens * self.width * self.dtype.itemsize

    def __iter__(self) -> Iterator[Float[Tensor, "B L D"]]:
        """Yield the states of one batch after the other."""
        with self.file.open("rb") as file:
            for rows, length in self.batches:
                states = torch.empty(rows, length, self.width, dtype=self.dtype)
                file.readinto(bytes_of(states))
                yield states

    def mapped(self) -> list[Float[Tensor, "L D"]]:
        """Return the states of every row of every batch, read from the file when they are used."""
        sizes = [length * self.width for rows, length in self.batches for _ in range(rows)]
        flat = torch.from_file(str(self.file), shared=False, size=sum(sizes), dtype=self.dtype)
        return [row.view(-1, self.width) for row in flat.split(sizes)]

    def write(self, states: Iterable[Float[Tensor, "B L D"]]) -> Iterator[None]:
        """Write the states of all batches; yield after each one."""
        aside = self.file.with_suffix(".part")
        with resource(f"cannot keep the text's activations in {str(self.file)!r}", "free some space"):
            with aside.open("wb") as file:
                for batch in states:
                    file.write(bytes_of(batch.detach().cpu().contiguous()))
                    del batch
                    yield
            os.replace(aside, self.file)

    def remove(self) -> None:
        """Remove the file, if there is one."""
        self.file.unlink(missing_ok=True)
