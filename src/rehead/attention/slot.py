"""A part of the row of numbers that an operation of a program computes or reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Slot:
    """A view of a row: `heads` heads of `width` columns; head h begins at column `offset` + h * `stride`.

    `source` is the index of the operation that computes the row, which has `row_width` columns. A single head has its
    width as stride.
    """

    source: int
    row_width: int
    offset: int
    heads: int
    stride: int
    width: int

    def split(self, heads: int) -> "Slot":
        """Split one head into `heads` equal ones."""
        return replace(self, heads=heads, stride=self.width // heads, width=self.width // heads)

    def head(self, first: int, n: int) -> "Slot":
        """Select `n` heads from `first` on."""
        stride = self.stride if n > 1 else self.width
        return replace(self, offset=self.offset + first * self.stride, heads=n, stride=stride)

    def columns(self, start: int, n: int) -> "Slot":
        """Select `n` columns of every head from `start` on."""
        return replace(self, offset=self.offset + start, width=n, stride=self.stride if self.heads > 1 else n)

    def repeated(self, n: int) -> "Slot":
        """Read one head as `n` equal ones."""
        return replace(self, heads=n, stride=0)

    def flat(self) -> "Slot":
        """Merge contiguous heads into one."""
        assert self.stride == self.width
        return replace(self, heads=1, stride=self.heads * self.width, width=self.heads * self.width)


def side_by_side(slots: Sequence[Slot]) -> list[Slot]:
    """Merge slots that follow one another in memory; return the same heads in fewer slots."""
    merged = [slots[0]]
    for slot in slots[1:]:
        last = merged[-1]
        end = last.head(last.heads, slot.heads)
        if slot == end:
            merged[-1] = last.head(0, last.heads + slot.heads)
        else:
            merged.append(slot)
    return merged
