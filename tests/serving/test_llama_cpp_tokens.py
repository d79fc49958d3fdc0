"""llama.cpp reads texts as the tokens that rehead and transformers read, or the tokenizer is refused."""

import gguf_models
import pytest
import tokenizers as hf
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, processors, trainers

from rehead.checkpoint.gguf import vocabulary
from rehead.checkpoint.gguf.tokenizer import CUTS
from rehead.cli import main
from rehead.conversion.export import gguf as export
from rehead.tokenizer import Tokenizer, train

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]
TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "  two  spaces ",
    "tabs\tand\n\n\nnew lines\r\n \n",
    "don't we'll I'M THEY'RE it's",
    "12345 67 8 3.14159 1,000",
    "x=1; y[2]={'a': 3}  # !!!???...",
    "def f(x):\n    return x ** 2\n",
    "café naïve Ünïcödé ß",
    "日本語のテキスト。中文",
    "Привет, мир",
    "🚀🙂 emoji 👨\u200d👩\u200d👧",
    "a\u00a0b\u2003c\u200bd",
    "٣٤٥ ½ Ⅷ",
    "हिन्दी ไทย ภาษา",
    "\x00\x7f\x85",
    "𝔘𝔫𝔦 ﬁ ﬂ İıſK",
    "<|im_start|>user <|end|>",
    "<think> a</think>",
]
DOCS = "".join(f"{text}\n{text.upper()}\n" for text in TEXTS[:10]) * 20 + gguf_models.__doc__ * 30


def model(folder, tokenizer):
    """A folder with a tokenizer, the text of a tokenizer.json."""
    n_token = hf.Tokenizer.from_str(tokenizer).get_vocab_size()
    fields = {"vocab_size": n_token, "num_hidden_layers": 1, "bos_token_id": None, "eos_token_id": None}
    return gguf_models.write(folder, "Llama", gguf_models.GQA | fields, tokenizer)


def written(folder, tokenizer):
    """The file of a model with this tokenizer."""
    model(folder / "model", tokenizer)
    assert main(["export", str(folder / "model"), str(folder / "out.gguf"), "--format", "gguf"]) == 0
    return folder / "out.gguf"


def published(cut, begin=False):
    """A tokenizer.json with the cut of a published model, with special tokens and one that is not."""
    inner = hf.Tokenizer(hf.models.BPE())
    CUTS[cut](inner)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>"],
        show_progress=False,
    )
    inner.train_from_iterator([DOCS], trainer)
    inner.add_tokens(["<think>", "</think>"])
    if begin:
        inner.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", inner.token_to_id("<|im_start|>"))]
        )
    return inner.to_str()


TOKENIZERS = {
    "bpe": lambda: train("bpe", DOCS, 400).to_json(),
    "byte": lambda: train("byte", DOCS).to_json(),
    **{cut: lambda cut=cut: published(cut, begin=cut == "llama-bpe") for cut in CUTS},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_same_tokens(name, tmp_path, llama_cpp):
    text = TOKENIZERS[name]()
    file = written(tmp_path, text)
    ours = Tokenizer.from_json(text)
    plain = [ours.encode(one).tolist() for one in TEXTS]
    assert max(map(max, filter(None, plain))) > 256 or name == "byte"  # merged
    assert llama_cpp(file, texts=TEXTS)["texts"] == plain
    # as transformers reads them: special tokens, and those around a text
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=hf.Tokenizer.from_str(text))
    assert llama_cpp(file, texts=TEXTS, special=True)["texts"] == [theirs(one).input_ids for one in TEXTS]


def test_characters(tmp_path, llama_cpp):
    texts = ["", "abc \n", "\t~!", "".join(reversed(gguf_models.LETTERS))]
    tokenizer = train("char", gguf_models.LETTERS)
    file = written(tmp_path, tokenizer.to_json())
    assert llama_cpp(file, texts=texts)["texts"] == [tokenizer.encode(one).tolist() for one in texts]


def test_text_is_not_normalized(tmp_path, llama_cpp, caplog):
    """Qwen's tokenizers compose characters first. llama.cpp does not, of which the export warns."""
    text = published("qwen2")
    file = written(tmp_path, text)
    assert "does not normalize a text before reading it (NFC)" in caplog.text
    ours = Tokenizer.from_json(text)
    composed, apart = "café", "cafe\u0301"
    assert ours.encode(composed).tolist() == ours.encode(apart).tolist()
    found = llama_cpp(file, texts=[composed, apart])["texts"]
    assert found[0] == ours.encode(composed).tolist() != found[1]


