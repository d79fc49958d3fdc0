"""Where rehead keeps files that are shared by all runs on a machine."""

import os
import stat
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of downloads and compiled kernels, without creating it.

    It is `rehead` in `XDG_CACHE_HOME`, by default ~/.cache; for a user without a home, a folder of this user's among
    the temporary files.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "rehead"
    try:
        return Path.home() / ".cache" / "rehead"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return Path(tempfile.gettempdir()) / f"rehead-{os.geteuid()}"


def require_own(path: Path) -> os.stat_result:
    """Return what `lstat` says of `path`. Raises PermissionError for a link, and for what belongs to another user."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} is a link")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    return found


def require_private(path: Path) -> None:
    """Raise PermissionError if another user can change `path`, a file or folder that code is loaded from."""
    found = require_own(path)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be changed by other users")
