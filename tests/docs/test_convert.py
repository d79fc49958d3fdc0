"""docs/convert.md: its list is that of the registry, its commands and code run.

`python tests/docs/test_convert.py` writes the list anew.
"""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

from rehead.cli import main
from rehead.conversion import conversions

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
LIST = re.compile(r"(?<=<!-- generated from the registry -->\n).*(?=<!-- end -->)", re.DOTALL)
NEEDS = {(): "no text", ("inputs",): "a text"}
NEEDS |= {(kind,): "a text and its gradients" for kind in ("pair", "turns")}
SEEDS = re.compile(r" \([A-E]\d+(, [A-E]\d+)*\)")
LINE = "O God, O God! How weary, stale, flat and unprofitable\n"
TRAIN = """train data.path=input.txt data.block_size=32 system.work_dir=out/gqa model.n_query_head=6
    model.n_kv_head=3 model.rope=True model.bias=False model.n_layer=1 trainer.max_iters=2 trainer.batch_size=2
    trainer.eval_batches=1 trainer.sample_tokens=4"""


def generated():
    """A table of all conversions, and what each says of itself."""
    table = ["| conversion | from | to | approximates by |", "|---|---|---|---|"]
    sections = []
    for name in conversions:
        one = conversions[name]
        reads = {method: NEEDS[needs] for method, needs in one.methods.items()}
        reads |= {method: "a text, if given" for method in one.fitted if not one.methods[method]}
        methods = [f"`{method}` ({text})" for method, text in reads.items()]
        table.append(f"| `{name}` | {one.source} | {one.target} | {', '.join(methods) or 'always exact'} |")
        text = SEEDS.sub("", inspect.getdoc(one))
        sections.append(f"### {name}\n\n{text}\n\n*Costs:* {one.costs}")
    return "\n".join(table) + "\n\n" + "\n\n".join(sections) + "\n"


@pytest.fixture
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture
def somewhere(tmp_path, monkeypatch, capsys):
    """An empty folder with texts and a run, in which commands run in float32."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    for start, name in enumerate(("input", "fit", "test")):
        Path(f"{name}.txt").write_text((LINE[start:] + LINE[:start]) * 60)
    assert main(shlex.split(TRAIN)) == 0
    capsys.readouterr()


def test_the_list_is_that_of_the_registry(page):
    shown = LIST.search(page)
    assert shown is not None
    assert shown[0].strip() == generated().strip(), "run `python tests/docs/test_convert.py`"


@pytest.mark.filterwarnings("default:no stock class can hold the result")
@pytest.mark.timeout(600)  # a dozen conversions, on a machine that may be busy
def test_commands_run_and_refuse_as_shown(page, somewhere, capsys):
    """On a run of one layer. What stands below a command is the error it ends in."""
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    assert blocks
    for part in (part for block in blocks for part in block.split("$ ")[1:]):
        command, _, shown = part.partition("\n")
        name, *words = shlex.split(command)
        assert name == "rehead"
        status = main([re.sub(r"max_iters=\d+", "max_iters=2", word) for word in words])
        error = capsys.readouterr().err
        assert (status == 0) == (not shown.strip()), command + error
        if shown.strip():
            assert error.strip() == shown.strip()


def test_code_prints_what_is_shown(page, somewhere, capsys):
    names: dict[str, object] = {}
    for code, shown in re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", page, re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)
        assert capsys.readouterr().out == shown


def test_exact_promises_have_no_methods():
    """`always exact` in the table: an approximation names its methods."""
    for name in conversions:
        doc = inspect.getdoc(conversions[name])
        assert all(f"`{method}`" in doc for method in conversions[name].methods), name


if __name__ == "__main__":
    PAGE.write_text(LIST.sub(lambda _: generated(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
