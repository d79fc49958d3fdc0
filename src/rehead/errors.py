"""What rehead raises. A message names the value, the rule it broke, and a way out.

The command line turns each class into one line on stderr and its `exit_code`; 130 and 143 are
SIGINT and SIGTERM, 8 is a bug of ours.
"""


class ReheadError(Exception):
    """Any mistake or mishap a user can act on."""

    exit_code = 8


class UsageError(ReheadError, ValueError):
    """A call or a command line that asks for something that cannot be."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration that describes no model or no run."""


class InvalidInput(ReheadError, ValueError):
    """A text, prompt, or folder that is not what it should be."""

    exit_code = 3


class IntegrityError(ReheadError):
    """A file that is damaged, cut short, or not the one that was recorded."""

    exit_code = 4


class ResourceError(ReheadError, OSError):
    """Disk, memory, network or permission that ran out."""

    exit_code = 5


class Busy(ReheadError):
    """A folder that another process is writing."""

    exit_code = 6


class NumericError(ReheadError, ArithmeticError):
    """A number that is no longer finite."""

    exit_code = 7


class Interrupted(ReheadError):
    """A run that was asked to stop, and has saved what it had."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[str, int]]:
        """From one process to another, as both arguments."""
        return Interrupted, (str(self), self.exit_code - 128)
