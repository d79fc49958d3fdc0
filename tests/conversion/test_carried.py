"""What a conversion passes on of its source's folder, and what it refuses before any work."""

import json
import os
import shutil
from pathlib import Path

import pytest
import tokenizers as hf
import torch
import transformers

import rehead
from rehead.cli import main
from rehead.conversion.converter import Converter
from rehead.tokenizer import open_model

TEXT = "a bc d abc bcd " * 40


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    """A Llama that transformers wrote, with the marks of its tokenizer in three files that differ."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=32, bos_token_id=0, eos_token_id=[1, 2],
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    letters = {letter: i for i, letter in enumerate(["<a>", "<b>", "<c>", *sorted(set(TEXT))])}
    hf.Tokenizer(hf.models.BPE(vocab=letters, merges=[])).save("model/tokenizer.json")
    marks = {
        "bos_token": None,
        "eos_token": {"content": "<c>"},
        "unk_token": "<b>",
        "padding_side": "right",
        "added_tokens_decoder": {},
    }
    Path("model/tokenizer_config.json").write_text(json.dumps(marks))
    Path("text.txt").write_text(TEXT)


def test_marks_and_padding_go_along():
    assert main(["convert", "model", "made", "--to", "mha"]) == 0
    first, last = open_model("model"), open_model("made")
    assert [last.mark(name) for name in ("bos", "eos", "pad")] == [
        first.mark(name) for name in ("bos", "eos", "pad")
    ]
    assert (first.mark("bos"), first.mark("eos")) == (None, 2)
    assert last.tokenizer_keys() == first.tokenizer_keys()
    for name in ("model", "made"):
        assert main(["export", name, f"{name}-stock"]) == 0
    exports = [
        json.loads(Path(f"{name}-stock/tokenizer_config.json").read_text()) for name in ("model", "made")
    ]
    assert exports[0] == exports[1]
    assert (exports[0]["eos_token"], exports[0]["padding_side"]) == ("<c>", "right")
    said = [
        transformers.AutoTokenizer.from_pretrained(name).special_tokens_map
        for name in ("model-stock", "made-stock")
    ]
    assert said == [{"eos_token": "<c>", "unk_token": "<b>"}] * 2


MARKS = ("bos_token", "eos_token", "pad_token", "unk_token")


def named(folder):
    """The special tokens and their ids, as transformers reads a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [(getattr(tokenizer, mark), getattr(tokenizer, f"{mark}_id")) for mark in MARKS], len(tokenizer)


def llama_2(normalized):
    """A tokenizer whose normalizer would make `▁<s>` of `<s>`."""
    letters = ["<unk>", "<s>", "</s>", "▁", *sorted(set(TEXT) - {" "})]
    inner = hf.Tokenizer(hf.models.BPE({one: i for i, one in enumerate(letters)}, [], unk_token="<unk>"))
    inner.normalizer = hf.normalizers.Sequence(
        [hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")]
    )
    inner.add_special_tokens([hf.AddedToken(one, normalized=normalized) for one in letters[:3]])
    inner.save("model/tokenizer.json")


@pytest.mark.parametrize("normalized", [False, True])
def test_special_tokens_keep_their_spelling_whatever_the_normalizer_makes_of_it(normalized):
    llama_2(normalized)
    table = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "added_tokens_decoder": {}}
    Path("model/tokenizer_config.json").write_text(json.dumps(table))
    assert main(["export", "model", "stock"]) == 0
    assert named("stock") == named("model")
    assert named("model")[0][:2] == [("<s>", 1), ("</s>", 2)]


@pytest.mark.parametrize("newer", [False, True])
def test_an_older_special_tokens_map_is_read_as_transformers_reads_it(newer):
    """It goes before a tokenizer_config.json without `added_tokens_decoder`."""
    Path("model/tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": "<c>", "padding_side": "right"} | ({"added_tokens_decoder": {}} if newer else {})
        )
    )
    older = {"bos_token": "<b>", "eos_token": {"content": "<a>"}, "pad_token": "<c>", "unk_token": None}
    Path("model/special_tokens_map.json").write_text(json.dumps(older))
    assert main(["convert", "model", "made", "--to", "mha"]) == 0
    assert main(["export", "model", "stock"]) == 0
    assert main(["export", "made", "made-stock"]) == 0
    assert named("stock") == named("made-stock")
    ids = [id for _, id in named("model")[0]]
    assert ids == ([None, 2, None, None] if newer else [1, 0, 2, None])
    if newer:  # of what no tokenizer file names, the model's config says the id
        ids[0] = 0
    assert [id for _, id in named("stock")[0]] == ids


