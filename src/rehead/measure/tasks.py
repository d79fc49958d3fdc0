"""Tasks of lm-evaluation-harness by name, file or folder, and their results."""

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rehead.errors import InvalidInput, ReheadError, ResourceError, UsageError
from rehead.measure.harness import Scored, language_model
from rehead.stages import staged

SEED = 1234
"""The harness's own, by which examples are drawn for few-shot prompts."""
_UNKNOWN = (
    "unknown task {!r}, and no file of that name.{} Give a task of lm-evaluation-harness, a YAML file, or a folder of "
    "them; `lm_eval ls tasks` lists all."
)


def run_tasks(
    scored: Scored, names: Sequence[str], *, num_fewshot: int | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Return what the harness finds: `results` by task, and `n-shot`, `versions`, `n-samples`, `higher_is_better`.

    A name is a task, group or tag of the harness or a pattern (`mmlu_*`), a task's YAML file, or a folder of them.
    `num_fewshot` replaces the number of examples in a prompt, `limit` caps a task's documents. Warns of tasks whose
    YAML says num_fewshot: 0, which never take any. Raises UsageError without the package lm-eval or for an unknown
    name, ResourceError for data that cannot be fetched, and InvalidInput for a task that cannot be used.
    """
    require_harness()
    from lm_eval import evaluate

    loaded = load(names)
    _set_examples(loaded["tasks"], num_fewshot)
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    with _refusals("the tasks", ValueError), _shown_progress():
        found: dict[str, Any] = evaluate(language_model(scored), loaded, limit=limit, log_samples=False)
    return found


def _set_examples(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Set how many examples the prompts of tasks have, and how these are drawn."""
    never = [name for name, task in tasks.items() if task.get_config("num_fewshot") == 0]
    if num_fewshot and never:
        warnings.warn(
            f"--num-fewshot {num_fewshot} is left out for {', '.join(never)}: num_fewshot: 0 in the YAML of a task "
            "means that it takes no examples",
            stacklevel=3,
        )
    for name, task in tasks.items():
        if num_fewshot is not None and name not in never:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)


def require_harness() -> None:
    """Raise UsageError without the package lm-eval."""
    if find_spec("lm_eval") is None:
        raise UsageError('--tasks needs lm-evaluation-harness: pip install "rehead[eval]".')


def load(names: Sequence[str]) -> Any:
    """Return the harness's own tables of these tasks and their groups."""
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    files = [name for name in names if Path(name).is_file()]
    folders = [name for name in names if Path(name).is_dir()]
    known = [name for name in names if name not in files + folders]
    for name in known:
        if Path(name).name != name or Path(name).suffix == ".yaml":
            raise UsageError(_UNKNOWN.format(name, ""))  # before the harness lists its own, in many seconds
    manager = TaskManager(include_path=folders or None, include_defaults=bool(known))
    wanted = list(files)
    for folder in folders:
        inside = TaskManager(include_path=folder, include_defaults=False).all_subtasks
        if not inside:
            raise InvalidInput(f"{folder} holds no task: expected YAML files of lm-evaluation-harness.")
        wanted += inside
    for name in known:
        matches = manager.match_tasks([name])
        if not matches:
            near = get_close_matches(name, manager.all_tasks, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(_UNKNOWN.format(name, hint))
        wanted += matches
    parts = []
    for name in staged(dict.fromkeys(wanted), "reading tasks", None, "tasks"):
        with _refusals(f"task {name}", Exception):
            found = manager.load(name)
            groups = found.get("groups") or {}
            parts += [next(iter(groups.values()))] if groups else list(found["tasks"].values())
    with _refusals("the tasks", ValueError):
        return manager.load(parts)


@contextmanager
def _refusals(what: str, kinds: type[Exception]) -> Iterator[None]:
    """Turn what the harness raises into one line, errors of the network first."""
    try:
        yield
    except ReheadError:
        raise
    except OSError as error:
        raise ResourceError(
            f"{what}: its data cannot be read ({_first(error)}). Run it once where the network is, or give a task "
            "whose data are files here."
        ) from error
    except kinds as error:
        raise InvalidInput(
            f"{what} cannot be used: {_first(error)}. See the harness's guide to tasks."
        ) from error


def _first(error: Exception) -> str:
    """Return the first line of an error, without its last dot."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


@contextmanager
def _shown_progress() -> Iterator[None]:
    """Report the harness's own progress bar as a stage, so that it does not print over others."""
    from lm_eval.api import task

    theirs = task.tqdm
    task.tqdm = lambda documents, total: staged(documents, "making prompts", total, "documents")
    try:
        yield
    finally:
        task.tqdm = theirs
