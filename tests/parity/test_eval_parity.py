"""Losses against a plain loop over transformers' own model: at a length, sliding, in a dtype; before training, too."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers as hf
import torch
import torch.nn.functional as F
import transformers
from tokenizers.processors import TemplateProcessing

from rehead import tokenizer
from rehead.cli import main
from rehead.data import BatchSampler, split
from rehead.generation import stream
from typed_lines import documents

TEXT = "Ünïcödé and plain: it droppeth as the gentle rain\nfrom heaven upon the place beneath. " * 20
PADDED = 5000
"""Tokens of the model, beyond those of its tokenizer, so that a batch's logits are computed in several parts."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A random Llama for long texts in a stock folder with a tokenizer, the ids of a text, and that text."""
    transformers.utils.logging.disable_progress_bar()
    place = tmp_path_factory.mktemp("stock")
    words = tokenizer.train("bpe", TEXT, 290)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.set_default_dtype(torch.float32)
        config = transformers.LlamaConfig(
            vocab_size=PADDED, hidden_size=36, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=131_072, tie_word_embeddings=True, initializer_range=0.2,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(place / "llama")
    (place / "llama" / "tokenizer.json").write_text(words.to_json())
    (place / "text.txt").write_text(TEXT)
    return model, torch.from_numpy(words.encode(TEXT)).long(), place


def plain(model, ids, length, stride, bos=None):
    """Mean loss, and how many tokens: windows moved by hand, each token where it is first read."""
    losses, done = [], 0
    for start in range(0, len(ids), stride):
        if done == len(ids) - 1:
            break
        stop = min(start + length, len(ids) - 1)
        window = ids[None, start:stop].clone()
        if bos is not None:
            window[:, 0] = bos
        with torch.no_grad():
            logits = model(window).logits[0, done - start :].float()
        losses.append(F.cross_entropy(logits, ids[done + 1 : stop + 1], reduction="none"))
        done = stop
    return torch.cat(losses).mean().item(), sum(map(len, losses))


@pytest.mark.process
def test_eval_is_the_loop_anyone_would_write(stock):
    model, ids, place = stock
    loss, tokens = plain(model, ids, 2048, 2048)
    (found,) = documents("eval llama --data text.txt", cwd=place)
    assert (found["length"], found["stride"], found["tokens"], found["dtype"]) == (
        2048,
        2048,
        tokens,
        "float32",
    )
    assert found["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(("length", "stride"), [(50, None), (50, 17), (300, 299), (64, 64)])
def test_of_any_length_and_stride(stock, capsys, monkeypatch, length, stride):
    torch.set_default_dtype(torch.float32)
    model, ids, place = stock
    monkeypatch.chdir(place)
    words = ["--length", str(length)] + ([] if stride is None else ["--stride", str(stride)])
    assert main(["eval", "llama", "--data", "text.txt", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    loss, tokens = plain(model, ids, length, stride or length)
    assert (found["length"], found["stride"], found["tokens"]) == (length, stride or length, tokens)
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["loss"] != pytest.approx(
        plain(model, ids, length - 1, min(length - 1, stride or 99))[0], abs=1e-5
    )


@pytest.mark.filterwarnings("default:.*not in the tokenizer's vocabulary")
def test_in_another_dtype(stock, capsys, monkeypatch):
    torch.set_default_dtype(torch.float32)
    model, ids, place = stock
    monkeypatch.chdir(place)
    assert main(["eval", "llama", "--data", "text.txt", "--dtype", "bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bfloat16"
    exact = plain(model, ids, 2048, 2048)[0]
    assert 1e-6 < abs(found["loss"] - exact) < 0.05
    assert (
        main(["generate", "llama", "--prompt", "it", "--max-new-tokens", "9", "--dtype", "bf16", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["results"]
    assert main(["generate", "llama", "--prompt", "it", "--dtype", "int4"]) == 2
    assert "--dtype int4" in capsys.readouterr().err


@pytest.fixture(scope="module")
def begun(stock):
    """The id that transformers' tokenizer of the folder `begun` puts before a text; the model is that of `llama`."""
    _, _, place = stock
    shutil.copytree(place / "llama", place / "begun")
    inner = hf.Tokenizer.from_file(str(place / "llama" / "tokenizer.json"))
    inner.add_special_tokens(["<s>", "</s>"])
    around = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    inner.save(str(place / "begun" / "tokenizer.json"))
    read = transformers.PreTrainedTokenizerFast(tokenizer_file=str(place / "begun" / "tokenizer.json"))
    return read("it")["input_ids"][0]


@pytest.mark.process
def test_blocks_begin_as_every_text_does(stock, begun):
    """With the token that the tokenizer puts before a text; not if asked not to."""
    torch.set_default_dtype(torch.float32)
    model, ids, _ = stock
    asked = "eval begun --data text.txt --length 50 --stride 17"
    found = documents(asked, f"{asked} --no-bos", cwd=stock[2])
    expected = [plain(model, ids, 50, 17, bos) for bos in (begun, None)]
    for one, (loss, tokens) in zip(found, expected, strict=True):
        assert (one["loss"], one["tokens"]) == (pytest.approx(loss, abs=1e-5), tokens)
    assert [one.get("bos") for one in found] == ["<s>", None]
    assert abs(expected[0][0] - expected[1][0]) > 1e-3


@pytest.mark.filterwarnings("default:.*not in the tokenizer's vocabulary")
def test_training_begins_its_blocks_so_too(stock, begun, monkeypatch):
    """The losses of the first step and of the evaluation before it, and the sample's prompt."""
    torch.set_default_dtype(torch.float32)
    model, ids, place = stock
    monkeypatch.chdir(place)
    flags = ["data.block_size=16", "trainer.batch_size=4", "trainer.max_iters=1", "trainer.eval_batches=999"]
    flags += [
        "trainer.sample_every=1",
        "trainer.sample_tokens=2",
        "trainer.sample_prompt=it",
        "system.seed=5",
    ]
    command = ["train", "model.folder=begun", "data.path=text.txt", "system.work_dir=run", *flags]
    prompts = []

    def noted(model, texts, *rest, **more):
        prompts.append(texts[0].tolist())
        return stream(model, texts, *rest, **more)

    monkeypatch.setattr("rehead.training.run.stream", noted)
    assert main(command) == 0
    start, *records = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert start["bos"] == "<s>"
    parts = split(ids.numpy(), 16, 0.1)
    held_out = torch.from_numpy(parts.val)
    before = next(record["val_loss"] for record in records if "val_loss" in record)
    assert before == pytest.approx(plain(model, held_out, 16, 16, begun)[0], abs=1e-5)
    assert abs(before - plain(model, held_out, 16, 16)[0]) > 1e-3
    inputs, targets = BatchSampler(parts.train, 16, 4, 5).next()
    inputs[:, 0] = begun
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1).float(), targets.flatten())
    assert next(record["loss"] for record in records if "loss" in record) == pytest.approx(
        loss.item(), abs=1e-5
    )
    assert prompts[0][0] == begun
    assert next(Path("run/samples").iterdir()).read_text().startswith("it")
