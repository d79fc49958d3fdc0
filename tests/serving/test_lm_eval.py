"""lm-evaluation-harness: our adapter beside its own, on tasks made here, without a network."""

import json
import math
import re
import shlex
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, processors, trainers

from rehead.checkpoint import save
from rehead.cli import main
from rehead.cli.entry import app
from rehead.config import ModelOptions
from rehead.measure import evaluate_text
from rehead.measure.quality import scores
from rehead.model import build
from rehead.tokenizer import open_model, train

pytestmark = pytest.mark.serving
HERE = Path(__file__).parent
LENGTH = 32
TEXT = "How weary, stale, flat and unprofitable seem to me all the uses of this world\n" * 60
QUESTIONS = [f"How weary, stale and {word}" for word in ("God", "weary ", "O", "stale", "the " * 40)]
QUESTIONS += ["", "<s>How weary"]  # nothing, and a token that the tokenizer would add
CHOICES = [" flat", " unprofitable uses of this world", " seem", " all", "s", "</s>"]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
}
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}} O",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["e", " th"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
TYPED = """
import socket, sys

def refuse(*_, **__):
    raise OSError("the network is blocked in this test")

socket.socket.connect = socket.getaddrinfo = refuse
sys.modules["sqlitedict"] = None  # SECURITY.md accepts an advisory of it, since nothing imports it
from rehead.cli import main
sys.exit(main(sys.argv[1:]))
"""


def task(folder, name, content, data):
    """A task's file; JSON is YAML."""
    table = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / f"{name}.yaml").write_text(json.dumps({**table, "test_split": "test", **content}))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with three tasks, and what `datasets` keeps."""
    root = tmp_path_factory.mktemp("harness")
    questions = [
        {"question": question, "choices": CHOICES, "gold": number % 4}
        for number, question in enumerate(QUESTIONS)
    ]
    texts = [{"text": TEXT[at : at + size]} for at, size in ((0, 1), (30, 700), (100, 90), (7, 128))]
    tasks = root / "tasks"
    tasks.mkdir()
    # of a batch of prompts, its own adapter asks only the first whether it spells the token
    for name, rows in (("questions", questions), ("prompts", questions[:-1]), ("texts", texts)):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task(tasks, "tiny_choice", CHOICE, root / "questions.jsonl")
    task(tasks, "tiny_rolling", ROLLING, root / "texts.jsonl")
    task(tasks, "tiny_writing", WRITING, root / "prompts.jsonl")
    return root


@pytest.fixture(autouse=True)
def _kept_here(place, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(place / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture(scope="module", params=[False, True], ids=["no token before a text", "a token before a text"])
def folders(request, place):
    """A Llama by transformers, with a tokenizer that adds <s> or not; its stock export; its exact MLA."""
    root = place / f"models-{request.param}"
    inner = hf.Tokenizer(hf.models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=letters, show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    if request.param:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).float().save_pretrained(root / "llama")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(root / "llama")
    for words in (["export", "llama", "stock"], ["convert", "llama", "mla", "--to", "mla"]):
        rehead(root, *words)
    return root


def rehead(place, *words, status=0):
    """A command as typed, in a process that cannot reach a network."""
    command = [sys.executable, "-c", TYPED, *map(str, words)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done


def numbers(kind, folders, place):
    """What the harness finds with our adapter ("rehead") or its own ("hf"), for each folder."""
    tasks = sorted((place / "tasks").iterdir())
    command = [sys.executable, HERE / "harness_numbers.py", kind, LENGTH, ",".join(map(str, folders)), *tasks]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def flat(found, task):
    """The log-likelihoods of a task, and whether each is greedy."""
    pairs = [one for answers in found["answers"][task] for requests in answers for one in requests]
    return [pair if isinstance(pair, list) else [pair, None] for pair in pairs]


def test_ours_and_its_own_adapter_say_the_same(folders, place):
    """Of an export by transformers, of the Llama by rehead, and of an exact MLA that no engine serves."""
    (theirs,) = numbers("hf", [folders / "stock"], place)
    for ours in numbers("rehead", [folders / "llama", folders / "mla"], place):
        for task in ("tiny_choice", "tiny_rolling"):
            logs, greedy = zip(*flat(ours, task), strict=True)
            their_logs, their_greedy = zip(*flat(theirs, task), strict=True)
            assert logs == pytest.approx(their_logs, abs=1e-4, rel=1e-6)
            assert greedy == their_greedy
        assert ours["answers"]["tiny_writing"] == theirs["answers"]["tiny_writing"]
        bits = [found["results"]["tiny_rolling"]["bits_per_byte,none"] for found in (ours, theirs)]
        assert bits[0] == pytest.approx(bits[1], abs=1e-4)
        for metric in ("acc,none", "acc_norm,none"):
            assert ours["results"]["tiny_choice"][metric] == theirs["results"]["tiny_choice"][metric]
    written = [text for ((text,),) in theirs["answers"]["tiny_writing"]]
    assert any(len(text) < 12 for text in written)
    assert not any("e" in text for text in written)


def small(place, letters="", tokenizer=None, **ids):
    """A model in rehead's format, of two layers."""
    torch.manual_seed(3)
    made = build(ModelOptions(n_layer=2, n_embd=24).resolve(80, 64)).eval()
    for weight in made.parameters():
        weight.data *= 5
    files = {"tokenizer.json": (tokenizer or train("char", letters)).to_json()}
    save(made, place, files={**files, "generation_config.json": json.dumps(ids)})
    return place


