"""What lm-evaluation-harness is told of a model, without it: tokens around a text, and how answers are sampled.

tests/serving/test_lm_eval.py compares the rest with the harness's own adapter.
"""

import json
import warnings
from types import SimpleNamespace

import pytest
import tokenizers as hf
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, processors

from rehead.checkpoint import save
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.errors import InvalidInput
from rehead.measure.answers import Sampling, Writer
from rehead.measure.harness import Scored, sampling
from rehead.measure.tasks import _set_examples
from rehead.model import build
from rehead.tokenizer import open_model


def tokenizer(adds):
    """Letters, <s> and </s>; it may put <s> before a text."""
    letters = {token: id for id, token in enumerate(["<s>", "</s>", *"abcdefg"])}
    inner = hf.Tokenizer(hf.models.BPE(letters, []))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<s>", "</s>"])
    if adds:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return inner


@pytest.fixture
def folder(tmp_path):
    """A function that writes a model folder with a tokenizer and what its configs say."""

    def written(adds=False, ids=None, config=None):
        model = build(ModelOptions(n_layer=1, n_embd=12).resolve(9, 16))
        files = {"tokenizer.json": tokenizer(adds).to_str(), "generation_config.json": json.dumps(ids or {})}
        if config is not None:
            files["tokenizer_config.json"] = json.dumps(config)
        save(model, tmp_path / "model", files=files)
        return tmp_path / "model"

    return written


@pytest.mark.parametrize(
    ("ids", "config", "begin", "end"),
    [
        ({}, None, None, None),
        ({"bos_token_id": 4, "eos_token_id": 5}, None, 4, 5),
        ({"eos_token_id": [5, 6]}, None, 5, 5),
        (
            {"bos_token_id": 4, "eos_token_id": 5},
            {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
            0,
            1,
        ),
        ({"bos_token_id": 4, "eos_token_id": 5}, {"bos_token": None}, 5, 5),  # as of Qwen
        ({"bos_token_id": 4}, {"eos_token": "none"}, 4, None),
        ({"bos_token_id": 9}, None, None, None),  # of another vocabulary
    ],
)
def test_the_tokens_around_a_text(folder, ids, config, begin, end):
    scored = Scored(opened=open_model(folder(ids=ids, config=config)), length=16)
    assert (scored.begin, scored.end) == (begin, end)


@pytest.mark.parametrize("adds", [False, True])
def test_ids_are_those_of_transformers(folder, adds):
    """As the harness's own adapter asks for them."""
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    scored = Scored(opened=open_model(folder(adds, config=marks)), length=16)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(adds), **marks)
    for text in ("abc", "<s>abc", "ab</s>c", ""):
        spelled = {"add_special_tokens": False} if text.startswith("<s>") else {}
        assert scored.ids(text, None) == theirs.encode(text, **spelled)
        assert scored.ids(text, False) == theirs.encode(text, add_special_tokens=False)
    assert scored.ids("ab", None) == [0] * adds + [2, 3]
    assert scored.ids("<s>ab", False) == [0, 2, 3]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, Sampling(max_new_tokens=256, stops=("</s>",))),
        ({"until": "x", "max_new_tokens": 3}, Sampling(max_new_tokens=3, stops=("x", "</s>"))),
        ({"until": ["x", ""], "max_gen_toks": 4, "max_tokens": 9, "do_sample": False, "temperature": 2},
         Sampling(max_new_tokens=4, stops=("x", "</s>"))),
        ({"temperature": 0.5, "top_k": 3}, Sampling(max_new_tokens=256, stops=("</s>",), temperature=0.5, top_k=3)),
        ({"do_sample": True, "top_p": 0.9}, Sampling(max_new_tokens=256, stops=("</s>",), temperature=1.0, top_p=0.9)),
    ],
)  # fmt: skip
def test_a_tasks_generation_kwargs(options, how):
    assert sampling(options, "</s>") == how


