"""GGUF files become stock folders: the same numbers, logits and token ids as transformers' own loader of such files."""

import errno
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import MERGES, TOKENS, model, write
from hypothesis import given, settings
from hypothesis import strategies as st

import rehead
from rehead.attention.rope_scaling import Llama3Scaling
from rehead.checkpoint.gguf import file as gguf_file
from rehead.checkpoint.gguf import import_file, names, tokenizer
from rehead.cli import main
from rehead.conversion.origin import Origin
from rehead.errors import IntegrityError, InvalidInput
from rehead.tokenizer import Tokenizer

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
CASES = {
    "llama": ("llama", {}),
    "llama, tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
}
TEXTS = [
    "the thing in the end",
    "def f(x):\n    return x ** 2  # squared\n\n\tif x:\r\n",
    "Ünïcödé: 你好, 世界; здравствуй 🎉👩‍🚀 é",
    "1234567890 12.5e-3, 0x1F; ½ ⅷ ٣",
    "isn't it? WE'LL   see…   ",
    "<think>the</think><|end|>the",
    "",
]


@pytest.fixture(autouse=True)
def _as_users_have_it():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Llama in F32: the file, and its bytes."""
    path = write(tmp_path_factory.mktemp("plain") / "plain.gguf", model("llama"), "llama")
    return path, path.read_bytes()


def refused(path, folder, *words, kinds=(InvalidInput, IntegrityError)):
    """One clean line that names the file, and nothing left behind."""
    with pytest.raises(kinds) as caught:
        import_file(path, folder)
    message = str(caught.value)
    assert len(message) < 600
    assert message.isprintable()
    for word in (path.name, *words):
        assert word in message
    assert not list(folder.parent.glob("*out*"))


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_sources(name, tmp_path):
    arch, sizes = CASES[name]
    theirs = model(arch, **sizes)
    found = import_file(write(tmp_path / "m.gguf", theirs, arch), tmp_path / "out")
    assert found.architecture == type(theirs).__name__
    ids = torch.randint(2, len(TOKENS), (2, 13))
    wanted = theirs(ids).logits
    torch.testing.assert_close(rehead.load(tmp_path / "out")(ids), wanted, rtol=0, atol=2e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again(ids).logits, wanted, rtol=0, atol=2e-5)
    assert again.config.rms_norm_eps == 1e-5  # and not 9.999999747378752e-06, as the file has it
    assert again.config.eos_token_id == again.generation_config.eos_token_id == 1


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_transformers_reads_in_the_file_is_in_the_folder(kind, tmp_path):
    write(tmp_path / "m.gguf", model("llama"), "llama", kind)
    found = import_file(tmp_path / "m.gguf", tmp_path / "out")
    assert found.types == {kind: 23, "F32": 7}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        assert torch.equal(weight, ours[name]), name


@pytest.mark.parametrize("kind", sorted(name for name, *_ in gguf_file._sizes().values()))
def test_pieces_are_the_whole(kind, tmp_path, monkeypatch):
    """Every type that the package dequantises, in pieces smaller than a row, one and several rows."""
    own = gguf.GGMLQuantizationType[kind]
    block, n_byte = gguf.GGML_QUANT_SIZES[own]
    shape = (5, 3 * block)
    raw = np.random.default_rng(1).integers(0, 60, (5, 3 * n_byte), np.uint8)  # no NaN in anyone's scales
    wanted = gguf.dequantize(raw, own)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert np.isfinite(wanted).all()
    for piece in (1, 2 * block, 4 * block, 2**20):
        monkeypatch.setattr(gguf_file, "PIECE", piece)
        assert np.array_equal(gguf_file.File(tmp_path / "m.gguf").read("x").numpy(), wanted.reshape(shape))


def test_other_dtypes_round(tmp_path):
    path = write(tmp_path / "m.gguf", model("llama"), "llama")
    import_file(path, tmp_path / "whole")
    import_file(path, tmp_path / "half", torch.bfloat16)
    whole, half = rehead.load(tmp_path / "whole"), rehead.load(tmp_path / "half")
    for wide, narrow in zip(whole.parameters(), half.parameters(), strict=True):
        assert torch.equal(wide.bfloat16(), narrow)
    large = {"output_norm.weight": np.full(64, 1e6)}
    path = write(tmp_path / "large.gguf", model("llama"), "llama", more=large)
    with pytest.raises(InvalidInput, match=r"norm\.weight has numbers beyond float16: use bf16 or fp32"):
        import_file(path, tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()


def test_token_ids(tmp_path):
    """Of transformers' loader, but for digits: it does not know that SmolLM cuts every one off before it merges."""
    template = "{{ messages[0]['content'] }}"
    write(tmp_path / "m.gguf", model("llama"), "llama", facts={"tokenizer.chat_template": template})
    assert import_file(tmp_path / "m.gguf", tmp_path / "out").chat_template
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    stock, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
        Tokenizer.load(tmp_path / "out"),
    )
    for text in TEXTS:
        if "1" not in text:
            assert stock(text).input_ids == theirs(text).input_ids, text
        assert stock.decode(stock(text).input_ids) == text
    for text in set(TEXTS) - {TEXTS[5]}:  # in rehead special tokens are plain text
        assert ours.encode(text).tolist() == stock(text).input_ids
    assert [TOKENS[i] for i in ours.encode("a  12")] == [
        "a",
        "ĠĠ",
        "1",
        "2",
    ]  # every digit alone, blanks together
    assert stock.special_tokens_map == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert stock.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize("cut", ["llama-bpe", "qwen2", "gpt-2"])
