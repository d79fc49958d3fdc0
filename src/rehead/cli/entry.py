"""Runs a command line, from argv to the exit status; a failure is one line on stderr."""

import logging
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from math import inf
from typing import Any, get_args, get_origin, get_type_hints

from cyclopts import CycloptsError, Parameter

from rehead import native
from rehead.cli import (  # noqa: F401 (each enters its commands)
    checking,
    conversion,
    exporting,
    importing,
    measuring,
    models,
    training,
)
from rehead.cli.app import app, tell, warn
from rehead.cli.interrupt import WORDS
from rehead.cli.loading import load_torch
from rehead.cli.streams import discard_stdout, lose_errors, replace_streams
from rehead.cli.wording import as_typed, worded
from rehead.errors import ReheadError, ResourceError, UsageError
from rehead.registry import nearest
from rehead.system.shortage import as_out_of_memory
from rehead.system.torchrun import of_torchrun

LONGEST = 100
"""Characters of a word in an error message; a longer one, such as a path, loses its middle."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line; return its exit status (see `rehead.errors`)."""
    replace_streams()
    if argv is None:
        lose_errors()
    argv = [_normalise_flag(word) for word in (sys.argv[1:] if argv is None else argv)]
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    with warnings.catch_warnings(), _shown_log("--json" in argv):
        # PyTorch's, of a norm's float32 weights under autocast: there is nothing that a user could do.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        warnings.showwarning = partial(_warn_once, set())
        return _run(argv, debug)


def _run(argv: list[str], debug: bool) -> int:
    """Run a command; turn any failure into one line on stderr and an exit status."""
    try:
        _read_environment()
        if not argv:
            app.help_print()
            return UsageError.exit_code
        _require_text(argv)
        _require_command(argv[0])
        _require_whole(argv)
        command, given, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
        if command.__module__.startswith("rehead."):  # not cyclopts' --help
            load_torch()
        command(*given.args, **given.kwargs)
        sys.stdout.flush()
    except CycloptsError as error:
        where = "rehead" if argv[0].startswith("-") else f"rehead {argv[0]}"
        return _fail(UsageError(f"{worded(error, argv)} See {where} --help."), debug)
    except ReheadError as error:
        return _fail(error, debug, argv)
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0]) if error.args else signal.SIGINT
        print(WORDS[number], file=sys.stderr)
        return 128 + number
    except BrokenPipeError:
        discard_stdout()
        return 0
    except SystemExit as error:  # rich's answer to a closed stdout
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return 0
    except OSError as error:
        discard_stdout()
        where = "the path" if error.filename is not None else "where the output goes"
        return _fail(ResourceError(f"{error}: check {where}, its permissions and free space."), debug)
    except Exception as error:
        if (short := as_out_of_memory(error)) is not None:
            return _fail(short, debug)
        if debug:
            raise
        with tempfile.NamedTemporaryFile("w", prefix="rehead-", suffix=".log", delete=False) as log:
            traceback.print_exc(file=log)
        print(f"rehead: a bug in rehead: {error!r:.150}. The traceback is in {log.name}.", file=sys.stderr)
        return 8
    return 0


class _Lines(logging.Handler):
    """Prints log records on the current stderr, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        else:
            tell(record.getMessage())


@contextmanager
def _shown_log(json: bool) -> Iterator[None]:
    """Show the records of the logger "rehead"; with --json only warnings."""
    logger, lines = logging.getLogger("rehead"), _Lines()
    level = logger.level
    logger.setLevel(logging.WARNING if json else logging.INFO)
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


def _read_environment() -> None:
    """Apply REHEAD_NATIVE, rehead's own variable; remove sizes of a terminal that are none.

    rich takes COLUMNS=0 as the width; without the variable it asks the terminal.
    """
    environment = os.environ
    native.use_environment()
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch("0*[1-9][0-9]{0,4}", environment.get(name, "80")):
            del environment[name]


def _normalise_flag(word: str) -> str:
    """Return `--model.rope=True` as `model.rope=True`."""
    match = re.fullmatch(r"(?:--)?([a-z_]+\.[A-Za-z_][\w.]*)(=.*)?", word, re.DOTALL)
    if match is None or not (match[2] or word.startswith("--")):
        return word
    return word.removeprefix("--")


def _require_text(argv: list[str]) -> None:
    """Raise UsageError for arguments that are empty (a path would mean this folder) or not UTF-8."""
    for before, word in pairwise(["", *argv]):
        if re.fullmatch("(--[a-z-]+=)?", word):
            option = word or before
            name = option.removesuffix("=") if option.startswith("--") else repr(word)
            raise UsageError(f"{name}: the argument is empty. Give it a value of at least one character.")
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"{word!r:.200} is not UTF-8: rename it, or set LC_ALL=C.UTF-8.")


def _require_command(word: str) -> None:
    """Raise UsageError for an unknown command; options such as --help are commands, too."""
    if word not in app:
        commands = sorted(name for name in app if not name.startswith("-"))
        raise UsageError(f"unknown command {word!r}.{nearest(word, commands)} See rehead --help.")


def _require_whole(argv: list[str]) -> None:
    """Raise UsageError for 1.5 where an integer is expected; cyclopts would round it."""
    if argv[0].startswith("-"):
        return
    command = app[argv[0]].default_command
    assert command is not None
    hints, whole = get_type_hints(command, include_extras=True), dict[str, bool]()
    for name, hint in get_type_hints(command).items():
        if int in (get_args(hint) or (hint,)):
            parameters = (each for each in get_args(hints[name]) if isinstance(each, Parameter))
            for option in {f"--{name.replace('_', '-')}", *chain(*(each.name or () for each in parameters))}:
                whole[option] = get_origin(hint) is tuple  # which takes several words
    option, n_word = "", 0.0
    for word in argv[1:]:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            n_word = 0 if equals else inf if whole.get(option) else 1
        else:
            value, n_word = word if n_word > 0 else "", n_word - 1
        if option in whole and "." in value:
            raise UsageError(f"{option} {value}: expected a whole number.")


def _short(word: str) -> str:
    return word if len(word) <= LONGEST else f"{word[: LONGEST // 2]}...{word[-LONGEST // 2 :]}"


def _warn_once(shown: set[str], message: Warning | str, *where: Any, **more: Any) -> None:
    if str(message) not in shown:
        shown.add(str(message))
        warn(message)


def _fail(error: ReheadError, debug: bool, argv: Sequence[str] = ()) -> int:
    if debug:
        traceback.print_exc()
    place = of_torchrun()
    who = f"rank {place.rank}: " if place is not None and place.rank else ""
    message = re.sub(r"\s*\n\s*", " ", as_typed(str(error), argv))
    tell(who + re.sub(r"\S+", lambda word: _short(word[0]), message))
    return error.exit_code
