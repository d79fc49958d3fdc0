"""A study of one model: trained or given, converted, healed, exported; as typed, killed, resumed, read back."""

import html
import importlib
import json
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import rehead
from rehead import checkpoint
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.conversion.certificate import Certificate
from rehead.errors import InvalidInput
from rehead.model import build
from rehead.report.figures import Figures
from rehead.study import Preset, jobs, one_source
from rehead.tokenizer import train
from typed_lines import typed

# A whole demo is made for the first test: in 20 s, or 120 beside six other processes.
pytestmark = pytest.mark.timeout(400)

DEMO = [
    "study", "--preset", "demo", "--fraction", "0.01", "data.path=input.txt", "data.block_size=16", "model.n_embd=16",
    "trainer.batch_size=2", "trainer.eval_batches=1", "trainer.save_every=2",
]  # fmt: skip
GIVEN = """
about: A model that is there.
run: {data: {path: input.txt, block_size: 16}, trainer: {batch_size: 2, eval_batches: 1}}
variants:
  Source: {source: nowhere, about: As it is.}
  Quarter: {from: Source, convert: {to: mla, kv_fraction: 0.25}}
  Other text: {from: Source, convert: {to: mqa, calibration: input.txt, test: other.txt}}
prompt: "O God"
new_tokens: 5
temperature: 0
"""

KILLED = """
import os, signal, sys
from rehead.cli import main

opened = []


def kill(event, given):
    if event == "open" and str(given[0]).endswith("gqa-healed/seed-3407/metrics.jsonl"):
        if opened:
            os.kill(os.getpid(), signal.SIGKILL)
        opened.append(given)


sys.addaudithook(kill)
sys.exit(main(sys.argv[1:]))
"""
"""`rehead`, killed when it has written one line of a healing's metrics and is about to write the next."""


@pytest.fixture(scope="module")
def demo(place):
    """`make demo`, tiny, killed while it heals and started again: what it printed, and its folder."""
    words = [*DEMO, "system.work_dir=demo"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], cwd=place, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert (place / "demo/gqa-healed/seed-3407/metrics.jsonl").read_bytes().count(b"\n") == 1
    before = {file: file.stat().st_mtime_ns for file in place.rglob("demo/*/*/measured.json")}
    assert len(before) == 6
    assert not (place / "demo/report.html").exists()
    [(code, out, err)] = typed(words, cwd=place)
    assert code == 0, err
    assert {file: file.stat().st_mtime_ns for file in before} == before
    return (out, err), place / "demo"


@pytest.fixture
def results(demo):
    return json.loads((demo[1] / "results.json").read_text())


def certificates(results):
    """Each converted or healed variant with the certificate in its folder."""
    return {
        one["variant"]: Certificate.read(checkpoint.resolve(Path(one["runs"][0]["folder"])))
        for one in results["variants"][1:]
    }


@pytest.mark.process
def test_the_terminal_tells_every_step_with_its_command(demo, results):
    (out, err), _ = demo
    steps = re.findall(r"^(\d+)\. (.*)\n   \$ rehead (\w+)", err, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, 11))
    assert [command for _, _, command in steps] == [
        "train", "plan", *["convert"] * 5, "heal", "export", "bench",
    ]  # fmt: skip
    assert re.search(r"^   exact +50 % of the KV cache  --to mla$", err, re.MULTILINE)
    assert "exact: KV cache 512 -> 256 bytes per token (50 %)" in err
    loss = results["variants"][0]["runs"][0]["val_loss"]
    assert f"\n   loss {loss:.4f} nats per token on text it was not trained on\n" in err
    assert "LlamaForCausalLM, read back by transformers" in err
    for name in (one["variant"] for one in results["variants"]):
        assert len(re.findall(rf"^ ?{name} ", out, re.MULTILINE)) >= 2, "in the table, and with its text"
    assert out.rstrip().splitlines()[-2] == "report   demo/report.html"


@pytest.mark.process
def test_exact_is_exact_and_the_others_say_what_they_lost(demo, results, here):
    found = certificates(results)
    assert found["MLA, exact"].exact
    assert found["MLA, exact"].logits["argmax_flips"] == 0
    assert [one.kv_bytes_per_token for one in found.values()] == [
        [512, size] for size in (256, 128, 64, 256, 128, 256)
    ]
    assert len({one.test.sha256 for one in found.values()}) == 1
    assert found["GQA, healed"].healing[0].steps == 1


