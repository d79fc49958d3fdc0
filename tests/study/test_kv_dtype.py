"""Loss against the bytes of a cache in several formats: what `eval` and `plan` print, typed on the same models."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rehead.cli import main
from rehead.errors import InvalidInput
from rehead.study import Preset, kv_dtype
from rehead.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(400)  # a fixture is a whole study, on a machine that may be busy
FORMATS = ["bf16", "fp8", "int8", "q8_0"]
SHAPE = "{shape: llama, n_layer: 2, n_query_head: 2, n_embd: 64, rope: true}"
ONE = f"""
about: One model and its latents.
run:
  data: {{path: input.txt, block_size: 16, tokenizer: byte}}
  model: {SHAPE}
  trainer: {{max_iters: 40, learning_rate: 0.01, batch_size: 3, eval_batches: 1}}
variants:
  Source: {{}}
  Half: {{from: Source, convert: {{to: mla, kv_fraction: 0.5, test: held-out.txt}}}}
  Quarter: {{from: Source, convert: {{to: mla, kv_fraction: 0.25, test: held-out.txt}}}}
  Exported: {{from: Source, export: {{format: llama}}}}
new_tokens: 3
"""
MANY = f"""
about: Two that were trained, two seeds each.
run:
  system: {{seed: [3, 4]}}
  data: {{path: input.txt, block_size: 16}}
  model: {SHAPE}
  trainer: {{max_iters: 10, learning_rate: 0.01, batch_size: 5, eval_batches: 100}}
variants:
  Two heads: {{}}
  Window: {{model: {{window: 4}}}}
  Odd: {{model: {{head_dim: 24}}}}
kv_dtype: [fp8, q8_0]
questions:
  - ask: How many bits?
    show: [kv_dtype]
  - ask: And by itself?
    of: [Two heads]
    show: [loss]
new_tokens: 3
"""


def study(name, text, *more):
    Path(f"{name}.yaml").write_text(text)
    assert main(["study", "--preset", f"{name}.yaml", *more]) == 0
    return Path("runs", name)


def results(folder):
    return json.loads((folder / "results.json").read_text())


def drawn(folder):
    """The chart with a line per format on the page: {format: {variant: (bytes, loss)}}."""
    page = (folder / "report.html").read_text()
    charts = [json.loads(html.unescape(text)) for text in re.findall(r'data-chart="([^"]*)"', page)]
    (chart,) = [chart for chart in charts if any(one["joined"] for one in chart["series"])]
    return {
        one["name"]: dict(zip(one["labels"], zip(one["x"], one["y"], strict=True), strict=True))
        for one in chart["series"]
    }


@pytest.fixture
def typed(capsys):
    """What a command prints."""

    def run(*words):
        capsys.readouterr()
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="module")
def one(place):
    """A study of one model, first without formats, then again with them: its folder, what was made before, the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Path("held-out.txt").write_text("O that this too too solid flesh would melt,\nThaw and resolve\n" * 3)
        folder = study("one", ONE)
        before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
        assert results(folder)["variants"][0]["kv_dtype"] is None
        assert not (folder / kv_dtype.FILE).exists()
        study("one", ONE + f"kv_dtype: {FORMATS}\n")
    return place / folder, {place / file: stamp for file, stamp in before.items()}


@pytest.mark.process
def test_every_point_is_what_eval_and_plan_print(one, here, typed):
    """Typed without a length: the text is read as the conversion read it."""
    folder, _ = one
    points = drawn(folder)
    models = {found["variant"]: found["runs"][0]["folder"] for found in results(folder)["variants"]}
    assert list(points) == FORMATS
    assert set(models) == {"Source", "Half", "Quarter"}
    before = typed("eval", models["Source"], "--data", "held-out.txt")["loss"]
    for kind in FORMATS:
        assert set(points[kind]) == set(models)
        for name, model in models.items():
            size, over = points[kind][name]
            plan = typed("plan", model, "--kv-dtype", kind)
            assert size == plan["rows"][0]["kv_bytes_per_token"]
            loss = typed("eval", model, "--data", "held-out.txt", "--kv-dtype", kind)["loss"]
            assert over == pytest.approx(loss - before, abs=1e-6)
    assert len({points[kind][name] for kind in FORMATS for name in models}) == 12
    words = ["eval", models["Half"], "--data", "held-out.txt", "--kv-dtype", "fp8", "--json"]
    told = subprocess.run(
        [sys.executable, "-m", "rehead", *words], capture_output=True, text=True, check=True
    )
    assert points["fp8"]["Half"][1] == pytest.approx(json.loads(told.stdout)["loss"] - before, abs=1e-6)
    certificate = results(folder)["variants"][1]["runs"][0]["certificate"]
    assert certificate["loss"][0] == pytest.approx(before, abs=1e-6)


def test_a_study_from_before_is_measured_and_nothing_made_again(one, here):
    folder, before = one
    made = [file for file in before if file.name in ("measured.json", "model.safetensors", "costs.json")]
    assert len(made) > 8
    assert all(file.stat().st_mtime_ns == before[file] for file in made)
    assert (folder / "1-kv_dtype.png").exists()


