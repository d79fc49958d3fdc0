"""`rehead eval --tasks`."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rehead.cli.app import Dtype, say, torch_dtype
from rehead.errors import UsageError

if TYPE_CHECKING:
    from rehead.measure.stored import Storage


def evaluate_tasks(
    folder: Path,
    tasks: str,
    *,
    num_fewshot: int | None,
    limit: int | None,
    length: int | None,
    batch_size: int | None,
    dtype: Dtype | None,
    stored_as: "Storage | None",
    device: str,
    json: bool,
) -> None:
    """Run tasks of lm-evaluation-harness on the model in a folder, and print the results."""
    from rehead.measure.harness import Scored
    from rehead.measure.length import text_length
    from rehead.measure.stored import as_stored
    from rehead.measure.tasks import require_harness, run_tasks
    from rehead.report.progress import Board
    from rehead.report.tasks import document, present
    from rehead.system.device import choose_device
    from rehead.tokenizer import open_model

    names = [name for name in tasks.split(",") if name]
    if not names:
        raise UsageError(f"--tasks {tasks!r} names no task. Give one, or several with commas between.")
    for option, value, least in (
        ("--limit", limit, 1),
        ("--num-fewshot", num_fewshot, 0),
        ("--batch-size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{option} {value}. Use {least} or more.")
    require_harness()
    # It warns of every option that a task does not set.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with Board(f"evaluating {folder}"):
        opened = open_model(
            folder, device=choose_device(device), dtype=None if dtype is None else torch_dtype(dtype)
        )
        opened.require_tokenizer()
        config = opened.model.config
        if stored_as is not None:
            opened = replace(opened, model=as_stored(opened.model, stored_as))
        scored = Scored(
            opened=opened,
            length=text_length(config, config.block_size if length is None else length),
            batch_size=batch_size,
        )
        found = run_tasks(scored, names, num_fewshot=num_fewshot, limit=limit)
    facts = {
        "model": str(folder),
        "length": scored.length,
        "dtype": str(opened.model.head.weight.dtype)[6:],
        **({} if stored_as is None else {"stored_as": stored_as}),
    }
    if json:
        say(facts | document(found), "", json)
    else:
        kind = facts["dtype"] if stored_as is None else f"{facts['dtype']}, stored as {stored_as}"
        present(f"{folder} in {kind}, length {scored.length:,}", found)
