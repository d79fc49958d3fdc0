"""The results as a page of Markdown."""

from typing import Any

from harness import clear

HEAD = """# Benchmarks

Written by `make bench` (see [benchmarks/](https://github.com/rehead/rehead/tree/main/benchmarks)); the numbers
are in [benchmarks.json](benchmarks.json).

Each case runs rehead and its peers in one process, with the same weights, after their results were found equal.
Engines, and rehead beside them, run in processes of their own and are timed there. Rounds alternate (A B B A). A
ratio is the peer's time over rehead's, so rehead is faster above 1: the median of the rounds, with its 95 % bootstrap
interval in brackets. *Control* is rehead against itself and should be 1. *Ceiling* is the share of the machine's
speed, measured in the same rounds: of a 1024 x 1024 matrix product where a case multiplies, of memory bandwidth where
it reads. *Others* is how many cores other processes kept busy; where it is far from 0, trust the ratios and not the
milliseconds. *Goal* is what the project set itself before measuring: **bold** ratios reach it, those in *italics* do
not. Ratios that cannot be told from 1 (interval, or three times the control's spread) are marked ~.
"""
TITLES = {
    "decode": "Decoding",
    "engines": "Engines",
    "window": "Sliding windows and chunked prefill",
    "training": "Training",
}
LATER = {
    "decode": "Five rounds of 2026-11-25 gave lower ratios ([log.md](log.md#2026-11-25-decoding-measured-anew)):\n"
    "11.3 for the 6-layer GPT, 8.5 and 2.3 for 4 layers of 2,048, 36.8 and 34.2 for one MLA layer.\n",
}
"""What the log has since the runs of a group."""
NO_GPU = """
## GPU

Not measured: no GPU was available. Nothing is claimed about speed on a GPU (`make bench-gpu`).
`pytest tests/test_on_gpu.py` tests that models and commands give there what they give on a CPU; so far it ran only on a
simulated GPU ([log.md](log.md#2026-11-26-a-gpu-that-is-not-there)).
"""


def page(runs: list[dict[str, Any]]) -> str:
    """All groups, each with its machine and command."""
    parts = [HEAD, _summary(runs)]
    for group, title in TITLES.items():
        for run in (run for run in runs if run["group"] == group):
            parts.append(f"\n## {title}, {_place(run)}\n\n{_machine(run)}\n\n```\n{run['command']}\n```\n")
            if run["threads"] == 2 and group in LATER:
                parts.append(LATER[group])
            ratios = [case for case in run["cases"] if case["kind"] == "ratio"]
            growths = [case for case in run["cases"] if case["kind"] == "growth"]
            if ratios:
                parts.append(_ratios(ratios))
            if growths:
                parts.append("\n" + _growths(growths))
    if not any(run["device"] == "cuda" for run in runs):
        parts.append(NO_GPU)
    return "\n".join(parts)