@pytest.mark.parametrize("size", [1 + 3 * LENGTH, 77])
def test_a_rolling_text_is_what_eval_reads(size, tmp_path, capfd, monkeypatch):
    """With windows of as many tokens; the last of several is full, and `eval`'s ends with the text."""
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "model", TEXT)
    (tmp_path / "text.txt").write_text(TEXT[:size])
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT[:size]}))
    task(tmp_path, "one", ROLLING, "text.jsonl")  # from the folder one works in
    read = []
    for how in (["--data", "text.txt"], ["--tasks", "one.yaml"]):
        assert main(["eval", "model", *how, "--length", str(LENGTH), "--json"]) == 0
        read.append(json.loads(capfd.readouterr().out))
    bits = read[1]["results"]["one"]["bits_per_byte,none"]
    whole = (size - 1) % LENGTH == 0
    assert (bits == pytest.approx(read[0]["bits_per_byte"], rel=1e-6)) == whole
    opened = open_model(tmp_path / "model")
    ids = opened.tokenizer.encode(TEXT[:size])
    full, rest = divmod(size - 1, LENGTH)
    nats = evaluate_text(opened.model, ids[: full * LENGTH + 1], length=LENGTH).loss * full * LENGTH
    if rest:  # tokens of a window that ends with the text
        last = evaluate_text(opened.model, ids[-LENGTH - 1 :], length=LENGTH)
        before = evaluate_text(opened.model, ids[-LENGTH - 1 : -rest], length=LENGTH)
        nats += last.loss * last.tokens - before.loss * before.tokens
    assert bits == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_a_token_before_a_text_is_read_and_not_predicted(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = TEXT[: 2 * LENGTH]
    small(tmp_path / "model", TEXT, bos_token_id=9, eos_token_id=[3, 4])
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    task(tmp_path, "one", ROLLING, "text.jsonl")
    assert main(["eval", "model", "--tasks", "one.yaml", "--length", str(LENGTH), "--json"]) == 0
    bits = json.loads(capfd.readouterr().out)["results"]["one"]["bits_per_byte,none"]
    opened = open_model(tmp_path / "model")
    ids = np.concatenate([[9], opened.tokenizer.encode(text)])
    expected = evaluate_text(opened.model, ids, length=LENGTH)
    assert expected.tokens == len(text)
    assert bits == pytest.approx(scores(expected.loss, expected.tokens, len(text))["bits_per_byte"], rel=1e-6)


def refused(capfd, *words):
    status = main(["eval", *map(str, words)])
    printed = capfd.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if line.startswith("rehead: ")]
    assert len(lines) == 1, printed.err
    return status, lines[0]


def test_what_cannot_be_run_is_one_line(place, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "model", TEXT + "GO")
    task(tmp_path, "far", {**CHOICE, "dataset_path": "nobody/nothing", "dataset_kwargs": {}}, "-")
    task(tmp_path, "gone", CHOICE, "gone.jsonl")
    task(tmp_path, "beams", {**WRITING, "generation_kwargs": {"num_beams": 4}}, place / "prompts.jsonl")
    (tmp_path / "no.yaml").write_text("a: 1")
    (tmp_path / "empty").mkdir()

    def refuse(*_, **__):
        raise OSError("the network is blocked in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for tasks, code, parts in (
        ("far.yaml", 5, ["task far.yaml: its data cannot be read", "Run it once where the network is"]),
        ("gone.yaml", 5, ["task gone.yaml: its data cannot be read", "gone.jsonl"]),
        ("no.yaml", 3, ["task no.yaml cannot be used", "keys=['a']"]),
        ("empty", 3, ["empty holds no task"]),
        ("hellaswg", 2, ["unknown task 'hellaswg'", "Did you mean 'hellaswag'?"]),
        (",", 2, ["names no task"]),
        (place / "tasks/tiny_choice.yaml", 3, ["an empty context", "bos_token_id"]),
        ("beams.yaml", 3, ["generation_kwargs num_beams", "run lm_eval on an export"]),
        (place / "tasks/tiny_writing.yaml", 3, ["12 new tokens leave no room", "--length"]),
    ):
        status, line = refused(capfd, "model", "--tasks", tasks, "--length", 12)
        assert (status, [part for part in parts if part not in line]) == (code, []), line


@pytest.mark.parametrize("name", ["./nowhere", "tasks/nowhere.yaml", "nowhere.yaml"])
def test_a_file_that_is_not_there_is_missed_at_once(name, tmp_path, capfd, monkeypatch):
    """The harness's own tasks are thousands of files, which are not read for it."""
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "model", TEXT)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", None)
    status, line = refused(capfd, "model", "--tasks", name)
    assert status == 2
    assert f"unknown task {name!r}, and no file of that name." in line


def test_as_typed(folders, place):
    """Without a network; the example of the help with a task's file."""
    done = rehead(folders, "eval", "mla", "--tasks", place / "tasks", "--length", LENGTH, "--json")
    said = json.loads(done.stdout)
    assert list(said["results"]) == ["tiny_choice", "tiny_rolling", "tiny_writing"]
    assert (said["length"], said["dtype"], said["lm_eval"]) == (LENGTH, "float32", version("lm_eval"))
    assert said["n-samples"]["tiny_choice"] == {"original": 7, "effective": 7}
    (example,) = re.findall(r"^ +rehead (eval .*--tasks .*)$", app["eval"].help, re.MULTILINE)
    words = [
        re.sub(r"^task.yaml$", str(place / "tasks/tiny_choice.yaml"), word) for word in shlex.split(example)
    ]
    words = ["llama" if word == "out/llama" else word for word in words]
    shown = rehead(folders, *words).stdout
    assert re.search(r"tiny_choice .* acc +↑ +[01](\.\d+)? +0", shown)
    assert "llama in float32, length 128" in shown
    assert "%|" not in done.stderr  # the harness's own progress