def refused(folder, capsys, why):
    assert main(["export", str(folder / "model"), str(folder / "out.gguf"), "--format", "gguf"]) in (2, 3)
    assert why in capsys.readouterr().err
    assert not (folder / "out.gguf").exists()


def test_characters_beyond_ascii(tmp_path, llama_cpp, capsys, monkeypatch):
    """It is refused, for llama.cpp would not end: è begins with the byte of é."""
    text = train("char", "abcé").to_json()
    model(tmp_path / "model", text)
    refused(tmp_path, capsys, "characters beyond ASCII, such as 'é'")
    real = vocabulary._by_bytes
    monkeypatch.setattr(
        vocabulary,
        "_by_bytes",
        lambda tokens: (
            real([b"a"] * len(tokens))
            | {"tokens": ["".join(f"\\x{byte:02x}" for byte in token) for token in tokens]}
        ),
    )
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--format", "gguf"]) == 0
    assert llama_cpp(tmp_path / "out.gguf", texts=["abcé"])["texts"] == [[0, 1, 2, 3]]
    assert llama_cpp(tmp_path / "out.gguf", texts=["abcè"], patience=10) is None


def test_no_tokenizer(tmp_path, llama_cpp, capsys, monkeypatch):
    """It is refused: llama.cpp's server ends with a failed assertion."""
    model(tmp_path / "model", train("byte", "").to_json())
    (tmp_path / "model" / "tokenizer.json").unlink()
    refused(tmp_path, capsys, "tokenizer.json")
    monkeypatch.setattr(export, "_dtype_to_read", lambda source: None)  # which refuses it first
    monkeypatch.setattr(export, "_vocabulary", lambda *_: {"tokenizer.ggml.model": "none"})
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--format", "gguf"]) == 0
    assert llama_cpp(tmp_path / "out.gguf", prompts=[[1, 2, 3]]) is None


def test_no_end(tmp_path, llama_cpp, monkeypatch):
    """Without a named end, the byte 255 ends a text: llama.cpp would take token 11 instead."""
    text = train("bpe", DOCS, 400).to_json()
    made = model(tmp_path / "model", text)
    made.lm_head.weight.data[:] = 0
    made.lm_head.weight.data[11] = 1
    made.lm_head.weight.data[12] = -1
    made.save_pretrained(tmp_path / "model")
    prompts = [[i] for i in range(4)]
    with torch.no_grad():
        first = [int(made(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]
    assert 11 in first
    words = ["export", str(tmp_path / "model"), "--format", "gguf"]
    assert main([*words, str(tmp_path / "out.gguf")]) == 0
    answer = llama_cpp(tmp_path / "out.gguf", prompts=prompts, max_tokens=5)
    assert [tokens[0] for tokens in answer["tokens"]] == first
    assert {len(tokens) for tokens in answer["tokens"]} == {5}
    monkeypatch.setattr(vocabulary, "_special_ids", lambda *_: {})
    assert main([*words, str(tmp_path / "none.gguf")]) == 0
    answer = llama_cpp(tmp_path / "none.gguf", prompts=prompts, max_tokens=5)
    assert all(len(tokens) == 1 for tokens, one in zip(answer["tokens"], first, strict=True) if one == 11)


def test_a_token_that_takes_spaces(tmp_path, llama_cpp, capsys, monkeypatch):
    inner = hf.Tokenizer.from_str(published("gpt-2"))
    inner.add_tokens([hf.AddedToken("<mask>", lstrip=True, normalized=False)])
    text = inner.to_str()
    model(tmp_path / "model", text)
    refused(tmp_path, capsys, "tokens that take the spaces beside them, such as '<mask>'")
    monkeypatch.setattr(vocabulary, "STRIPS", ())
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--format", "gguf"]) == 0
    texts = ["the <mask>"]
    found = llama_cpp(tmp_path / "out.gguf", texts=texts)["texts"]
    assert found != [Tokenizer.from_json(text).encode(one).tolist() for one in texts]