def test_ways_to_cut(cut, tmp_path):
    """Numbers by threes, one by one, or whole; what follows is transformers' own knowledge of these names."""
    write(tmp_path / "m.gguf", model("llama"), "llama", vocabulary={"pre": cut, "add_bos_token": None})
    import_file(tmp_path / "m.gguf", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        wanted = theirs(text, add_special_tokens=False).input_ids
        assert stock(text, add_special_tokens=False).input_ids == wanted, text
    begins = stock("the").input_ids[0] == stock.bos_token_id
    assert begins == (cut == "llama-bpe")  # as llama.cpp does where the file does not say
    decomposed = Tokenizer.load(tmp_path / "out").encode("e\u0301").tolist()
    assert (decomposed == stock("é", add_special_tokens=False).input_ids) == (cut == "qwen2")


def test_ends_of_texts(tmp_path):
    ends = {"add_bos_token": True, "add_eos_token": True}
    write(tmp_path / "m.gguf", model("llama"), "llama", vocabulary=ends)
    import_file(tmp_path / "m.gguf", tmp_path / "out")
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    the = TOKENS.index("the")
    assert stock("the").input_ids == [0, the, 1]
    assert stock("the", "the").input_ids == [0, the, 1, 0, the, 1]
    assert Tokenizer.load(tmp_path / "out").encode("the").tolist() == [the]


def test_every_end_of_a_text_is_taken_along(tmp_path):
    """As of Llama 3.1 Instruct, whose chats end with another token than its texts."""
    ends = {"eot_token_id": 0, "eom_token_id": 1}
    import_file(write(tmp_path / "m.gguf", model("llama"), "llama", vocabulary=ends), tmp_path / "read")
    assert json.loads((tmp_path / "read" / "config.json").read_text())["eos_token_id"] == [1, 0]
    beyond = write(tmp_path / "n.gguf", model("llama"), "llama", vocabulary={"eot_token_id": 10**6})
    refused(beyond, tmp_path / "no", "eot_token_id=1000000: the vocabulary ends at")


def test_what_others_say_of_a_file_is_passed_over(tmp_path):
    """Who quantises adds keys under a name of his own; llama.cpp reads only those it knows."""
    facts = {
        "mradermacher.quantize_version": "2",
        "mradermacher.quantized_at": "2024-09-07",
        "duynt.note": "x",
    }
    path = write(tmp_path / "m.gguf", model("llama"), "llama", facts=facts)
    import_file(path, tmp_path / "out")
    assert rehead.load(tmp_path / "out").config.n_layer == 3


def test_scaled_angles(tmp_path):
    """Llama 3.1 keeps divisors of its angles in a tensor; others than its own are refused."""
    angles = 5000.0 ** -(torch.arange(0, 16, 2).double() / 16)
    scaling = Llama3Scaling(factor=32.0)
    divisors = (angles / scaling.scale(angles, 5000.0)).numpy()
    assert (divisors[1:-1]).max() > 1
    assert divisors[0] == 1
    path = write(tmp_path / "m.gguf", model("llama"), "llama", more={"rope_freqs.weight": divisors})
    import_file(path, tmp_path / "three")
    assert rehead.load(tmp_path / "three").config.attention[0].rope.scaling == scaling
    fast = 1500.0 ** -(
        torch.arange(0, 16, 2).double() / 16
    )  # no pair turns slowly enough for the whole factor
    divisors = (fast / scaling.scale(fast, 1500.0)).numpy()
    assert 1 < divisors.max() < 32
    facts = {"llama.rope.freq_base": 1500.0}
    path = write(
        tmp_path / "f.gguf", model("llama"), "llama", facts=facts, more={"rope_freqs.weight": divisors}
    )
    import_file(path, tmp_path / "fast")
    assert rehead.load(tmp_path / "fast").config.attention[0].rope.scaling == scaling
    for causal, kept in ((True, True), (False, False)):
        facts = {"llama.attention.causal": causal}
        path = write(tmp_path / f"{causal}.gguf", model("llama"), "llama", facts=facts)
        if kept:
            import_file(path, tmp_path / "causal")
        else:
            refused(path, tmp_path / "out", "llama.attention.causal=False", "models that generate text")
    divisors = (angles / scaling.scale(angles, 5000.0)).numpy()
    path = write(tmp_path / "o.gguf", model("llama"), "llama", more={"rope_freqs.weight": divisors**1.1})
    refused(path, tmp_path / "out", "rope_freqs.weight", "differently from Llama 3.1")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    import_file(write(tmp_path / "l.gguf", model("llama"), "llama", facts=linear), tmp_path / "linear")
    assert rehead.load(tmp_path / "linear").config.attention[0].rope.scaling.factor == 4
    none = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    import_file(write(tmp_path / "n.gguf", model("llama"), "llama", facts=none), tmp_path / "none")
    assert rehead.load(tmp_path / "none").config.attention[0].rope.scaling is None


UNKNOWN = {
    "architecture": ({"general.architecture": "gemma"}, {}, {}, "general.architecture='gemma'"),
    "adapter": ({"general.type": "adapter"}, {}, {}, "general.type='adapter'"),
    "one of several": ({"split.count": 3}, {}, {}, "llama-gguf-split --merge"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, {}, "rope.scaling.type='yarn'"),
    "a key": ({"llama.logit_scale": 0.5}, {}, {}, "llama.logit_scale=0.5: rehead does not know this key"),
    "experts": ({"llama.expert_count": 8}, {}, {}, "llama.expert_count=8"),
    "a window": ({"llama.attention.sliding_window": 16}, {}, {}, "llama.attention.sliding_window=16"),
    "heads per layer": ({"llama.attention.head_count_kv": [1, 2, 2]}, {}, {}, "[1, 2, 2]: expected int"),
    "another key": ({"adapter.lora.alpha": 2.0}, {}, {}, "adapter.lora.alpha"),
    "rotated in part": (
        {"llama.rope.dimension_count": 8},
        {},
        {},
        "dimension_count=8, its heads are 16 wide",
    ),
    "layers": ({"llama.block_count": 4}, {}, {}, "block_count=4, its tensors are those of 3 layers"),
    "many layers": ({"llama.block_count": 2**32 - 1}, {}, {}, "block_count=4294967295"),
    "no heads": ({"llama.attention.head_count": 0}, {}, {}, "n_query_head=0"),
    "wide": ({"llama.feed_forward_length": 2**20}, {}, {}, "ffn_gate.weight has shape [96, 64]"),
    "a vocabulary": ({"llama.vocab_size": 7}, {}, {}, "vocab_size=7, token_embd.weight has"),
    "a missing key": ({"llama.embedding_length": None}, {}, {}, "llama.embedding_length is missing"),
    "eps": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, {}, {}, "norm_eps=nan"),
    "a missing tensor": ({}, {}, {"blk.1.attn_q.weight": None}, "lacks 1 tensors: blk.1.attn_q.weight"),
    "no embedding": ({}, {}, {"token_embd.weight": None}, "lacks token_embd.weight"),
    "an unknown tensor": ({}, {}, {"blk.1.attn_sinks.weight": np.ones(4)}, "blk.1.attn_sinks.weight"),
    "a shape": ({}, {}, {"output_norm.weight": np.ones(63)}, "output_norm.weight has shape [63]"),
    "NaN": ({}, {}, {"output_norm.weight": np.full(64, np.nan)}, "output_norm.weight holds NaN"),
    "sentencepiece": ({}, {"model": "llama"}, {}, "model='llama': rehead reads 'gpt2'"),
    "a cut": ({}, {"pre": "tekken"}, {}, "pre='tekken'"),
    "no cut": ({}, {"pre": None}, {}, "pre='default'"),
    "no tokenizer": ({}, {"model": None}, {}, "model is missing"),
    "few tokens": ({}, {"tokens": TOKENS[:-1]}, {}, f"tokens has {len(TOKENS) - 1}"),
    "a token twice": ({}, {"tokens": [*TOKENS[:-1], "a"]}, {}, "1 duplicates"),
    "tokens that are numbers": ({}, {"tokens": [1] * len(TOKENS)}, {}, "something other than text"),
    "a merge": ({}, {"merges": [*MERGES, "t q"]}, {}, "merges has 't q'"),
    "bos": ({}, {"bos_token_id": 10**6}, {}, "bos_token_id=1000000"),
    "no bos": ({}, {"bos_token_id": None, "add_bos_token": True}, {}, "bos_token_id is missing"),
    "a blank before": ({}, {"add_space_prefix": True}, {}, "add_space_prefix=True"),
    "merges that are a text": ({}, {"merges": "t h"}, {}, "merges='t h': expected list"),
    "a whole number for a bool": ({}, {"add_bos_token": 1}, {}, "add_bos_token=1: expected bool"),
    "a name that the library reads as another": (
        {},
        {"tokens": ["<be:gin>", *TOKENS[1:]], "add_bos_token": True},
        {},
        "The library `tokenizers` does not accept it",
    ),
    "few divisors": ({}, {}, {"rope_freqs.weight": np.ones(5)}, "differently from Llama 3.1"),
    "divisors below 1": ({}, {}, {"rope_freqs.weight": np.full(8, 0.5)}, "differently from Llama 3.1"),
    "scaled twice": (
        {"llama.rope.scaling.factor": 4.0},
        {},
        {"rope_freqs.weight": np.ones(8)},
        "differently from Llama 3.1",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(name, tmp_path):
    facts, vocabulary, more, words = UNKNOWN[name]
    path = write(tmp_path / "m.gguf", model("llama"), "llama", "F32", facts, vocabulary, more)
    refused(path, tmp_path / "out", words, kinds=InvalidInput)


def test_damaged_files(plain, tmp_path):
    """What is cut short or absurd is one line, at once; limits before anything is allocated."""
    data = plain[1]
    bad = tmp_path / "bad.gguf"
    name = data.index(b"blk.0.attn_norm.weight")
    shape = name + 22 + 4

    def put(where, what):
        return data[:where] + what + data[where + len(what) :]

    huge = (2**63).to_bytes(8, "little")
    cases = [
        (b"", "begins with"),
        (put(0, b"GGML"), "begins with b'GGML'"),
        (put(4, b"\x01"), "of version 1"),
        (put(4, b"\0\0\0\x03"), "big-endian"),
        (put(8, huge), "tensors"),
        (put(16, huge), "keys"),
        (put(24, huge), "cut short or is damaged"),
        (put(32, b"\xff"), "not UTF-8"),
        (put(32, b"\n"), "is not a name for a key"),
        (put(name, b"\xff"), "not UTF-8"),
        (put(name, b"/"), "is not a name for a tensor"),
        (data.replace(b"blk.1.attn_norm", b"blk.0.attn_norm"), "appears twice"),
        (put(shape - 4, b"\x09"), "9 axes"),
        (put(shape, huge), "expected numbers from 1"),
        (put(shape, bytes(8)), "expected numbers from 1"),
        (put(shape, b"\x41"), "a hole or an overlap"),
        (put(shape + 8, b"\x63"), "type 99 of ggml"),
        (put(shape + 8, b"\x02"), "hole"),
        (put(shape + 8, b"\x0c"), "has rows of 64: Q4_K has blocks of 256"),
        (put(shape + 12, huge), "a hole or an overlap"),
        (data + bytes(64), "64 bytes follow"),
        (data[:-1], "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS pointer"),
        (b"<!DOCTYPE html>" + bytes(99), "a web page"),
    ]
    cases += [(data[: len(data) * part // 16], "cut short") for part in range(1, 16)]
    for content, words in cases:
        bad.write_bytes(content)
        refused(bad, tmp_path / "out", words)
    refused(tmp_path / "none.gguf", tmp_path / "out", "none.gguf does not exist: give a .gguf file")
    refused(tmp_path, tmp_path / "out", "is a folder: give a .gguf file")


def test_alignment_and_arrays(plain, tmp_path):
    path = write(tmp_path / "m.gguf", model("llama"), "llama", facts={"general.alignment": 48})
    refused(path, tmp_path / "out", "general.alignment=48: expected a power of two")
    data = plain[1]
    bad = tmp_path / "bad.gguf"
    array = data.index(b"tokenizer.ggml.token_type") + 25
    for where, what, words in (
        (array + 8, (2**40).to_bytes(8, "little"), "token_type has 1,099,511,627,776 items"),
        (array + 8, (2**21).to_bytes(8, "little"), "cut short or is damaged"),
        (array + 4, b"\x09", "token_type has a value of type 9"),
        (array + 4, b"\x63", "token_type has a value of type 99"),
    ):
        bad.write_bytes(data[:where] + what + data[where + len(what) :])
        refused(bad, tmp_path / "out", words)
    flag = data.index(b"tokenizer.ggml.add_bos_token") + 28 + 4
    bad.write_bytes(data[:flag] + b"\x02" + data[flag + 1 :])
    refused(bad, tmp_path / "out", "tokenizer.ggml.add_bos_token is a bool of 2: expected 0 or 1")


def test_a_header_is_no_longer_than_its_limit(plain, tmp_path):
    """A name of 64 MiB, in a file that is as long: nothing of it is read."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(plain[1][:24] + (2**26).to_bytes(8, "little"))
    os.truncate(bad, 2**26 + 1000)
    refused(bad, tmp_path / "out", "its header has more than 67,108,864 bytes", kinds=InvalidInput)


def test_a_file_that_is_cut_or_cannot_be_opened(plain, tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(plain[1])
    file = gguf_file.File(path)
    end = file.entries["token_embd.weight"].offset
    os.truncate(path, end + 1)
    with pytest.raises(IntegrityError, match=r"m\.gguf was cut short while it was read"):
        file.read("token_embd.weight")

    def unreadable(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", unreadable)
    with pytest.raises(InvalidInput, match=r"m\.gguf: Permission denied: expected a GGUF file\.$"):
        gguf_file.File(path)


@settings(max_examples=40)
@given(data=st.data())
def test_any_byte_of_a_header_may_be_wrong(plain, tmp_path_factory, data):
    """A file that is changed somewhere is read or refused; nothing else happens."""
    path, good = plain
    end = gguf_file.File(path).entries["token_embd.weight"].offset
    place = tmp_path_factory.mktemp("mutated")
    where = data.draw(st.integers(0, end - 1))
    changed = data.draw(st.binary(min_size=1, max_size=4))
    (place / "m.gguf").write_bytes(good[:where] + changed + good[where + len(changed) :])
    said = ""
    try:
        import_file(place / "m.gguf", place / "out")
    except (InvalidInput, IntegrityError) as error:
        said = str(error)
    assert said.isprintable()
    assert sorted(one.name for one in place.iterdir()) == (["m.gguf"] if said else ["m.gguf", "out"])


def test_as_typed(plain, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["import", str(plain[0]), str(out)]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM in" in said
    assert "in fp32, from tensors of 30 F32" in said
    assert main(["import", str(plain[0]), str(out)]) == 3  # it exists
    assert "exists: choose another name" in capsys.readouterr().err
    assert main(["import", str(tmp_path), str(tmp_path / "other")]) == 3
    assert main(["import", str(plain[0]), str(tmp_path / "b"), "--dtype", "bf16", "--json"]) == 0
    assert '"types": {"F32": 30}' in capsys.readouterr().out
    assert main(["eval", str(out), "--data", __file__, "--json"]) == 0
    assert main(["generate", str(out), "--prompt", "the", "--max-new-tokens", "3"]) == 0


def test_without_the_package(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["import", str(plain[0]), str(tmp_path / "out")]) == 2
    assert 'pip install "rehead[gguf]"' in capsys.readouterr().err


def test_the_page_names_what_is_read():
    page = (Path(__file__).parents[2] / "docs" / "gguf.md").read_text()
    assert ", ".join(f"`{name}`" for name in names.ARCHITECTURES) in page
    for name in tokenizer.CUTS:
        assert f"`{name}`" in page


@pytest.mark.parametrize("how", ["in place", "another file"])
def test_a_file_that_changes_while_it_is_read_is_refused(how, plain, tmp_path):
    """A second download of the same size, for example."""
    path = tmp_path / "a.gguf"
    path.write_bytes(plain[1])
    opened = gguf_file.File(path)
    name = "blk.1.attn_q.weight"
    before = opened.read(name)
    if how == "in place":
        with path.open("r+b") as file:
            file.seek(-len(plain[1]) // 2, os.SEEK_END)
            file.write(bytes(len(plain[1]) // 2))
        with pytest.raises(IntegrityError, match=r"a\.gguf changed while it was read"):
            opened.read(name)
    else:
        (tmp_path / "b").write_bytes(bytes(len(plain[1])))
        (tmp_path / "b").rename(path)
        assert torch.equal(opened.read(name), before)  # it has the first one open


@pytest.mark.parametrize(("kind", "code"), [(7, "?"), (1, "b")])
def test_long_arrays_take_neither_minutes_nor_gigabytes(kind, code, plain, tmp_path, monkeypatch):
    """The limit is for all of them together; bools are read at once."""
    begin, whole = 24, plain[1]
    n_key = int.from_bytes(whole[16:24], "little")

    def with_arrays(length, count, item=1):
        keys = b""
        for index in range(count):
            name = f"x.{index}".encode()
            keys += (
                len(name).to_bytes(8, "little")
                + name
                + (9).to_bytes(4, "little")
                + kind.to_bytes(4, "little")
            )
            keys += length.to_bytes(8, "little") + bytes([item]) * length
        (tmp_path / "a.gguf").write_bytes(
            whole[:16] + (n_key + count).to_bytes(8, "little") + keys + whole[begin:]
        )
        return tmp_path / "a.gguf"

    scalars = []
    monkeypatch.setattr(gguf_file._Header, "_scalar", lambda *given: scalars.append(given))
    refused(
        with_arrays(3 * 2**20, 2),
        tmp_path / "out",
        "x.1 has 3,145,728 items: all arrays of a file have 4,194,304 together at most",
    )
    assert not scalars
    with (path := with_arrays(5, 2)).open("rb") as file:
        header = gguf_file._Header(path, file)
        header._begin()
        assert header._count("tensors", 10**6)
        header._count("keys", 10**6)
        key = header._name("key", gguf_file.KEY, {})
        assert (key, header._value(key)) == ("x.0", [True] * 5 if code == "?" else [1] * 5)
    if code == "?":
        refused(with_arrays(5, 1, item=2), tmp_path / "out", "x.0 has a bool of 2: expected 0 or 1")


@pytest.mark.parametrize(
    ("facts", "licence", "bases"),
    [
        ({"general.license": "apache-2.0"}, "apache-2.0", ()),
        (
            {"general.license": "other", "general.license.name": "gemma", "general.license.link": "https://x.y/z",
             "general.base_model.0.repo_url": "https://huggingface.co/org/base",
             "general.base_model.1.repo_url": "https://huggingface.co/org/two"},
            "other", ("org/base", "org/two"),
        ),
        (
            {"general.source.repo_url": "https://huggingface.co/org/own/",
             "general.base_model.0.repo_url": "https://huggingface.co/org/base"},
            "", ("org/own",),
        ),
        ({"general.license": 7, "general.repo_url": "ftp://x"}, "", ()),
    ],
)  # fmt: skip
def test_licence_and_origin_go_along(facts, licence, bases, tmp_path):
    """A conversion and an export of the imported model name them in their cards."""
    import_file(write(tmp_path / "m.gguf", model("llama"), "llama", facts=facts), tmp_path / "out")
    found = Origin.read(tmp_path / "out", tmp_path / "out")
    assert (found.licence, found.bases) == (licence, bases)
    assert (tmp_path / "out" / "README.md").exists() == bool(licence or bases)
    if licence == "other":
        assert dict(found.named) == {"license_name": "gemma", "license_link": "https://x.y/z"}
