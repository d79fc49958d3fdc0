"""Processes of this machine."""

from pathlib import Path


def is_running(number: int | str) -> bool:
    """Whether a process has not ended; one that has stays as a zombie where PID 1 does not ask for its status."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone, perhaps while it was read
        return False
