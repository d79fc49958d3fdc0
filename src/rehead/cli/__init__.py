"""argv into one call per command. Nothing here computes; torch is imported only by what needs it.

Importing this imports no command, so that a signal finds an answer before anything heavy is read.
"""

from rehead.cli.interrupt import answer_signals, ignore_interrupt


def main(argv: list[str] | None = None) -> int:
    """Run one command line, by default the process's own; return its exit status (see `rehead.errors`)."""
    if argv is None:
        answer_signals()
    from rehead.cli.entry import main as run

    status = run(argv)
    if argv is None:
        ignore_interrupt()
    return status


__all__ = ["main"]
