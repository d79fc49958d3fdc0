"""The notebooks beside the tutorials are the tutorials: the same text, code and output.

`python tests/docs/test_notebooks.py` writes them anew.
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
CODE = re.compile(r"^```python\n(.*?)\n```\n(?:\n*^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
MATH = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
INSTALL = """\
# Needed in Colab, whose own torch stays. SOURCE may also be the path of a wheel.
import importlib.util

SOURCE = "git+https://github.com/rehead/rehead"
if importlib.util.find_spec("rehead") is None:
    %pip install --quiet {SOURCE}"""


def notebook(page):
    """The text of an .ipynb from that of a tutorial; what stands below code is its output."""
    title, _, rest = page.partition("\n")
    cells = [v4.new_markdown_cell(title), v4.new_code_cell(INSTALL)]
    for text, code, shown in zip(*[iter([*CODE.split(rest), None, None])] * 3, strict=True):
        if text.strip():
            cells.append(v4.new_markdown_cell(MATH.sub(r"$$\n\1\n$$", text.strip())))
        if code is not None:
            outputs = [v4.new_output("stream", name="stdout", text=shown)] if shown else []
            cells.append(v4.new_code_cell(code, outputs=outputs))
    for index, cell in enumerate(cells):
        cell["id"] = f"cell-{index}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return nbformat.writes(made) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_in_step_with_its_page(page):
    made = notebook(page.read_text(encoding="utf-8"))
    there = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert there == made, "run `python tests/docs/test_notebooks.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_holds_all_of_its_page(page):
    text = page.read_text(encoding="utf-8")
    cells = nbformat.reads(page.with_suffix(".ipynb").read_text(encoding="utf-8"), as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) == 1 + text.count("```python")
    assert sum(bool(cell.outputs) for cell in code) == text.count("```text")
    words = [word for cell in cells for word in cell.source.split()]
    words += [word for cell in code for output in cell.outputs for word in output.text.split()]
    fences = {"```python", "```text", "```math", "```", "$$"}
    missing = set(text.split()) - set(words) - fences
    assert not missing


if __name__ == "__main__":
    for page in PAGES:
        page.with_suffix(".ipynb").write_text(notebook(page.read_text(encoding="utf-8")), encoding="utf-8")
