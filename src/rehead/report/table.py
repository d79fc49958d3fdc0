"""Tables for the terminal and for documents."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 1000


def show(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: str = "",
    *,
    texts: Sequence[int] = (0,),
) -> None:
    """Print a table on stdout; columns `texts` left, the rest right aligned, nothing cut off."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index in texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    whole = Measurement.get(console, console.options.update(max_width=WIDEST), table)
    console.width = max(console.width, whole.maximum)
    console.print(title, style="bold")
    console.print(table)
    if notes:
        console.print(notes, style="dim")
