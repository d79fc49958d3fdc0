"""What a study found: a table on the terminal, pictures, and one page that has everything in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rehead.data.files import write_whole
from rehead.errors import UsageError
from rehead.report import interactive, maps, page, shrink
from rehead.report.chart import Look, Panel
from rehead.report.figures import Figures, frontier, per_token
from rehead.report.plot import draw
from rehead.report.table import show
from rehead.report.text import harmless
from rehead.study import Maps
from rehead.study.claims import claim, unlike
from rehead.study.results import spread

Record = dict[str, Any]
REPORT = "report.html"
HEADER = (
    "variant",
    "val loss",
    "parameters",
    "KV B/token\npredicted",
    "\nheld",
    "tok/s\ncached",
    "\nuncached",
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, its panels, and what may be said of the losses."""

    ask: str
    findings: Sequence[str]
    panels: Sequence[Panel]


def require_packages() -> None:
    """Refuse to begin what could not be reported."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UsageError(f'a report needs {" and ".join(missing)}: pip install "rehead[report]".')


def present(document: Record, folder: Path) -> None:
    """Print the table of all variants, and where everything is."""
    if document["conversion"] is None:
        _present_trained(document)
    else:
        shrink.present(document)
    print(f"report   {folder / REPORT}\nnumbers  {folder / 'results.json'}, runs.csv, curves.csv")


def _present_trained(document: Record) -> None:
    variants = document["variants"]
    rows = [
        (
            harmless(one["variant"], 60),
            _loss(one["val_loss"]),
            f"{one['costs']['parameters']:,}",
            f"{one['costs']['cache_bytes'] / one['costs']['context']:,.0f}",
            f"{per_token(one):,.0f}",
            f"{one['costs']['tokens_per_second_cached'][0]:,.0f}",
            f"{one['costs']['tokens_per_second_uncached'][0]:,.0f}",
        )
        for one in variants
    ]
    seeds = max(len(one["runs"]) for one in variants)
    notes = (
        f"val loss in nats per token{f', mean and span of {seeds} seeds' if seeds > 1 else ''}. KV bytes in float32 "
        "over all layers, the cache after the whole context divided by its length; an RNN keeps one state instead. "
        "tok/s: greedy, one sequence, medians."
    )
    show(document["about"], HEADER, rows, notes)
    for finding in findings(document):
        print(finding)


def write(document: Record, attention: Mapping[str, Maps], folder: Path) -> None:
    """`folder`/report.html, and a PNG of every panel beside it."""
    found = answers(document)
    for number, answer in enumerate(found, 1):
        for panel in answer.panels:
            draw(panel, folder / f"{number}-{panel.name}.png")
    if document["conversion"] is not None:
        draw(shrink.chart(shrink.rows(document)), folder / "shrink.png")
    write_whole(folder / REPORT, [html(document, attention).encode()])


def html(document: Record, attention: Mapping[str, Maps]) -> str:
    """The whole page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("rehead.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "harmless": harmless,
        "loss": _loss,
        "per_token": per_token,
        "figure": lambda chart: Markup(interactive.fragment(chart)),
        "swatch": lambda look: Markup(interactive.swatch(look)),
    }
    variants = document["variants"]
    figures = [
        (name, Markup(maps.fragment(harmless(name), one.tokens, one.weights, one.windows)))
        for name, one in attention.items()
    ]
    shown = {
        "document": document,
        "variants": variants,
        "looks": {one["variant"]: Look.of(index) for index, one in enumerate(variants)},
        "lengths": {one["length"] for one in variants},
        "answers": answers(document),
        "most_sample": shrink.MOST_SAMPLE,
    }
    if document["conversion"] is None:
        title = f"Study: {harmless(document['study'])}"
        template = environment.get_template("study.html")
        body = template.render(shown, facts=facts(document), findings=findings(document), maps=figures)
    else:
        title = "What a smaller KV cache costs"
        environment.filters |= {"over": shrink.span, "texts": shrink.texts, "proof": shrink.proof}
        environment.filters["percent"] = shrink.percent
        made = shrink.rows(document)
        body = environment.get_template("shrink.html").render(
            shown,
            source=shrink.source_line(document),
            rows=made,
            panel=shrink.chart(made),
            findings=shrink.findings(made),
            before=figures[0][1] if figures else None,
            after=figures[1:],
        )
    style, script = ((files("rehead.report") / name).read_text() for name in ("study.css", "study.js"))
    head = f"<style>{style}</style>\n{interactive.script()}{maps.script()}<script>{script}</script>\n"
    return page.page(title, body, head)