def test_a_token_that_is_none_stays_none():
    """Qwen2's class would put one of its own there."""
    table = {"eos_token": "<c>", "unk_token": None, "added_tokens_decoder": {}}
    Path("model/tokenizer_config.json").write_text(json.dumps(table))
    assert main(["export", "model", "stock"]) == 0
    found = json.loads(Path("stock/tokenizer_config.json").read_text())
    assert found["unk_token"] is None
    assert "pad_token" not in found


def test_a_first_token_that_only_the_config_promises_is_told_of(capsys):
    """transformers 4 added it; 5 does not."""
    table = {"bos_token": "<b>", "add_bos_token": True, "added_tokens_decoder": {}}
    Path("model/tokenizer_config.json").write_text(json.dumps(table))
    assert main(["export", "model", "stock"]) == 0
    assert "says add_bos_token=true, but its tokenizer.json adds none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["tekken.json", "sentencepiece.bpe.model", "tokenizer.model.v3", "qwen.tiktoken"]
)
def test_a_command_that_needs_a_tokenizer_names_the_one_it_does_not_read(name, capsys):
    Path("model/tokenizer.json").rename(f"model/{name}")
    assert main(["generate", "model", "--prompt", "a"]) == 3
    assert f"rehead does not read {name}. Write one there with AutoTokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["convert model out --to mha", "export model out"])
@pytest.mark.parametrize("name", ["vocab.json", "tokenizer_config.json", "tekken.json"])
def test_a_tokenizer_that_is_not_read_is_told_of(command, name, capsys):
    """Also one of the Hub in a form that is not fetched, as tiktoken.model, of which the config is there."""
    Path("model/tokenizer_config.json").unlink()
    Path("model/tokenizer.json").rename(f"model/{name}")
    Path("model/MANIFEST.json").unlink(missing_ok=True)
    assert main(command.split()) == 0
    assert f"the tokenizer of model ({name}) is not passed on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--calibration", "text.txt", "--test", "text.txt"], "calibration and test text are the same"),
        (["--calibration", "text.txt", "--teach", "-1"], "--teach"),
    ],
)
def test_refused_before_anything_is_measured(words, said, monkeypatch, capsys):
    for name in ("statistics", "convert", "attentions"):
        monkeypatch.setattr(Converter, name, None)
    line = [
        "convert",
        "model",
        "out",
        "--to",
        "mla",
        "--kv-fraction",
        "0.5",
        "--length",
        "16",
        "--allow-loss",
        *words,
    ]
    assert main(line) == 2
    assert said in capsys.readouterr().err


def test_folders_that_cannot_be_emptied_are_left(monkeypatch):
    """As on NFS, where a file that is open has another name and not gone."""

    def stays(path, *_, **__):
        raise OSError(39, "Directory not empty", path)

    remove = os.rmdir
    words = [
        "--to",
        "mla",
        "--target",
        "uneven",
        "--kv-fraction",
        "0.75",
        "--calibration",
        "text.txt",
        "--length",
        "16",
    ]
    monkeypatch.setattr(os, "rmdir", stays)
    try:
        assert main(["convert", "model", "out", *words, "--allow-loss"]) == 0
    finally:
        monkeypatch.setattr(os, "rmdir", remove)
    assert rehead.load("out").config.attention[0].name == "mla"


def test_the_single_file_goes_before_an_index():
    """As in transformers, which leaves the index of an earlier save behind."""
    shutil.copytree("model", "both")
    Path("both/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model-1.safetensors"}})
    )
    ids = torch.arange(9)[None]
    assert torch.equal(rehead.load("both")(ids), rehead.load("model")(ids))


def test_weights_that_another_file_has_are_refused_by_name(capsys):
    table = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(table | {"transformers_weights": "other.safetensors"}))
    assert main(["plan", "model"]) in (2, 3)
    assert "transformers_weights" in capsys.readouterr().err


def test_what_llama_cpp_would_compute_otherwise_is_refused_without_mla(capsys):
    config = transformers.MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=32, sliding_window=8,
    )  # fmt: skip
    transformers.MistralForCausalLM(config).save_pretrained("mistral")
    for words in (["--for", "llama.cpp"], ["--format", "gguf"]):
        assert main(["export", "mistral", "out.gguf" if "gguf" in words else "out", *words]) == 2
        assert "window" in capsys.readouterr().err
    assert main(["export", "model", "out", "--for", "llama.cpp"]) == 0