def test_formats_are_measured_once_and_again_when_they_change(one, here, monkeypatch, capsys):
    folder, _ = one
    known = json.loads((folder / kv_dtype.FILE).read_text())
    calls = []
    evaluate = kv_dtype.evaluate
    monkeypatch.setattr(kv_dtype, "evaluate", lambda *given: calls.append(1) or evaluate(*given))
    study("one", ONE + f"kv_dtype: {FORMATS}\n")
    assert not calls
    capsys.readouterr()
    study("one", ONE + "kv_dtype: [int8, fp16]\n")
    assert len(calls) == 3 * 3  # without rounding, too
    told = capsys.readouterr()
    assert "rehead eval runs/one/quarter/seed-3407/model --data held-out.txt --kv-dtype fp8" in told.err
    rows = [
        line.split()
        for line in told.out.splitlines()
        if re.match(r" (Source|Half|Quarter) +[\d,]+ B, ", line)
    ]
    assert len(rows) == 3
    now = json.loads((folder / kv_dtype.FILE).read_text())["variants"]
    for name, found in known["variants"].items():
        assert now[name]["losses"]["int8"] == found["losses"]["int8"]
        assert list(now[name]["losses"]) == ["", "int8", "fp16"]
    study("one", ONE + f"kv_dtype: {FORMATS}\n")


@pytest.fixture(scope="module")
def many(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        folder = study("many", MANY)
    return place / folder


@pytest.mark.long
def test_trained_models_are_read_on_their_validation_text(many, here, typed):
    """All of it, which this study's evaluations cover, in its own blocks."""
    points, found = drawn(many), {one["variant"]: one for one in results(many)["variants"]}
    tokens = Path("input.txt").read_text()
    tokenizer = load_tokenizer(many / "two-heads/seed-3")
    ids = tokenizer.encode(tokens)
    Path("val.txt").write_text(tokenizer.decode(np.asarray(ids[len(ids) - len(ids) // 10 :])))
    for name in ("Two heads", "Window"):
        one = found[name]
        assert one["kv_dtype"]["losses"][""] == pytest.approx(
            [run["val_loss"] for run in one["runs"]], abs=1e-6
        )
        for kind in ("fp8", "q8_0"):
            losses = [
                typed("eval", run["folder"], "--data", "val.txt", "--kv-dtype", kind)["loss"]
                for run in one["runs"]
            ]
            assert one["kv_dtype"]["losses"][kind] == pytest.approx(losses, abs=1e-6)
            assert points[kind][name][1] == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert points["fp8"]["Two heads"][0] == 2 * 2 * 64
    assert points["fp8"]["Window"][0] == 2 * 2 * 64 * 4 / 16, "a window holds 4 of 16 tokens"


def test_a_cache_that_cannot_have_a_format_is_named_and_not_drawn(many):
    assert set(drawn(many)["q8_0"]) == {"Two heads", "Window"}
    assert (
        "No q8_0 for Odd: its key has 24 numbers, not a multiple of 32. Use int8."
        in (many / "report.html").read_text()
    )


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        (
            SHAPE.replace("n_embd: 64", "n_embd: 48"),
            "q8_0",
            "its key has 24 numbers, not a multiple of 32. Use int8.",
        ),
        ("{type: rnn, n_layer: 1, n_embd: 8}", "fp8", "an RNN has no KV cache."),
    ],
    ids=["heads", "rnn"],
)
def test_formats_that_no_cache_can_have_are_named_in_the_report(place, here, capsys, model, kind, reason):
    text = f"""
about: Two that were trained.
run:
  data: {{path: input.txt, block_size: 16}}
  model: {model}
  trainer: {{max_iters: 2, batch_size: 2, eval_batches: 1}}
variants: {{One: {{}}, Two: {{trainer: {{learning_rate: 0.01}}}}}}
kv_dtype: [{kind}]
questions:
  - ask: How many bits?
    show: [kv_dtype]
new_tokens: 3
"""
    folder = study(f"impossible-{kind}", text)
    told = " ".join(capsys.readouterr().out.split())
    page = html.unescape((folder / "report.html").read_text())
    for shown in (told, page):
        assert "Loss against KV bytes, by cache format" in shown
        assert f"No {kind} for One, Two: {reason}" in shown
    assert not list(folder.glob("*-kv_dtype.png"))


BAD = [
    (
        {"kv_dtype": ["bf16", "fp9"]},
        ["p: kv_dtype: unknown 'fp9'", "Did you mean 'fp8'?", "Known: fp32, bf16"],
    ),
    *(
        (
            {"kv_dtype": value},
            [f"p: kv_dtype: {wrote}: expected a list of formats. Write kv_dtype: [bf16, fp8], for"],
        )
        for value, wrote in (
            ("fp8", "fp8"),
            (None, "null"),
            (True, "true"),
            (8, "8"),
            ({"a": "fp8"}, "{a: fp8}"),
        )
    ),
    ({"kv_dtype": ["fp8", "int8", "fp8"]}, ["kv_dtype: [fp8, int8, fp8] names one twice. Leave it out."]),
    ({"kv_dtype": [[8]]}, ["unknown [8]"]),
    (
        {"kv_dtype": ["fp8"], "questions": [{"ask": "?", "show": ["loss"]}]},
        ["kv_dtype=['fp8'] is in no answer", "show:"],
    ),
    (
        {"questions": [{"ask": "?", "show": ["kv_dtype"]}]},
        ["there are no formats", "kv_dtype: [bf16, fp8, int8]"],
    ),
]


@pytest.mark.parametrize(("more", "named"), BAD, ids=[" ".join(row[1]) for row in BAD])
def test_what_cannot_be_measured_is_refused_by_name(more, named):
    with pytest.raises(InvalidInput) as error:
        Preset.of("p", {"about": "x", "variants": {"a": {}}, **more})
    assert all(word in str(error.value) for word in named), error.value


def test_an_unknown_format_is_refused_before_anything_is_trained(here, capsys):
    Path("bad.yaml").write_text(ONE + "kv_dtype: [bf16, fp9]\n")
    assert main(["study", "--preset", "bad.yaml"]) == 3
    assert "bad.yaml: kv_dtype: unknown 'fp9'. Did you mean 'fp8'?" in capsys.readouterr().err
    assert not Path("runs/bad").exists()
