"""The exceptions that rehead raises. A message names the value, the rule it broke, and a way out.

The command line turns each class into one line on stderr and its `exit_code`. 130, 143 and 129 stand for
SIGINT, SIGTERM and SIGHUP, 8 for a bug in rehead.
"""


class ReheadError(Exception):
    """Any failure that a user can act on."""

    exit_code = 8


class UsageError(ReheadError, ValueError):
    """A call or command line that asks for something impossible."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration that does not describe a valid model or run."""


class InvalidInput(ReheadError, ValueError):
    """A text, prompt or folder that is missing or has the wrong content."""

    exit_code = 3


class IntegrityError(ReheadError):
    """A file that is damaged, truncated, or differs from its recorded checksum."""

    exit_code = 4


class ResourceError(ReheadError, OSError):
    """A lack of disk space, memory, network or permission."""

    exit_code = 5


class OutOfMemory(ResourceError):
    """Work that takes more memory than there is."""


class Busy(ReheadError):
    """A folder that another process is writing to."""

    exit_code = 6


class NumericError(ReheadError, ArithmeticError):
    """A number that is not finite, or that its number format cannot hold."""

    exit_code = 7


class Interrupted(ReheadError):
    """A run that was asked to stop and has saved its state."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[str, int]]:
        """Pickle both arguments, so that the exception can cross processes."""
        return Interrupted, (str(self), self.exit_code - 128)