def _summary(runs: list[dict[str, Any]]) -> str:
    """The cases that had a goal, a line each: one screen that says how it went."""
    lines = [
        "\n## Summary\n",
        *(f"{machine}\n" for machine in dict.fromkeys(map(_machine, runs))),
        "| case | against | where | ratio | goal |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for run in runs:
        for case in run["cases"]:
            for step, found in case["time"].items() if case["kind"] == "growth" else ():
                time = _mark(_span(found), -found["median"], -case["at_most"])
                cells = [f"{case['name']} ({case['dtype']})", f"{step}, times the time", _place(run)]
                lines.append("| " + " | ".join([*cells, time, f"at most {case['at_most']:g}"]) + " |")
            for name, found in case["peers"].items() if case["kind"] == "ratio" else ():
                if "at_least" in found and "median" in found:
                    ratio = _mark(_span(found), found["median"], found["at_least"])
                    ratio += "" if clear(found, case["control"]) else " ~"
                    cells = [
                        f"{case['name']} ({case['dtype']})",
                        name,
                        _place(run),
                        ratio,
                        f"{found['at_least']:g}",
                    ]
                    lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _place(run: dict[str, Any]) -> str:
    return "GPU" if run["device"] == "cuda" else f"{run['threads']} thread{'s' * (run['threads'] > 1)}"


def _machine(run: dict[str, Any]) -> str:
    facts = run["environment"]
    names = ("torch", "transformers", "python", "cpu capability")
    versions = ", ".join(f"{name} {facts[name]}" for name in names if name in facts)
    hardware = facts["cuda"] if run["device"] == "cuda" else f"{facts['cores']} cores of {facts['processor']}"
    return f"{run['date']}, {hardware}; {versions}."


def _ratios(cases: list[dict[str, Any]]) -> str:
    head = "| case | peer | ours, ms | peer, ms | ratio | goal | control | ceiling | others |\n"
    lines = [head + "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for case in cases:
        ours = f"{1e3 * case['seconds']['ours'][0]:.3g}"
        first = [case["name"] + f" ({case['dtype']})", ours, _span(case["control"]), _ceiling(case)]
        first.append(f"{case['load']['others_cores']:.1f}")
        for name, found in case["peers"].items():
            asked = f"{found['at_least']:g}" if "at_least" in found else ""
            if "absent" in found:
                theirs, ratio = "", f"peer absent: {found['absent']}"
            else:
                theirs = f"{1e3 * case['seconds'][name][0]:.3g}"
                ratio = _mark(_span(found), found["median"], found.get("at_least"))
                ratio += "" if clear(found, case["control"]) else " ~"
            cells = [first[0], name, first[1], theirs, ratio, asked, *first[2:]]
            lines.append("| " + " | ".join(cells) + " |")
            first = [""] * len(first)
        if not case["peers"]:
            lines.append("| " + " | ".join([first[0], "", first[1], "", "", "", *first[2:]]) + " |")
    return "\n".join(lines)


def _growths(cases: list[dict[str, Any]]) -> str:
    lines = ["| case | doubling | time x | memory x | at most |", "| --- | --- | ---: | ---: | ---: |"]
    for case in cases:
        name = f"{case['name']} ({case['dtype']})"
        for step, found in case["time"].items():
            time = _mark(_span(found), -found["median"], -case["at_most"])
            grown = case.get("memory", {}).get(step)
            memory = "" if grown is None else _mark(f"{grown:.2f}", -grown, -case["at_most"])
            lines.append(f"| {name} | {step} | {time} | {memory} | {case['at_most']:g} |")
            name = ""
    return "\n".join(lines)


def _ceiling(case: dict[str, Any]) -> str:
    if "ceiling" not in case:
        return ""
    found = case["ceiling"]
    unit = "GFLOP/s" if found["kind"] == "multiplications" else "GB/s"
    share = f"{100 * found['share']['median']:.0f} %"
    if "at_least" in found:
        asked = f" (goal {100 * found['at_least']:.0f} %)"
        share = _mark(share, found["share"]["median"], found["at_least"]) + asked
    return f"{share} of {found['per_second'] / 1e9:.0f} {unit}"


def _span(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _mark(text: str, value: float, asked: float | None) -> str:
    if asked is None:
        return text
    return f"**{text}**" if value >= asked else f"*{text}*"


def row(case: dict[str, Any]) -> str:
    """One case for the terminal."""
    if case["kind"] == "growth":
        steps = [f"{step}: time x{found['median']:.2f}" for step, found in case["time"].items()]
        memory = [f"{step}: memory x{grown:.2f}" for step, grown in case.get("memory", {}).items()]
        return "  " + "; ".join(steps + memory)
    times = ", ".join(f"{name} {1e3 * best[0]:.3g} ms" for name, best in case["seconds"].items())
    found = [
        f"{name} {_span(ratio)}" if "median" in ratio else f"{name} absent"
        for name, ratio in case["peers"].items()
    ]
    others = f"others {case['load']['others_cores']:.1f} cores, {case['load']['samples_again']} samples again"
    ceiling = f"; {_ceiling(case)}" if "ceiling" in case else ""
    return f"  {times}\n  {'; '.join(found)}; control {_span(case['control'])}{ceiling}; {others}"
