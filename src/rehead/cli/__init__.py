"""The command line: one function per command, which only parses and prints; torch is imported when needed.

Importing this package imports no command, so that signals are handled before anything heavy is loaded.
"""

from rehead.cli.interrupt import answer_signals, ignore_signals


def main(argv: list[str] | None = None) -> int:
    """Run one command line, by default `sys.argv`; return its exit status (see `rehead.errors`)."""
    if argv is None:
        answer_signals()
    from rehead.cli.entry import main as run

    status = run(argv)
    if argv is None:
        ignore_signals()
    return status


__all__ = ["main"]
