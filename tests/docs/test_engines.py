"""docs/engines.md: its table is that of the exporter.

`python tests/docs/test_engines.py` writes it anew.
"""

import re
from pathlib import Path

from rehead.conversion.export.engines import ENGINES, LONGROPE

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
TABLE = re.compile(r"(?<=<!-- generated from ENGINES -->\n).*(?=<!-- end -->)", re.DOTALL)


def cells(those):
    return ", ".join(str(one) for one in those) or "any"


def generated():
    """One column for each engine."""
    names = {name: f"`{name}`" for name in ("default", "linear", "llama3", "yarn", "longrope")}
    names[LONGROPE] = "longrope, `attention_factor` not 1"
    rows = {
        "`--for`": [f"`{engine}`" for engine in ENGINES],
        "version": [facts.version for facts in ENGINES.values()],
        "how this is known": [facts.known for facts in ENGINES.values()],
        "classes": [cells(f"`{name}`" for name in facts.classes) for facts in ENGINES.values()],
        "eps of the latent's norm": [facts.latent_eps for facts in ENGINES.values()],
        "latent and rotary part": [cells(facts.rows) for facts in ENGINES.values()],
        "heads (rebuilt, rotated, values)": [cells(facts.heads) for facts in ENGINES.values()],
    }
    for kind, name in names.items():
        found = [facts.angles.get(kind) for facts in ENGINES.values()]
        rows[f"rope: {name}"] = ["**refused**" if layouts is None else cells(layouts) for layouts in found]
    rows["what it does with others"] = [facts.otherwise for facts in ENGINES.values()]
    rows["exact exports"] = [
        "padded to 512 + 64" if facts.padded else "as small as the source's" for facts in ENGINES.values()
    ]
    rows["besides"] = [facts.note for facts in ENGINES.values()]
    head = ["", *(facts.name for facts in ENGINES.values())]
    lines = [head, ["---"] * len(head), *([name, *row] for name, row in rows.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def test_the_table_is_that_of_the_exporter():
    shown = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert shown is not None
    assert shown[0].strip() == generated().strip(), "run `python tests/docs/test_engines.py`"


if __name__ == "__main__":
    PAGE.write_text(
        TABLE.sub(lambda _: "\n" + generated() + "\n", PAGE.read_text(encoding="utf-8")), encoding="utf-8"
    )
