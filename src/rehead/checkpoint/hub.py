"""Models of the Hugging Face Hub, pinned to a commit: `org/name@<40 hex digits>`.

A branch can change after a measurement, so it is refused. Files are stored in the Hub's own cache; pickles and
code are not fetched.
"""

import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rehead.errors import InvalidInput, ReheadError, ResourceError

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB = "https://huggingface.co/"
CARD = "README.md"
"""A model's card: its licence, origin and description."""
TEMPLATES = "*.jinja"
FETCHED = ["*.json", "*.safetensors", TEMPLATES, "*.md"]
LEFT = ["*/*", "consolidated*.safetensors", "adapter_model.safetensors", "*.fp16*.safetensors"]
"""Files of a repository's top folder, without further copies of the weights. A manifest lists the .md files."""
PATIENCE = 5.0
"""Timeout in seconds of a request about a model."""


def pinned(path: str) -> bool:
    """Whether `path` names a model of the Hub at a commit."""
    match = NAME.fullmatch(path)
    return match is not None and match[2] is not None and COMMIT.fullmatch(match[2]) is not None


def snapshot(path: Path) -> Path | None:
    """Return the folder of the model that `path` names, fetched if necessary; None for a path of another form.

    Raises InvalidInput for a model that is not pinned, is gated or does not exist, ResourceError without a network.
    """
    named = _named(path)
    if named is None:
        return None
    name, revision = named
    from huggingface_hub import HfApi, errors, get_cached_repo_tree, snapshot_download

    wanted: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": FETCHED,
        "ignore_patterns": LEFT,
    }
    try:
        # Without the list of its files, a folder that another program fetched in part would pass as whole.
        get_cached_repo_tree(name, revision=revision)
        return Path(snapshot_download(name, local_files_only=True, **wanted))
    except (errors.CachedRepoTreeNotFoundError, errors.LocalEntryNotFoundError):
        pass
    try:
        # This fails at once, a download after retries.
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
        return Path(snapshot_download(name, **wanted))
    except Exception as error:  # of whichever HTTP library it uses
        # Without a network: use what is cached, even by an earlier release, which left out chat templates.
        for fetched in (FETCHED, [pattern for pattern in FETCHED if pattern != TEMPLATES]):
            wanted["allow_patterns"] = fetched
            with suppress(errors.LocalEntryNotFoundError):
                folder = Path(snapshot_download(name, local_files_only=True, **wanted))
                if any(folder.glob("*.safetensors")):  # `config_file` fetches none
                    return folder
        raise _reason(name, revision, error) from error


def config_file(path: Path) -> Path | None:
    """Return config.json of the model that `path` names, fetched without the weights if necessary.

    None for a path of another form. Raises as `snapshot` does.
    """
    named = _named(path)
    if named is None:
        return None
    name, revision = named
    from huggingface_hub import HfApi, errors, hf_hub_download

    fetch = partial(hf_hub_download, name, "config.json", revision=revision)
    with suppress(errors.LocalEntryNotFoundError):
        return Path(fetch(local_files_only=True))
    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
        return Path(fetch())
    except errors.RemoteEntryNotFoundError as error:
        raise InvalidInput(f"{name}@{revision} has no config.json, so it cannot be planned.") from error
    except Exception as error:
        raise _reason(name, revision, error) from error


def _named(path: Path) -> tuple[str, str] | None:
    """Return the name and the commit in `path`; None for another form. Raises InvalidInput without a commit."""
    match = NAME.fullmatch(str(path))
    if match is None or (match[2] is None and path.parent.exists()):  # a local name, misspelt
        return None
    name, revision = match[1], match[2]
    if revision is None or not COMMIT.fullmatch(revision):
        raise InvalidInput(
            f"{path} does not exist locally. To load it from the Hugging Face Hub, pin a commit: "
            f"{name}@<40 hex digits>.{_newest(name, revision or 'main')}"
        )
    return name, revision


def _newest(name: str, revision: str) -> str:
    """Return the sentence of a message that names a branch's commit, or tells why it is unknown."""
    from huggingface_hub import HfApi, errors

    try:
        commit = HfApi().model_info(name, revision=revision, timeout=PATIENCE).sha
    except errors.RevisionNotFoundError:
        return f" It has no {revision}."
    except errors.RepositoryNotFoundError:
        return " There is no such model there, or it is private."
    except Exception as error:
        reason = " ".join(str(error).split())
        return f" Which commit its {revision} is at could not be asked ({reason:.80})."
    return f" Its {revision} is at {name}@{commit}." if commit else ""


def _reason(name: str, commit: str, error: Exception) -> ReheadError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):  # also a RepositoryNotFoundError
        return InvalidInput(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InvalidInput(f"{name} has no commit {commit}: look it up on its page, under Files.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return InvalidInput(f"{name} is not a model on Hugging Face, or is private: `hf auth login`.")
    reason = " ".join(str(error).split())
    return ResourceError(
        f"{name}@{commit} is not in the cache and cannot be fetched ({reason:.120}). Give a folder, or go online."
    )
