"""Reports a study: a table on the terminal, images, and one page with everything."""

import re
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
from rehead.report.findings import compared, growth, loss
from rehead.report.plot import draw
from rehead.report.table import show
from rehead.report.text import sanitise
from rehead.study import Maps
from rehead.study.claims import claims, unlike
from rehead.study.preset import PANELS

Record = dict[str, Any]
REPORT, SHRINK = "report.html", "shrink.png"
IMAGE = re.compile(rf"\d+-({'|'.join(PANELS)})\.png|{re.escape(SHRINK)}")
"""Names of the images of a report."""
HEADER = (
    "variant",
    "val loss",
    "parameters",
    "KV B/token\npredicted",
    "KV B/token\nheld",
    "tok/s\ncached",
    "tok/s\nuncached",
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, its panels, and the findings about the losses."""

    ask: str
    findings: Sequence[str]
    panels: Sequence[Panel]


def require_packages() -> None:
    """Raise UsageError if a package that the report needs is missing."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UsageError(f'a report needs {" and ".join(missing)}: pip install "rehead[report]".')


def present(document: Record, folder: Path) -> None:
    """Print the table of all variants, and the paths of the results."""
    if document["conversion"] is None:
        _present_trained(document)
    else:
        shrink.present(document)
    for panel in [panel for answer in answers(document) for panel in answer.panels if panel.header]:
        show(panel.title, panel.header, panel.rows, " ".join(panel.notes))
    print(f"report   {folder / REPORT}\nnumbers  {folder / 'results.json'}, runs.csv, curves.csv")


def _present_trained(document: Record) -> None:
    variants = document["variants"]
    rows = [
        (
            sanitise(variant["variant"], 60),
            loss(variant["val_loss"]),
            f"{variant['costs']['parameters']:,}",
            f"{variant['costs']['cache_bytes'] / variant['costs']['context']:,.0f}",
            f"{per_token(variant):,.0f}",
            f"{variant['costs']['tokens_per_second_cached'][0]:,.0f}",
            f"{variant['costs']['tokens_per_second_uncached'][0]:,.0f}",
        )
        for variant in variants
    ]
    seeds = max(len(variant["runs"]) for variant in variants)
    notes = (
        f"val loss in nats per token{f', mean and range of {seeds} seeds' if seeds > 1 else ''}. KV bytes over all "
        "layers: the cache after a full context divided by its length; an RNN keeps one state instead. tok/s: "
        "greedy, one sequence, medians."
    )
    show(document["about"], HEADER, rows, notes)
    for finding in findings(document):
        print(finding)
    for name, export in _exports(document):
        print(f"{sanitise(name)}: {sanitise(shrink.proof(export), 500)}.")


def write(document: Record, attention: Mapping[str, Maps], folder: Path) -> None:
    """Write `folder`/report.html, and beside it a PNG of every panel that has charts, in place of earlier ones."""
    images = {
        f"{number}-{panel.name}.png": panel
        for number, answer in enumerate(answers(document), 1)
        for panel in answer.panels
        if panel.charts
    }
    if document["conversion"] is not None:
        images[SHRINK] = shrink.chart(shrink.rows(document))
    for file in folder.glob("*.png"):
        if IMAGE.fullmatch(file.name) and file.name not in images:
            file.unlink()
    for name, panel in images.items():
        draw(panel, folder / name)
    write_whole(folder / REPORT, [html(document, attention).encode()])


def html(document: Record, attention: Mapping[str, Maps]) -> str:
    """Return the whole page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("rehead.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "sanitise": sanitise,
        "loss": loss,
        "per_token": per_token,
        "figure": lambda chart: Markup(interactive.fragment(chart)),
        "swatch": lambda look: Markup(interactive.swatch(look)),
        "proof": shrink.proof,
    }
    variants = document["variants"]
    figures = [
        (name, Markup(maps.fragment(sanitise(name), text.tokens, text.weights, text.windows)))
        for name, text in attention.items()
    ]
    shown = {
        "document": document,
        "variants": variants,
        "looks": {variant["variant"]: Look.of(index) for index, variant in enumerate(variants)},
        "lengths": {variant["length"] for variant in variants},
        "answers": answers(document),
        "exports": _exports(document),
        "most_sample": shrink.MOST_SAMPLE,
    }
    if document["conversion"] is None:
        title = f"Study: {sanitise(document['study'])}"
        template = environment.get_template("study.html")
        body = template.render(shown, facts=facts(document), findings=findings(document), maps=figures)
    else:
        title = "What a smaller KV cache costs"
        environment.filters |= {"over": shrink.span, "texts": shrink.texts}
        environment.filters["percent"] = shrink.percent
        shrunk = shrink.rows(document)
        body = environment.get_template("shrink.html").render(
            shown,
            source=shrink.source_line(document),
            rows=shrunk,
            panel=shrink.chart(shrunk),
            findings=shrink.findings(shrunk),
            before=figures[0][1] if figures else None,
            after=figures[1:],
        )
    style, script = ((files("rehead.report") / name).read_text() for name in ("study.css", "study.js"))
    head = f"<style>{style}</style>\n{interactive.script()}{maps.script()}<script>{script}</script>\n"
    return page.page(title, body, head)


def _exports(document: Record) -> list[tuple[str, Record]]:
    """Return every export with its name, which has the seed if there are several."""
    names = [export["variant"] for export in document["exports"]]
    return [
        (name if names.count(name) == 1 else f"{name}, seed {export['seed']}", export)
        for name, export in zip(names, document["exports"], strict=True)
    ]


def answers(document: Record) -> list[Answer]:
    """Return every question with its panels and findings."""
    figures = Figures(document)
    answered = []
    for question in document["questions"]:
        panels = [panel for kind in question["show"] if (panel := figures.panel(kind, question["of"]))]
        findings = []
        if document["conversion"] is None and {"loss", "frontier"} & set(question["show"]):
            findings = growth([figures.variants[name] for name in question["of"]])
            findings += compared(question["claims"])
        answered.append(Answer(ask=question["ask"], findings=findings, panels=panels))
    return answered


def findings(document: Record) -> list[str]:
    """Return the findings of all answers, each once."""
    return list(dict.fromkeys(finding for answer in answers(document) for finding in answer.findings))


def facts(document: Record) -> list[tuple[str, str, str]]:
    """Return the headline facts: name, value, and detail."""
    variants = document["variants"]
    seeds = sorted({run["seed"] for variant in variants for run in variant["runs"]})
    entries = [
        (
            "Models",
            str(sum(len(variant["runs"]) for variant in variants)),
            f"{len(variants)} variants, {_seeds(seeds)}",
        ),
        _loss_fact(variants),
    ]
    caches = [variant for variant in variants if variant["costs"]["kv_bytes_per_token"]]
    if caches:
        least, most = (function(map(per_token, caches)) for function in (min, max))
        small = _names([variant["variant"] for variant in caches if per_token(variant) == least])
        share = f", {100 * least / most:.0f} % of the largest" if least < most else ""
        entries.append(("Smallest KV cache", f"{least:,.0f} B", f"per token: {small}{share}"))
    front = frontier(variants)
    if front and _of_one_length(variants) and not any(unlike(variants[0], variant) for variant in variants):
        entries.append(("On the frontier", str(len(front)), f"no variant beats {_names(front)}"))
    return entries


def _loss_fact(variants: Sequence[Record]) -> tuple[str, str, str]:
    """Return the lowest loss if the seeds separate it from all others, else the range of losses."""
    best = min(variants, key=lambda variant: variant["val_loss"][0])
    verdicts = claims(best, [variant for variant in variants if variant is not best])
    low, high = best["val_loss"][0], max(variant["val_loss"][0] for variant in variants)
    if min(len(variant["runs"]) for variant in variants) < 2:
        why = "one seed each, so none is ranked"
    elif any("unlike" in verdict for verdict in verdicts):
        why = "the models are not comparable, so none is ranked"
    elif not _of_one_length(variants):
        why = "at different block lengths, so none is ranked"
    elif all(verdict["told_apart"] for verdict in verdicts):
        return "Lowest validation loss", f"{low:.4f}", f"nats per token: {sanitise(best['variant'])}"
    else:
        equal = [verdict["variant"] for verdict in verdicts if not verdict["told_apart"]]
        why = f"lowest {sanitise(best['variant'])}, not told apart from {_names(equal)}"
    return "Validation loss", f"{low:.3f}–{high:.3f}", f"nats per token; {why}"


def _of_one_length(variants: Sequence[Record]) -> bool:
    return len({variant["length"] for variant in variants}) == 1


def _names(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(sanitise, names[:most])) + rest


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
