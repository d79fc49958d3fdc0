"""docs/engines.md: its tables are those of the exporter.

`python tests/docs/test_engines.py` writes it anew.
"""

import re
from pathlib import Path

import pytest

from rehead.checkpoint import families
from rehead.conversion.export.computed import ALL, COMPUTED, KINDS, PLAIN
from rehead.conversion.export.engines import ENGINES, LONGROPE, YARN

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
TABLE = r"(?<=<!-- generated from {} -->\n).*?(?=<!-- end -->)"


def cells(those):
    return ", ".join(str(one) for one in those) or "any"


def generated():
    """One column for each engine."""
    names = {name: f"`{name}`" for name in ("default", "linear", "llama3", "yarn", "longrope")}
    names[YARN] = "yarn, another `attention_factor`, or one of `mscale` and `mscale_all_dim`"
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
    rows["`attention_bias`"] = [
        "added" if facts.biases else "left out, **refused**" for facts in ENGINES.values()
    ]
    rows["what it does with others"] = [facts.otherwise for facts in ENGINES.values()]
    rows["exact exports"] = [
        "padded to 512 + 64" if facts.padded else "as small as the source's" for facts in ENGINES.values()
    ]
    rows["besides"] = [facts.note for facts in ENGINES.values()]
    return table(
        ["", *(facts.name for facts in ENGINES.values())], [[name, *row] for name, row in rows.items()]
    )


def generated_for_mlx():
    """One row for each class."""
    rows = []
    for name, computed in COMPUTED["mlx"].items():
        ropes = (
            "any" if computed.ropes == ALL else ", ".join(f"`{rope}`" for rope in computed.ropes) or "none"
        )
        refused = "; ".join(computed.refused) or "nothing"
        rows.append(
            [f"`{families[name].architecture}`", ropes if name != "deepseek_v3" else "as above", refused]
        )
    return table(["class", "rope", "refused"], rows)


def generated_for_servers():
    """One row for each class of plain heads."""
    rows = []
    for name in COMPUTED["mlx"].keys() - {"deepseek_v3"}:
        row = [f"`{families[name].architecture}`"]
        for engine in ("vllm", "sglang"):
            computed = COMPUTED[engine][name]
            ropes = [f"rope: {kind}" for kind in KINDS if kind not in computed.ropes]
            ropes = ["scaled rope"] if computed.ropes == PLAIN else ropes
            row.append("; ".join([*computed.refused, *ropes]) or "nothing")
        rows.append(row)
    return table(["class", "vLLM", "SGLang"], sorted(rows))


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


TABLES = {"ENGINES": generated, "COMPUTED": generated_for_mlx, "VLLM and SGLANG": generated_for_servers}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_those_of_the_exporter(name):
    shown = re.search(TABLE.format(name), PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[0].strip() == TABLES[name]().strip(), "run `python tests/docs/test_engines.py`"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name, made in TABLES.items():
        text = re.sub(TABLE.format(name), "\n" + made() + "\n", text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")
