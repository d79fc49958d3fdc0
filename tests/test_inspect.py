"""`rehead inspect`: maps of any model that attends, and the check of a shared beginning."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import tokenizers as hf
import torch
import transformers

import rehead
from rehead import tokenizer
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.errors import InvalidInput
from rehead.measure.inspection import compare, equal_rows, inspect
from rehead.model import build
from rehead.report import terminal_map

TEXT = "Hope is a waking dream"
TRAIN = """train data.path=text.txt data.block_size=16 system.work_dir=out/x model.n_layer=2 model.n_embd=24
    trainer.batch_size=2 trainer.eval_batches=1 trainer.max_iters=2 trainer.sample_every=0"""


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Hope is a waking dream and more\n" * 20)


@pytest.fixture
def run(capsys):
    """A run with a window in one layer, and its folder."""
    flags = "model.n_query_head=6 model.n_kv_head=2 model.rope=True"
    assert main([*TRAIN.split(), *flags.split(), "model.layers=[{window: 3}, {}]"]) == 0
    capsys.readouterr()
    return "out/x"


@pytest.fixture
def gpt2():
    """A stock folder as transformers writes it, with a BPE tokenizer, and the model in it."""
    transformers.utils.logging.disable_progress_bar()
    words = tokenizer.train("bpe", Path("text.txt").read_text(), 280)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=words.vocab_size, **sizes, attn_implementation="eager")
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for weight in theirs.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    theirs.save_pretrained("gpt2")
    Path("gpt2/tokenizer.json").write_text(words.to_json())
    return theirs, words


def document(capsys, *words):
    assert main(["inspect", *words, "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    return json.loads(out)


def test_c1_and_c2_of_a_stock_folder_by_one_command(gpt2, capsys):
    theirs, words = gpt2
    found = document(
        capsys, "gpt2", "--text", TEXT, "--compare", f"{TEXT} and", "--layer", "1", "--head", "2"
    )
    for one, text in ((found, TEXT), (found["compared"], f"{TEXT} and")):
        ids = torch.from_numpy(words.encode(text))
        expected = theirs(ids[None], output_attentions=True).attentions[1][0, 2].detach()
        torch.testing.assert_close(torch.tensor(one["map"]["weights"]), expected, atol=2e-6, rtol=1e-4)
        assert "".join(one["tokens"]) == text
    assert found["compared"]["shared_tokens"] == len(found["tokens"])
    assert found["compared"]["unchanged"]
    assert max(found["compared"]["largest_change_per_layer"]) < 1e-5


def test_the_token_before_every_text_is_attended_to(gpt2, capsys):
    """As in `generate`; texts that share nothing else share nothing."""
    theirs, words = gpt2
    inner = hf.Tokenizer.from_str(words.to_json())
    begin = ("o", inner.token_to_id("o"))
    inner.post_processor = hf.processors.TemplateProcessing(single="o $A", special_tokens=[begin])
    Path("gpt2/tokenizer.json").write_text(inner.to_str())
    found = document(capsys, "gpt2", "--text", TEXT, "--compare", "Hope and")
    ids = torch.tensor([begin[1], *words.encode(TEXT)])
    expected = theirs(ids[None], output_attentions=True).attentions[0][0, 0].detach()
    torch.testing.assert_close(torch.tensor(found["map"]["weights"]), expected, atol=2e-6, rtol=1e-4)
    assert "".join(found["tokens"]) == f"o{TEXT}"
    assert main(["inspect", "gpt2", "--text", "Hope", "--compare", "dream"]) == 3
    assert "the texts begin with 'H" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="the text is empty"):
        inspect(rehead.load("gpt2"), rehead.load_tokenizer("gpt2"), "")


def test_a_run_folder_on_the_terminal(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["inspect", run, "--text", "Hope is", "--compare", "Hope is a wak"]) == 0
    out = capsys.readouterr().out
    first = out.splitlines()
    assert first[0] == "layer 0, head 0 (gqa, window 3)"
    assert first[2].split() == ["H", "o", "p", "e", "·", "i", "s"]
    assert first[3].split() == ["0", "H", "█1.0000"]
    assert [len(line.split()) for line in first[4:10]] == [4, 5, 5, 5, 5, 5]  # a window of 3
    second = first[first.index("layer 0, head 0 (gqa, window 3)", 1) :]
    assert [line[4] for line in second[3:16]] == ["="] * 7 + [" "] * 6
    assert "= the same row as in the first text" in "\n".join(second)
    assert "shared prefix of 7 tokens: rows unchanged" in out
    assert "entropy (nats)" in out
    assert "distance (tokens)" in out


def test_a_page_with_hostile_text(capsys):
    text = "<script>alert(1)</script>"
    Path("text.txt").write_text(text * 40)
    assert main([*TRAIN.split(), "model.n_query_head=3"]) == 0
    assert main(["inspect", "out/x", "--text", "<script>aler", "--html", "pages/map.html"]) == 0
    assert "page     pages/map.html" in capsys.readouterr().out
    page = Path("pages/map.html").read_text()
    assert "<script>aler" not in page
    assert page.count('<figure class="attention-maps"') == 1


def test_an_rnn_has_no_attention(capsys):
    assert main([*TRAIN.split(), "model.type=rnn", "model.n_hidden=8"]) == 0
    capsys.readouterr()
    assert main(["inspect", "out/x", "--text", "Hope"]) == 2
    assert "type rnn has no attention" in capsys.readouterr().err


@pytest.mark.filterwarnings("always:the text has")
def test_long_texts_are_cut_and_it_is_said(run, capsys):
    assert main(["inspect", run, "--text", TEXT, "--json"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["tokens"]) == 16
    assert "22 tokens, the first 16 are inspected: the model's context is 16" in printed.err
    assert main(["inspect", run, "--text", TEXT, "--length", "5", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tokens"] == list("Hope ")
    assert "the first 5 are inspected: length=5" in printed.err


REFUSED = [
    (["--text", "Hope", "--layer", "2"], 2, ["--layer 2", "0 to 1"]),
    (["--text", "Hope", "--head", "-1"], 2, ["--head -1", "0 to 5"]),
    (["--text", "Hope", "--length", "0"], 2, ["--length 0", "1 or more"]),
    (["--text", "Hope", "--max-tokens", "0"], 2, ["length=0", "1 or more"]),
    (["--text", "Hope", "--compare", "dream"], 3, ["'H'", "'d'", "share"]),
    (["--text", "Zorro"], 3, ["'Z'"]),
    ([], 2, ["--text"]),
]


def test_every_mistake_is_one_line(run, capsys):
    for words, status, named in REFUSED:
        assert main(["inspect", run, *words]) == status
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert all(part in printed.err for part in named), printed.err


def test_a_change_is_told_from_rounding():
    options = ModelOptions(n_layer=1, n_query_head=3, n_embd=24)
    words = tokenizer.train("char", "abcdef")
    model = build(options.resolve(words.vocab_size, 16))
    first, second = inspect(model, words, "abcd"), inspect(model, words, "abce")
    assert compare(first, second).n_token == 3
    assert compare(first, second).unchanged
    with pytest.warns(UserWarning, match="the first 2 are inspected"):
        assert compare(inspect(model, words, "abcd", length=2), first).n_token == 2
    assert equal_rows(first, second, 3, 0, 1) == [True] * 3
    second.maps[0][1, 1, 0] += 1e-4
    assert not compare(first, second).unchanged
    assert equal_rows(first, second, 3, 0, 1) == [True, False, True]
    assert equal_rows(first, second, 3, 0, 0) == [True] * 3


def test_many_heads_are_summed_up(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "54")
    assert main(["inspect", run, "--text", "Hope is", "--json"]) == 0
    entropy = json.loads(capsys.readouterr().out)["layers"][1]["entropy"]
    assert main(["inspect", run, "--text", "Hope is"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" 1 ")]
    low, high = min(entropy), max(entropy)
    assert rows[0][1:4] == [f"{low:.2f}", "(head", f"{entropy.index(low)})"]
    assert rows[0][5:8] == [f"{high:.2f}", "(head", f"{entropy.index(high)})"]


def test_shades_follow_the_bands():
    weights = torch.tensor([[1.0, 0, 0, 0, 0], [0.005, 0.05, 0.2, 0.5, 0.9]]).repeat(3, 1)[:5]
    lines = terminal_map.render(list("abcde"), weights, columns=30)
    assert lines[2] == "   1 b ··░░▒▒▓▓██"
    assert lines[1] == "   0 a ██"
    assert lines[0].split() == list("abcde")
    few = terminal_map.render(list("abcde"), weights, columns=14)
    assert few[2] == "   1 b ··░░▒▒"
    assert few[-1].strip() == "the first 3 of 5 tokens; --html shows all"
    long = terminal_map.render(["abc"] * 5, weights, columns=30)
    assert long[0].split() == ["0"]


def test_a_terminal_without_blocks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    lines = terminal_map.render(["·a", "é"], torch.tensor([[1.0, 0.0], [0.2, 0.8]]), columns=40)
    assert lines[1:3] == ["   0 _a    #1.0000", "   1 \\xe9  +0.2000 #0.8000"]
    assert "\n".join(lines).isascii()


def test_the_model_is_computed_in_float32(run, capsys):
    """In bfloat16 the rows of a prefix would differ by more than rounding."""
    words = tokenizer.Tokenizer.load(Path(run, "checkpoints", "step-000002")).to_json()
    rehead.save(rehead.load(run).to(torch.bfloat16), "half", files={"tokenizer.json": words})
    found = document(capsys, "half", "--text", "Hope is", "--compare", "Hope is a wak")
    assert found["compared"]["unchanged"]
    rows = torch.tensor(found["map"]["weights"]).sum(-1)
    assert (rows - 1).abs().max() < 1e-6


def test_a_page_replaces_no_file_but_a_page(run, capsys, tmp_path):
    mine, pipe, page = tmp_path / "input.txt", tmp_path / "pipe.html", tmp_path / "page.html"
    thesis, empty = tmp_path / "thesis.html", tmp_path / "empty.html"
    mine.write_text("mine")
    thesis.write_text("<!DOCTYPE html><html><head><title>Thesis</title></head></html>")
    empty.touch()
    os.mkfifo(pipe)
    for place, rule in (
        *((place, "was not written by rehead") for place in (mine, thesis, empty)),
        (pipe, "is not a regular file"),
    ):
        assert main(["inspect", run, "--text", "Hope", "--html", str(place)]) == 3
        said = capsys.readouterr().err
        assert f"{place} exists" in said
        assert rule in said
        assert "choose another name" in said
    assert mine.read_text() == "mine"
    assert "Thesis" in thesis.read_text()
    assert pipe.is_fifo()
    for _ in range(2):
        assert main(["inspect", run, "--text", "Hope", "--html", str(page)]) == 0
    assert "<html" in page.read_text()