class Cells(HTMLParser):
    """The rows of the first table of a page."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open, self.tables = [], False, 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tables += tag == "table"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.tables == 1:
            self.open = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.open = self.open and tag not in ("td", "th")

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1] += data


@pytest.mark.process
def test_every_figure_on_the_page_is_that_of_the_certificates_file(demo, results, here):
    page = (demo[1] / "report.html").read_text()
    found = certificates(results)
    rows = {row[0]: row[1:] for row in Cells(page).rows if row}
    source = next(iter(found.values()))
    assert rows["MHA"][:4] == ["512 B", "100 %", f"{source.loss[0]:.4f}", "source"]
    for name, one in found.items():
        before, after = one.kv_bytes_per_token
        over = round(one.loss[1] - one.loss[0], 4) + 0.0
        assert rows[name][:6] == [
            f"{after:,} B",
            f"{100 * after / before:.3g} %",
            f"{over:+.4f}",
            "yes" if one.exact else "no",
            f"{100 - 100 * one.logits['argmax_flips']:.2f} %",
            f"{one.logits['kl']:.2e}",
        ]
        assert f"<dd>{one.loss[0]:.4f} before, {one.loss[1]:.4f} after</dd>" in page
        assert one.test.sha256[:12] in page
    (chart,) = (json.loads(html.unescape(text)) for text in re.findall(r'data-chart="([^"]*)"', page)[:1])
    drawn = {one["name"]: (one["x"], one["y"]) for one in chart["series"] if not one["faint"]}
    assert drawn == {"MHA": ([512], [0.0])} | {
        name: ([one.kv_bytes_per_token[1]], [one.loss[1] - one.loss[0]]) for name, one in found.items()
    }


@pytest.mark.process
def test_the_export_is_read_by_transformers_as_the_healed_model(demo, results, here):
    transformers = pytest.importorskip("transformers")
    (export,) = results["exports"]
    stock = transformers.AutoModelForCausalLM.from_pretrained(export["folder"]).eval()
    healed = checkpoint.load(Path("demo/gqa-healed/seed-3407"))
    ids = torch.arange(16)[None] % healed.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, healed(ids), atol=1e-5, rtol=1e-4)
    assert export["architecture"] == "LlamaForCausalLM" == type(stock).__name__
    assert export["reader"] == f"transformers {transformers.__version__}"
    assert export["max_error"] < 1e-5
    assert export["same_choice"] == 1


@pytest.mark.process
@pytest.mark.filterwarnings("always:the source was itself converted")
def test_a_model_that_is_there_is_studied_untouched(demo, here, capsys):
    folder = Path("demo/gqa-exported/seed-3407/model")
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    Path("given.yaml").write_text(GIVEN)
    Path("other.txt").write_text("God, O stale and weary!\n" * 40)
    words = ["study", "--preset", "given.yaml", "system.work_dir=given"]
    assert main(words) == 3  # before anything is made
    assert "nowhere" in capsys.readouterr().err
    assert not Path("given").exists()
    assert main([*words, f"model.folder={folder}", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    source, quarter, other = document["variants"]
    loss = source["runs"][0]["val_loss"]
    assert f"\n   loss {loss:.4f} nats per token on the end of input.txt\n" in printed.err
    assert (source["kind"], source["runs"][0]["folder"]) == ("given", str(folder))
    assert "--calibration=input.txt" in quarter["runs"][0]["command"]
    assert quarter["runs"][0]["certificate"]["test"]["tokens"] == len(Path("input.txt").read_text()) // 10
    assert other["runs"][0]["certificate"]["test"]["tokens"] == len(Path("other.txt").read_text())
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert "on another text" in Path("given/report.html").read_text()
    assert main([*words, "model.folder=demo/gqa-healed/seed-3407"]) == 3
    said = capsys.readouterr().err
    assert all(
        word in said for word in ("source=", "gqa-exported", "gqa-healed", "another system.work_dir")
    ), said


def test_sizes_of_a_source_in_bfloat16_are_its_own(here, capsys):
    """In the costs, the plan and the chart of weights: two bytes a number, as predicted so held; healed or not."""
    tokenizer = train("char", Path("input.txt").read_text())
    model = build(ModelOptions(n_layer=2, n_embd=12, n_query_head=2).resolve(tokenizer.vocab_size, 16))
    rehead.save(model.bfloat16(), "low", files={"tokenizer.json": tokenizer.to_json()})
    variants = "  Source: {source: low}\n  MQA: {from: Source, convert: {to: mqa}}\n"
    variants += "  Healed: {from: MQA, heal: true}\n"
    trainer = "{batch_size: 2, eval_batches: 1, max_iters: 1}"
    run = f"run: {{data: {{path: input.txt, block_size: 16}}, trainer: {trainer}}}\n"
    Path("low.yaml").write_text(f"about: Low.\n{run}variants:\n{variants}prompt: O God\nnew_tokens: 2\n")
    assert main(["study", "--preset", "low.yaml", "system.work_dir=low-study", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for one, width in zip(document["variants"], (12, 6, 6), strict=True):
        costs = one["costs"]
        assert costs["kv_bytes_per_token"] == 2 * 2 * width * 2
        assert costs["cache_bytes"] == costs["cache_bytes_held"] == 16 * costs["kv_bytes_per_token"]
        assert costs["weight_bytes"] == 2 * costs["parameters"]
        (weights,) = (chart for chart in Figures(document).memory([one]).charts if chart.title == "Weights")
        assert weights.series[0].x == [costs["weight_bytes"] / 2**20]
    planned = document["conversion"]["plan"]
    assert (planned["dtype"], planned["rows"][0]["kv_bytes_per_token"]) == ("bfloat16", 96)


TWICE = """
about: A model that is there, converted twice.
run: {data: {path: input.txt, block_size: 16}, trainer: {batch_size: 2, eval_batches: 1}}
variants:
  Source: {source: nowhere}
  Half: {from: Source, convert: {to: mla, kv_fraction: 0.5, calibration: ["{source}-fit.txt", self]}}
  Quarter: {from: Source, convert: {to: mla, kv_fraction: 0.25, calibration: ["{source}-fit.txt", self]}}
