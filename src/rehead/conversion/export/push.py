"""Uploads an exported folder to the Hugging Face Hub: by huggingface_hub, with the token that it finds."""

import hashlib
import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rehead import __version__
from rehead.checkpoint.files.publish import sha256, verify
from rehead.conversion.origin import Origin
from rehead.errors import IntegrityError, InvalidInput, ReheadError, ResourceError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

log = logging.getLogger("rehead")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
THEIRS = ".gitattributes"
"""A file that the Hub writes itself."""
LISTED = 3
"""Names of files in a message, at most."""
OTHER = "ORG/NAME"
LOGIN = "Log in with `hf auth login`, or set HF_TOKEN"
REASONS = {
    401: f"the Hub does not accept the token. {LOGIN}",
    403: "the token may not write there. Use one with write access to it",
    412: "it was changed at the same time",
}
"""What an HTTP status means here."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The page of an uploaded model, and the commit that holds it."""

    url: str
    commit: str


def require_name(name: str) -> None:
    """Raise UsageError unless the Hub can have a model called `name`."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported, but not for mypy

    wrong = f"--push {name!r:.120} is not a valid name on the Hub: write org/name, for example me/my-model."
    if not NAME.fullmatch(name):
        raise UsageError(wrong)
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UsageError(
            f"{wrong} It has at most 96 characters, no `--` or `..`, and does not end in `-`, `.` or `.git`."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Push:
    """An upload of a published `folder` to the model `name`, which is created if necessary, `private` if asked.

    A repository that holds other files is refused; with `replace` they are replaced or deleted, in a new commit.
    """

    folder: Path
    name: str
    private: bool = False
    replace: bool = False

    def run(self, *, progress: bool = False) -> Pushed:
        """Upload the files, and compare what the Hub then has with them; `progress` shows that of huggingface_hub.

        Raises ReheadError saying that the folder is still there and how to upload it later. No message has the token.
        """
        verify(self.folder)
        if not Origin.read(self.folder, self.folder).licence:
            log.warning("the licence of %s is unknown, and its card on the Hub will say so.", self.name)
        try:
            with _quiet(progress):
                return self._run()
        except ReheadError:
            raise
        except Exception as error:  # of whichever HTTP library it uses
            reason = _reason(error)
        raise ResourceError(f"{self.name} was not uploaded: {reason}. {self._later()}")

    def _run(self) -> Pushed:
        from huggingface_hub import HfApi, get_token

        token = get_token()
        if token is None:
            raise ResourceError(
                f"{self.name} was not uploaded: no token for the Hugging Face Hub was found. {LOGIN}. {self._later()}"
            )
        api = HfApi(token=token)
        created = self._create(api)
        info = api.model_info(self.name)
        if not created:
            if self.private and not info.private:
                raise InvalidInput(
                    f"{self.name} is there and is public, so nothing was uploaded with --private. Give it "
                    f"another name. {self._later(name=OTHER)}"
                )
            if not self.replace:
                self._require_free(_files(api, self.name, info.sha))
        done = api.upload_folder(
            repo_id=self.name,
            folder_path=self.folder,
            commit_message=f"Upload by rehead {__version__}",
            parent_commit=info.sha,
            delete_patterns="*" if self.replace and not created else None,
        )
        self._require_whole(_files(api, self.name, done.oid), done.oid)
        return Pushed(url=f"{api.endpoint}/{self.name}", commit=done.oid)

    def _create(self, api: "HfApi") -> bool:
        """Create the repository; return False if there is one, also one that this token may write but not create."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            api.create_repo(self.name, private=self.private or None)
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status != 409 and not (status == 403 and api.repo_exists(self.name)):
                raise
            return False
        return True

    def _require_free(self, held: "dict[str, RepoFile]") -> None:
        """Refuse a repository with files that are not the folder's; an interrupted upload may be completed."""
        others = sorted(path for path, file in held.items() if not _is_same(file, self.folder / path))
        if others:
            more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
            raise InvalidInput(
                f"{self.name} holds other files ({', '.join(others[:LISTED])}{more}), so nothing was uploaded. Give "
                f"--push another name, or --replace to put the export in their place. {self._later(replace=True)}"
            )

    def _require_whole(self, held: "dict[str, RepoFile]", commit: str) -> None:
        """Raise IntegrityError unless the Hub has every file of the folder, byte for byte."""
        for file in sorted(self.folder.iterdir()):
            if file.name not in held or not _is_same(held[file.name], file):
                raise IntegrityError(
                    f"{self.name} at commit {commit} does not hold {file.name} as it was uploaded. {self._later()}"
                )

    def _later(self, name: str = "", replace: bool = False) -> str:
        """Say where the export is, and by which command of huggingface_hub to upload it."""
        words = ["hf", "upload", name or self.name, str(self.folder), "."]
        words += ["--private"] * self.private + ["--delete", "*"] * (replace or self.replace)
        return f"The export is in {self.folder}; {shlex.join(words)} uploads it later."


def _files(api: "HfApi", name: str, commit: str | None) -> dict[str, "RepoFile"]:
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(name, recursive=True, revision=commit)
    return {file.path: file for file in tree if isinstance(file, RepoFile) and file.path != THEIRS}


def _is_same(held: "RepoFile", file: Path) -> bool:
    """Whether the Hub's file has the bytes of `file`: by the sha256 of large files, by git's hash of others."""
    if not file.is_file() or held.size != file.stat().st_size:
        return False
    if held.lfs is not None:
        return held.lfs.sha256 == sha256(file)
    blob = file.read_bytes()
    return held.blob_id == hashlib.sha1(b"blob %d\0%s" % (len(blob), blob)).hexdigest()


def _reason(error: Exception) -> str:
    """Return an error of huggingface_hub in words, without the token."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in REASONS:
        return REASONS[status]
    words = getattr(error, "server_message", None) or (f"status {status}" if status else str(error))
    words = " ".join(words.split()).replace(get_token() or "\0", "***").rstrip(".")
    return f"{constants.ENDPOINT} failed ({words:.150})"


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Let huggingface_hub log errors only, and show its progress only if asked."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported, but not for mypy
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from huggingface_hub.utils import logging as theirs

    before, shown = theirs.get_verbosity(), not are_progress_bars_disabled()
    theirs.set_verbosity_error()
    if shown and not progress:
        disable_progress_bars()
    try:
        yield
    finally:
        theirs.set_verbosity(before)
        if shown and not progress:
            enable_progress_bars()
