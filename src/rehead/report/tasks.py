"""Results of lm-evaluation-harness, on the terminal and as a JSON document."""

import math
from collections.abc import Iterator
from typing import Any

from rehead.report.table import show

HEADER = ("task", "version", "shots", "documents", "metric", "", "value", "±")
BETTER = {True: "↑", False: "↓"}
PLAIN = ("alias", "name", "sample_len", "sample_count")


def document(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results by task, under the harness's names: `results`, `n-shot`, `versions` and `n-samples`."""
    from lm_eval import __version__

    results = {
        task: {key: _number(value) for key, value in table.items() if key not in PLAIN}
        for task, table in found["results"].items()
    }
    rest = {key: found.get(key, {}) for key in ("n-shot", "versions", "n-samples")}
    return {"lm_eval": __version__, "results": results, **rest}


def present(title: str, found: dict[str, Any]) -> None:
    """Print a table of all metrics of all tasks."""
    show(
        title,
        HEADER,
        list(_rows(found)),
        "± is the standard error of the mean. ↑: more is better, ↓: less.",
        texts=(0, 4),
        optional=(1, 2, 3),
    )


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for task, table in found["results"].items():
        better = found.get("higher_is_better", {}).get(task) or {}
        documents = found.get("n-samples", {}).get(task, {}).get("effective", "")
        head = (
            task,
            str(found["versions"].get(task, "")),
            str(found["n-shot"].get(task, "")),
            str(documents),
        )
        for key, value in table.items():
            metric, _, kind = key.partition(",")
            if key in PLAIN or metric.endswith("_stderr"):
                continue
            error = _number(table.get(f"{metric}_stderr,{kind}"))
            name = metric if kind in ("none", "") else f"{metric} ({kind})"
            more = better.get(metric)
            arrow = "" if more is None else BETTER[more]
            yield *head, name, arrow, _shown(_number(value)), "" if error is None else _shown(error)
            head = ("", "", "", "")


def _number(value: Any) -> float | int | str | None:
    """Return a result in a form that JSON can hold; None for one that is missing or not finite."""
    if value is None or value == "N/A" or isinstance(value, str):
        return None if value in (None, "N/A") else value
    number = float(value)
    return number if math.isfinite(number) else None


def _shown(value: float | int | str | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str("-" if value is None else value)