prompt: "O God"
new_tokens: 3
"""


@pytest.mark.process
@pytest.mark.filterwarnings("always:the source was itself converted")
def test_conversions_of_one_model_read_it_once_and_give_what_each_gives_alone(
    demo, here, capsys, monkeypatch
):
    folder = Path("demo/gqa-exported/seed-3407/model")
    Path("twice.yaml").write_text(TWICE)
    words = ["study", "--preset", "twice.yaml", "system.work_dir=twice", f"model.folder={folder}", "--json"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert f"no text at '{folder}-fit.txt'" in told
    assert not Path("twice").exists()
    Path(f"{folder}-fit.txt").write_text("O God, O God! How weary\n" * 60)
    calls = []
    module = importlib.import_module("rehead.conversion.converter")
    gather = module.gather
    monkeypatch.setattr(module, "gather", lambda *a, **more: calls.append(1) or gather(*a, **more))
    assert main(words) == 0
    assert len(calls) == 1
    assert not list(Path("twice").glob(".tmp-*"))
    document = json.loads(capsys.readouterr().out)
    assert [question["show"] for question in document["questions"]] == [["speed"]]
    assert [one["costs"]["rebuilds_keys"] for one in document["variants"]] == [False, True, True]
    quarter = document["variants"][2]["runs"][0]
    words = quarter["command"].replace(quarter["folder"], "alone").split()[1:]
    assert main(words) == 0
    assert Certificate.read(Path("alone")).loss == quarter["certificate"]["loss"]


@pytest.mark.process
@pytest.mark.filterwarnings("always:the source was itself converted")
def test_a_corpus_is_known_by_name_where_no_file_has_it(demo, here, capsys):
    model = "demo/gqa-exported/seed-3407/model"
    words = ["convert", model, "named", "--to", "mqa", "--allow-loss", "--calibration", "python-docs"]
    Path("python-docs").write_text("O God, O God! How weary\n" * 60)
    try:
        assert main(words) == 0
        assert Certificate.read(Path("named")).calibration[0].tokens < 1500
    finally:
        Path("python-docs").unlink()
    assert main(["convert", model, "again", *words[3:]]) == 3  # read, and has letters the model has not
    said = capsys.readouterr().err
    assert "the calibration text" in said
    assert "no text at" not in said


def test_one_source_is_what_all_others_were_made_of():
    assert one_source(jobs(Preset.read("demo"), [])).variant == "MHA"
    assert one_source(jobs(Preset.read("variants"), [])) is None
    assert one_source(jobs(Preset.read("frontier"), [])) is None


def test_exports_alone_compare_nothing(tmp_path):
    """No conversion says what the source's cache is, so that the page is a study's, without a table of certificates."""
    file = tmp_path / "exports.yaml"
    file.write_text(
        "about: Exports.\nvariants:\n  base: {model: {shape: llama}}\n  stock: {from: base, export: {}}\n"
    )
    assert one_source(jobs(Preset.read(str(file)), [])) is None


BAD = [
    ({"b": {"export": {}}}, ["b:", "export needs a model to start from", "from:"]),
    ({"b": {"from": "a", "export": {"form": "x"}}}, ["'form'", "Known: format, for"]),
    ({"b": {"source": "x", "from": "a"}}, ["source:", "from:", "Leave one out"]),
    ({"b": {"source": "x", "model": {"n_layer": 2}}}, ["source does not train", "model.n_layer"]),
    ({"b": {"from": "a", "convert": {}, "export": {}}}, ["convert and export", "a variant for each"]),
    (
        {"b": {"from": "a", "export": {}}, "c": {"from": "b", "convert": {}}},
        ["'b'", "not a variant above", "a"],
    ),
    ({"b": {"from": "a", "convert": {"calibration": 5}}}, ["calibration=5", "str or list"]),
]


@pytest.mark.parametrize(("more", "named"), BAD, ids=[" ".join(row[1]) for row in BAD])
def test_what_the_form_does_not_have_is_refused(more, named):
    with pytest.raises(InvalidInput) as error:
        Preset.of("p", {"about": "x", "variants": {"a": {}, **more}})
    assert all(word in str(error.value) for word in named), error.value