def test_what_rehead_does_not_sample_by_is_refused():
    with pytest.raises(InvalidInput, match="generation_kwargs num_beams, repetition_penalty of a task"):
        sampling({"num_beams": 4, "repetition_penalty": 1.1}, "")


def test_an_export_names_the_tokens_around_a_text(tmp_path, capfd):
    """For `transformers`, and so for the harness's own adapter."""
    torch.set_default_dtype(torch.float32)
    options = ModelOptions(shape="llama", n_layer=1, n_embd=12, n_query_head=2, bias=False)
    files = {
        "tokenizer.json": tokenizer(False).to_str(),
        "generation_config.json": json.dumps({"bos_token_id": 0}),
    }
    save(build(options.resolve(9, 16)), tmp_path / "model", files=files)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "stock")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "stock")
    assert (theirs.bos_token_id, theirs.eos_token) == (0, None)
    assert theirs.encode("ab<s>") == [2, 3, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--tasks", "x", "--data", "y"],
            "--data y with --tasks: a task brings its own texts. Leave one out.",
        ),
        (["--tasks", "x", "--stride", "2"], "--stride 2 with --tasks"),
        (
            ["--tasks", "x", "--no-bos"],
            "--no-bos with --tasks: a task says how its texts begin. Leave one out.",
        ),
        (
            ["--tasks", "x", "--kv-dtype", "fp8"],
            "--kv-dtype fp8 with --tasks: a cache is rounded for --data alone.",
        ),
        (["--tasks", "x", "--limit", "0"], "--limit 0. Use 1 or more."),
        (["--data", "x", "--limit", "2"], "--limit 2 is for --tasks: a text is read whole. Leave it out."),
        ([], "eval needs --data, a text file or a folder of them, or --tasks."),
    ],
)
def test_options_that_do_not_go_together(words, said, capfd):
    assert main(["eval", "model", *words]) == 2
    assert capfd.readouterr().err.startswith(f"rehead: {said}")


def test_without_the_harness_it_says_what_to_install(monkeypatch, capfd):
    monkeypatch.setattr("rehead.measure.tasks.find_spec", lambda name: None)
    assert main(["eval", "model", "--tasks", "hellaswag"]) == 2
    said = 'rehead: --tasks needs lm-evaluation-harness: pip install "rehead[eval]".\n'
    assert capfd.readouterr().err == said


class Task:
    """What is asked of a task of the harness."""

    def __init__(self, num_fewshot):
        self.config = {"num_fewshot": num_fewshot}

    def get_config(self, key):
        return self.config[key]

    def set_config(self, key, value):
        self.config[key] = value

    def set_fewshot_seed(self, seed):
        self.config["seed"] = seed


@pytest.mark.parametrize(("asked", "given"), [(5, [0, 5, 5]), (0, [0, 0, 0]), (None, [0, 0, 3])])
def test_a_task_that_takes_no_examples_is_named(asked, given):
    tasks = {"never": Task(0), "open": Task(None), "three": Task(3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _set_examples(tasks, asked)
    said = [str(one.message).partition(":")[0] for one in caught]
    assert said == (["--num-fewshot 5 is left out for never"] if asked else [])
    assert [task.config["num_fewshot"] for task in tasks.values()] == given
    assert all("seed" in task.config for task in tasks.values())


def test_a_repetition_penalty_is_told_of(tmp_path, monkeypatch):
    opened = SimpleNamespace(
        folder=tmp_path, ends=frozenset(), mark=lambda name: None,
        model=SimpleNamespace(), require_tokenizer=lambda: SimpleNamespace(special_ids=frozenset()),
    )  # fmt: skip
    monkeypatch.setattr(Writer, "answers", lambda *_: [])
    scored = Scored(opened=opened, length=16)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.0}')
    assert scored.answers([], {}) == []
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.1, which lm_eval"):
        scored.answers([], {})