def answers(document: Record) -> list[Answer]:
    """Every question with what is shown for it."""
    figures = Figures(document)
    found = []
    for question in document["questions"]:
        panels = [panel for kind in question["show"] if (panel := figures.panel(kind, question["of"]))]
        findings = []
        if document["conversion"] is None and {"loss", "frontier"} & set(question["show"]):
            findings = _growth([figures.variants[name] for name in question["of"]])
            findings += _findings(question["claims"])
        found.append(Answer(ask=question["ask"], findings=findings, panels=panels))
    return found


def findings(document: Record) -> list[str]:
    """What the answers say, each once."""
    return list(dict.fromkeys(finding for answer in answers(document) for finding in answer.findings))


def facts(document: Record) -> list[tuple[str, str, str]]:
    """What one sees first: name, value, and whose it is."""
    variants = document["variants"]
    seeds = sorted({run["seed"] for one in variants for run in one["runs"]})
    found = [
        (
            "Models",
            str(sum(len(one["runs"]) for one in variants)),
            f"{len(variants)} variants, {_seeds(seeds)}",
        ),
        _loss_fact(variants),
    ]
    caches = [one for one in variants if one["costs"]["kv_bytes_per_token"]]
    if caches:
        least, most = (function(map(per_token, caches)) for function in (min, max))
        small = _names([one["variant"] for one in caches if per_token(one) == least])
        share = f", {100 * least / most:.0f} % of the largest" if least < most else ""
        found.append(("Smallest KV cache", f"{least:,.0f} B", f"per token: {small}{share}"))
    front = frontier(variants)
    if front and not any(unlike(variants[0], one) for one in variants):
        found.append(("On the frontier", str(len(front)), f"beaten by none: {_names(front)}"))
    return found


def _loss_fact(variants: Sequence[Record]) -> tuple[str, str, str]:
    """The lowest loss where the seeds tell it apart from all others, else the range that was measured."""
    best = min(variants, key=lambda one: one["val_loss"][0])
    claims = [claim(best, one) for one in variants if one is not best]
    low, high = best["val_loss"][0], max(one["val_loss"][0] for one in variants)
    if min(len(one["runs"]) for one in variants) < 2:
        why = "one seed each, so none is ranked"
    elif any("unlike" in one for one in claims):
        why = "of unlike models, so none is ranked"
    elif all(one["told_apart"] for one in claims):
        return "Lowest validation loss", f"{low:.4f}", f"nats per token: {harmless(best['variant'])}"
    else:
        equal = [one["variant"] for one in claims if not one["told_apart"]]
        why = f"lowest {harmless(best['variant'])}, not told apart from {_names(equal)}"
    return "Validation loss", f"{low:.3f}–{high:.3f}", f"nats per token; {why}"


def _names(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(harmless, names[:most])) + rest


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def _findings(claims: Sequence[Record]) -> list[str]:
    """What may be said of the losses of a question."""
    alike = [one for one in claims if "unlike" not in one]
    if any(one["seeds"] < 2 for one in alike):
        found = ["One seed each: no difference between losses is claimed."]
    else:
        found = [_said(one) for one in alike]
    rest = [one for one in claims if "unlike" in one]
    if rest:
        reasons = "; ".join(f"{harmless(one['variant'])} ({', '.join(one['unlike'])})" for one in rest)
        found.append(f"Not compared with {harmless(rest[0]['against'])}, being unlike: {reasons}.")
    return found


def _growth(variants: Sequence[Record]) -> list[str]:
    """What became of the loss of those that read longer blocks than what they continue: measured, not compared."""
    found = []
    for one in variants:
        starts = [run["curve"][0] for run in one["runs"] if run["curve"]]
        begun = [point for point in starts if point[0] == one["steps_before"]]
        if one["length"] <= one["length_before"] or len(begun) < len(one["runs"]):
            continue
        before, after = _loss(spread([point[2] for point in begun])), _loss(one["val_loss"])
        found.append(
            f"{harmless(one['variant'])} grows from {one['length_before']:,} to {one['length']:,} tokens after "
            f"{one['steps_before']:,} steps: at {one['length']:,} its loss is {before} at that point and {after} "
            f"after {one['steps'] - one['steps_before']:,} more."
        )
    return found


def _said(told: Record) -> str:
    one, other, by = harmless(told["variant"]), harmless(told["against"]), told["difference"]
    seeds, at = f"{told['seeds']} seeds", f" at {told['length']:,} tokens" if told["shorter"] else ""
    if not told["told_apart"]:
        return f"{one} and {other} are not told apart{at}: {by:+.4f} nats per token, within the spread of {seeds}."
    side = "above" if by > 0 else "below"
    return f"{one} ends {abs(by):.4f} nats per token {side} {other}{at}, over {seeds} that do not overlap."


def _loss(values: Sequence[float]) -> str:
    """A mean with what it spans."""
    mean, low, high = values
    return f"{mean:.4f}" if low == high else f"{mean:.4f} ({low:.4f} to {high:.4f})"
