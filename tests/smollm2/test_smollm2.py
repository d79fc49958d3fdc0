"""A trained model of somebody else's: read as transformers reads its file, measured, converted, still sensible.

`make test-checkpoint` runs it. Commands run as a user types them, in processes of their own.
"""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

import rehead
from rehead.conversion import reading
from rehead.conversion.texts import SELF, Passage
from rehead.tokenizer import Tokenizer, open_model

pytestmark = [pytest.mark.checkpoint, pytest.mark.timeout(1800)]
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
HERE = Path(__file__).parent
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUDGET = 0.03
"""Nats per token that half of the cache may cost on the help texts: twice what was measured."""
PROMPT = "The capital of France is"
TEXTS = [
    PROMPT,
    "def area(r: float) -> float:\n    return math.pi * r**2  # in m²\n\n\tprint(area(x))\r\n",
    "Ünïcödé: 你好, 世界; здравствуй мир 🎉👩‍🚀 e\u0301 שלום",
    "isn't it? WE'LL   see…      \n\n\n   and so on   ",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|>",
    "1234567890,5e-3;0x1F½ⅷ٣",
    "\x00\x7f\u200b\ufeff",
    "",
]


@pytest.fixture(autouse=True)
def _as_users_have_it():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def source():
    """The folder that `make checkpoint` makes; the GGUF file lies beside it."""
    made = [sys.executable, HERE / "checkpoint.py"]
    return Path(subprocess.run(made, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


@pytest.fixture(scope="module")
def theirs(source):
    """transformers' model and tokenizer of the file itself."""
    auto = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    model = auto[0].from_pretrained(source.parent, gguf_file=FILE, dtype=torch.float32).eval()
    return model, auto[1].from_pretrained(source.parent, gguf_file=FILE)


def test_the_command_of_readme_takes_its_texts(source, tmp_path, monkeypatch):
    """With what `make checkpoint` puts beside the model; `self`, which takes minutes, is not sampled."""
    readme = (HERE.parents[1] / "README.md").read_text()
    line = readme.partition("rehead convert ~/.cache/rehead/smollm2-135m ")[2].partition("```")[0]
    words = line.replace("\\\n", " ").replace("~/.cache/rehead", str(source.parent)).split()
    given = [(words[at], words[at + 1]) for at in range(len(words) - 1)]
    length = int(dict(given)["--length"])
    monkeypatch.setattr(
        reading, "sampled_once", lambda *_: Passage(name=SELF, ids=np.zeros(length, dtype=np.int64))
    )
    texts = reading.Reader(source, open_model(source, in_memory=False), length, 0, tmp_path).texts(
        [value for flag, value in given if flag == "--calibration"], dict(given).get("--test")
    )
    assert [text.name for text in texts.calibration] == [f"{source.name}-fit.txt", SELF]
    assert len(texts.test.ids) > length


def typed(*words):
    """What a command says on stdout."""
    done = subprocess.run([sys.executable, "-m", "rehead", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@torch.no_grad()
def test_weights_and_logits(source, theirs):
    """Every weight is the one that transformers reads in the file; logits agree as float32 does."""
    model = theirs[0]
    again = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert again.config.max_position_embeddings == 8192
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    ours, tokenizer = rehead.load(source), Tokenizer.load(source)
    for text in TEXTS[:3]:
        ids = torch.from_numpy(tokenizer.encode(text))[None]
        torch.testing.assert_close(ours(ids), model(ids).logits, rtol=0, atol=5e-4)


def test_token_ids(source, theirs):
    """Of transformers, but for blanks before a digit: it does not know that SmolLM2 cuts off every digit first."""
    ours, stock = Tokenizer.load(source), transformers.AutoTokenizer.from_pretrained(source)
    for text in TEXTS:
        wanted = theirs[1](text).input_ids
        assert stock(text).input_ids == wanted, text
        assert ours.encode(text, special_tokens=True).tolist() == wanted, text
    for text in TEXTS[:6]:
        assert ours.decode(ours.encode(text)) == text
    assert ours.pieces(ours.encode("in  2024")) == ["in", "  ", "2", "0", "2", "4"]
    chat = [{"role": "user", "content": "Hello"}]
    said = [one.apply_chat_template(chat, tokenize=False) for one in (stock, theirs[1])]
    assert said[0] == said[1]
    assert said[0].endswith("<|im_start|>user\nHello<|im_end|>\n")


def test_back_to_its_file(source, tmp_path):
    """As the file it came from, but for the type of its matrices: names, numbers, tokens, sizes."""
    typed("export", source, tmp_path / "out.gguf", "--format", "gguf")
    ours, own = gguf.GGUFReader(tmp_path / "out.gguf"), gguf.GGUFReader(source.parent / FILE)
    numbers = {tensor.name: tensor for tensor in ours.tensors}
    assert len(ours.tensors) == len(own.tensors) == len(numbers)
    for tensor in own.tensors:
        exact = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(numbers[tensor.name].data, exact), tensor.name
    said = (
        "general.",
        "GGUF.",
        "tokenizer.ggml.unknown",
        "tokenizer.ggml.add_space",
        "tokenizer.ggml.add_eos",
    )
    facts = {key: field.contents() for key, field in own.fields.items() if not key.startswith(said)}
    assert {key: ours.fields[key].contents() for key in facts} == facts
    assert {"llama.rope.freq_base", "tokenizer.ggml.merges", "tokenizer.chat_template"} <= facts.keys()


@torch.no_grad()
def test_loss(source, theirs):
    """`eval`, in blocks, is the mean over what transformers computes of each, from the same ids (see above)."""
    found = json.loads(typed("eval", source, "--data", f"{source}-test.txt", "--length", 512, "--json"))
    ids = torch.from_numpy(Tokenizer.load(source).encode(Path(f"{source}-test.txt").read_text()))
    total = 0.0
    for start in range(0, len(ids) - 1, 512):
        block = ids[start : start + 513]
        logits = theirs[0](block[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, block[1:], reduction="sum").item()
    assert found["tokens"] == len(ids) - 1
    assert found["loss"] == pytest.approx(total / found["tokens"], abs=1e-4)
    assert 2 < found["loss"] < 4


def test_half_of_the_cache(source, tmp_path):
    """Half of the cache costs little on text it was not fitted to, and the model still knows its capital."""
    assert typed(
        "generate", source, "--prompt", PROMPT, "--max-new-tokens", 4, "--temperature", 0
    ).startswith(f"{PROMPT} Paris")
    half = tmp_path / "half"
    fit = ("--calibration", f"{source}-fit.txt", "--test", f"{source}-test.txt")
    said = json.loads(
        typed("convert", source, half, "--to", "mla", "--kv-fraction", 0.5, *fit, "--allow-loss", "--json")
    )
    bytes_before, bytes_after = said["kv_bytes_per_token"]
    loss_before, loss_after = said["loss"]
    assert bytes_after <= bytes_before / 2
    assert loss_after - loss_before < BUDGET, said["loss"]
    told = typed("generate", half, "--prompt", PROMPT, "--max-new-tokens", 4, "--temperature", 0)
    assert told.startswith(f"{PROMPT} Paris")
