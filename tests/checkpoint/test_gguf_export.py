"""`rehead export --format gguf`, read by the package gguf, transformers' own loader, and `rehead import`.

llama.cpp itself reads such files in tests/serving.
"""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import gguf
import gguf_models
import numpy as np
import pytest
import tokenizers as hf
import torch
import transformers
import yaml
from gguf_models import GQA, LETTERS, MODELS, MQA
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import rehead
from rehead.checkpoint import own
from rehead.checkpoint.files import publish
from rehead.checkpoint.gguf import tokenizer, writing
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.conversion.export import gguf as export_gguf
from rehead.model import build
from rehead.tokenizer import train

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
IDS = torch.arange(60).view(2, 30) * 7 % len(LETTERS)
TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
FILES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


@pytest.fixture(autouse=True)
def _as_users_have_it(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def export(*flags, source="model", file="out.gguf"):
    assert main(["export", str(source), str(file), "--format", "gguf", *flags]) == 0
    return gguf.GGUFReader(file)


def refused(capsys, *words, flags=(), status=(2, 3)):
    """In one line that says so, and without a file."""
    before = sorted(os.listdir())
    assert main(["export", "model", "out.gguf", "--format", "gguf", *flags]) in status
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert sorted(os.listdir()) == before


def test_a_destination_that_ends_in_gguf_is_a_file(capsys):
    """Without --format, too; a folder of that name is refused, and so is an upload."""
    gguf_models.write(Path("model"), *MODELS["llama, gqa"])
    assert main(["export", "model", "out.gguf"]) == 0
    assert len(gguf.GGUFReader("out.gguf").tensors)
    assert main(["export", "model", "other.gguf", "--format", "llama"]) == 2
    assert "--format llama writes a folder" in capsys.readouterr().err
    assert main(["export", "model", "other.gguf", "--push", "me/model"]) == 2
    assert "has no card" in capsys.readouterr().err
    assert not Path("other.gguf").exists()


def value(reader, key):
    return reader.fields[key].contents()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["llama, gqa", "gpt2", "deepseek"])
def test_every_tensor_once_in_the_type_asked_for(name, dtype):
    """The names, shapes and numbers are those of llama.cpp's own conversion, done by hand here."""
    theirs = gguf_models.write(Path("model"), *MODELS[name])
    reader = export("--dtype", dtype)
    wanted = by_hand(name, theirs)
    assert sorted(tensor.name for tensor in reader.tensors) == sorted(wanted)
    for tensor in reader.tensors:
        exact = wanted[tensor.name]
        kind = TYPES[dtype]
        if exact.ndim < 2 or tensor.name == "position_embd.weight":
            kind = "F32"
        elif dtype == "q8_0" and exact.shape[-1] % 32:
            kind = "F16"
        assert tensor.tensor_type.name == kind, tensor.name
        stored = gguf.quants.quantize(
            np.ascontiguousarray(exact, np.float32), gguf.GGMLQuantizationType[kind]
        )
        assert np.array_equal(tensor.data.reshape(-1).view(np.uint8), stored.reshape(-1).view(np.uint8)), (
            tensor.name
        )
    assert value(reader, "general.file_type") == gguf.LlamaFileType[FILES[dtype]]


def by_hand(name, theirs):
    """The tensors of a model as llama.cpp's converter lays them out, in float32."""
    config, found = theirs.config, {}
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    }  # fmt: skip
    for key, weight in theirs.state_dict().items():
        numbers, (module, _, end) = weight.numpy(), key.rpartition(".")
        prefix = ""
        if module.startswith(("model.layers.", "transformer.h.")):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        if ".c_" in key and end == "weight":
            numbers = numbers.T
        if name.startswith("llama") and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            rest = numbers.shape[1:]
            numbers = numbers.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(numbers.shape)
        if module == "self_attn.kv_b_proj":
            whole = numbers.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            found[f"{prefix}attn_k_b.weight"] = whole[:, : config.qk_nope_head_dim].swapaxes(1, 2)
            found[f"{prefix}attn_v_b.weight"] = whole[:, config.qk_nope_head_dim :]
        else:
            found[f"{prefix}{parts[module]}.{end}"] = numbers
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama, gqa", "llama, mqa, tied", "qwen2", "qwen3, wide heads", "gpt2"])
def test_transformers_own_loader(name):
    """Of what it reads: it knows no biases of Llama, scaled rope, DeepSeek, nor some sizes other than defaults."""
    kind, fields = MODELS[name]
    defaults = {"gpt2": {"n_inner": None, "n_positions": 1024}, "qwen3, wide heads": {"head_dim": 128}}
    theirs = gguf_models.write(Path("model"), kind, fields | defaults.get(name, {}))
    export()
    read = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="out.gguf", dtype=torch.float32)
    assert type(read) is type(theirs)
    torch.testing.assert_close(read(IDS).logits, theirs(IDS).logits, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["llama, mqa, tied", "llama, biases", "llama, linear", "llama, llama3", "qwen2", "qwen3, wide heads"],
)
def test_import_gives_the_source_back(name):
    """Every bit, and the tokenizer."""
    fields = dict(MODELS[name][1])
    if name == "llama, llama3":  # a file does not have the original length: import takes that of Llama 3.1
        fields["rope_parameters"] = fields["rope_parameters"] | {"original_max_position_embeddings": 8192}
        fields["head_dim"], fields["rope_parameters"]["rope_theta"] = 64, 500_000.0
    text = published()
    fields["vocab_size"] = hf.Tokenizer.from_str(text).get_vocab_size()
    theirs = gguf_models.write(Path("model"), MODELS[name][0], fields, text)
    export()
    assert main(["import", "out.gguf", "again"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained("again")
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert torch.equal(again(IDS).logits, theirs(IDS).logits)
    for text in ("the thing in 12", "<|end|>é\n\n"):
        assert np.array_equal(
            rehead.load_tokenizer("again").encode(text), rehead.load_tokenizer("model").encode(text)
        )


def published():
    """A tokenizer.json with GPT-2's cut, merges, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("1", "2")]
    tokens = ["<|end|>", *alphabet, *map("".join, merges)]
    inner = hf.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return inner.to_str()


def test_a_tokenizer_without_merges_is_refused(capsys):
    """llama.cpp does not load such a file, and its writer leaves the empty list out."""
    table = json.loads(published())
    table["model"]["merges"] = []
    table["model"]["vocab"] = {token: i for token, i in table["model"]["vocab"].items() if i < 257}
    gguf_models.write(Path("model"), "Llama", GQA | {"vocab_size": 257}, json.dumps(table))
    refused(capsys, "BPE without merges", "llama.cpp would not load it")


def test_the_facts_of_a_file():
    gguf_models.write(
        Path("model"),
        "Llama",
        GQA | {"vocab_size": 270, "eos_token_id": [0, 7], "bos_token_id": 3},
        published(),
    )
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    Path("model/README.md").write_text("---\nlicense: apache-2.0\nbase_model:\n- org/base\n---\n# A model\n")
    reader = export()
    facts = {key: value(reader, key) for key in reader.fields if not key.startswith("GGUF.")}
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    assert (tokens[0], types[0], tokens[260:]) == (
        "<|end|>",
        3,
        ["12", *(f"[PAD{i}]" for i in range(261, 270))],
    )
    assert types[1:] == [1] * 260 + [5] * 9
    assert facts["tokenizer.ggml.merges"] == ["t h", "th e", "i n", "1 2"]
    assert (
        facts
        | {
            "general.architecture": "llama",
            "general.type": "model",
            "general.name": "out",
            "general.license": "apache-2.0",
            "general.base_model.count": 1,
            "general.base_model.0.name": "org/base",
            "general.base_model.0.repo_url": "https://huggingface.co/org/base",
            "llama.context_length": 256,
            "llama.embedding_length": 64,
            "llama.block_count": 3,
            "llama.feed_forward_length": 96,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 16,
            "llama.rope.dimension_count": 16,
            "llama.rope.freq_base": 10_000.0,
            "llama.vocab_size": 270,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.bos_token_id": 3,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.eot_token_id": 7,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": "{{ messages }}",
        }
        == facts
    )


SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.05}
SAMPLES = {"do_sample": True, "temperature": 1.0}
THEIRS = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")


@pytest.mark.parametrize(
    ("said", "told", "again"),
    [
        ({"do_sample": True, **SAMPLING}, dict(zip(THEIRS, SAMPLING.values(), strict=True)), None),
        ({"do_sample": True}, {"temp": 1.0}, SAMPLES),
        ({"do_sample": False, "temperature": 0.6}, {"temp": 0.0}, {"do_sample": False}),
        ({"temperature": 0.7, "typical_p": 0.9}, {"temp": 0.7}, {"do_sample": True, "temperature": 0.7}),
        ({"do_sample": True, "temperature": 1e300, "top_k": 2**40, "top_p": 7.0}, {}, SAMPLES),
    ],
    ids=["all", "default", "greedy", "no word", "no such numbers"],
)
def test_how_to_sample_goes_along_in_both_directions(said, told, again):
    """As llama.cpp's converter writes it, and llama.cpp takes it for its defaults."""
    gguf_models.write(Path("model"), "Llama", GQA | {"vocab_size": 270, "eos_token_id": [0, 7]}, published())
    Path("model/generation_config.json").write_text(json.dumps(said | {"eos_token_id": [0, 7]}))
    reader = export()
    facts = {key.removeprefix("general.sampling."): key for key in reader.fields if ".sampling." in key}
    assert {name: value(reader, key) for name, key in facts.items()} == pytest.approx(told)
    if "top_k" in told:
        assert reader.fields["general.sampling.top_k"].types == [gguf.GGUFValueType.INT32]
    assert main(["import", "out.gguf", "again"]) == 0
    found = json.loads(Path("again/generation_config.json").read_text())
    assert {key: one for key, one in found.items() if not key.endswith("_token_id")} == (again or said)
    assert found["eos_token_id"] == [0, 7]
    transformers.GenerationConfig.from_pretrained("again")


def test_the_end_that_the_tokenizer_names_comes_first():
    """As in Llama 3's instruct models: the model ends on several tokens, a chat on one that is not the first."""
    gguf_models.write(Path("model"), "Llama", GQA | {"vocab_size": 270, "eos_token_id": [7, 0]}, published())
    turn = rehead.load_tokenizer("model").token(0)
    Path("model/tokenizer_config.json").write_text(json.dumps({"eos_token": turn}))
    reader = export()
    assert (
        value(reader, "tokenizer.ggml.eos_token_id")
        == gguf.SpecialVocab("model").special_token_ids["eos"]
        == 0
    )
    assert main(["import", "out.gguf", "again"]) == 0
    assert json.loads(Path("again/tokenizer_config.json").read_text())["eos_token"] == turn
    assert json.loads(Path("again/config.json").read_text())["eos_token_id"] == [0, 7]


def test_ids_that_no_token_has_are_left_out():
    """llama.cpp would take token 11 for them."""
    fields = {"vocab_size": 261, "eos_token_id": 50_256, "bos_token_id": 50_256, "pad_token_id": None}
    gguf_models.write(Path("model"), "Llama", GQA | fields, published())
    reader = export()
    never = value(reader, "tokenizer.ggml.tokens").index("ÿ")
    assert (
        value(reader, "tokenizer.ggml.eos_token_id") == value(reader, "tokenizer.ggml.bos_token_id") == never
    )
    assert "tokenizer.ggml.padding_token_id" not in reader.fields


def test_a_card_that_cannot_be_read_says_nothing():
    gguf_models.write(Path("model"), "Llama", GQA)
    for card in ("---\n- [\n---\n", "---\nlicense: 3\nbase_model: [1]\n---\n", "\xff", "---\nlicense: mit\n"):
        Path("model/README.md").write_bytes(card.encode("latin-1"))
        reader = export()
        assert not {key for key in reader.fields if key.startswith(("general.license", "general.base_model"))}
        Path("out.gguf").unlink()


def test_mqa_as_mla_carries_its_certificate():
    """In float16 nothing is lost; a folder whose latents are too small for that keeps those in F32."""
    gguf_models.write(Path("model"), "Llama", MQA)
    assert main(["export", "model", "mla", "--format", "deepseek_v3", "--for", "llama.cpp"]) == 0
    reader = export("--dtype", "fp16", source="mla")
    assert value(reader, "general.architecture") == "deepseek2"
    assert value(reader, "deepseek2.attention.q_lora_rank") == 0
    assert value(reader, "deepseek2.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert json.loads(value(reader, "rehead.certificate"))["format"] == "rehead-certificate-1"
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_kv_a_mqa.weight"] == kinds["blk.2.attn_k_b.weight"] == "F16"
    assert kinds["blk.0.attn_kv_a_norm.weight"] == "F32"


def test_rows_that_a_type_loses_stay_exact(capsys):
    theirs = gguf_models.write(Path("model"), *MODELS["deepseek"])
    theirs.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.data[:32] *= 2.0**-40
    theirs.save_pretrained("model")
    for dtype in ("fp16", "q8_0"):
        reader = export("--dtype", dtype, file=f"{dtype}.gguf")
        kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert {kind for name, kind in kinds.items() if "attn_kv_a_mqa" in name} == {"F32"}
        assert kinds["blk.1.attn_q.weight"] != "F32"
        assert "kv_a_proj_with_mqa.weight stay F32" in capsys.readouterr().err


def test_a_model_without_rope_goes_out_as_mla():
    config = ModelOptions(shape="llama", n_layer=1, n_query_head=2, n_embd=32, rope=False).resolve(256, 16)
    model = build(replace(config, learned_positions=False))
    own.save(model, Path("model"), files={"tokenizer.json": train("byte", "").to_json()})
    reader = export()
    assert value(reader, "general.architecture") == "deepseek2"
    assert value(reader, "tokenizer.ggml.model") == "rwkv"
    made = json.loads(value(reader, "rehead.certificate"))
    assert (made["format"], made["earlier"]) == ("rehead-certificate-1", [])
    assert main(["convert", "model", "mqa", "--to", "mqa", "--allow-loss"]) == 0
    made = json.loads(value(export(source="mqa", file="mqa.gguf"), "rehead.certificate"))
    assert made["exact"]
    assert [one["exact"] for one in made["earlier"]] == [False]


@pytest.mark.parametrize(("dtype", "stored"), [(None, "F16"), ("bf16", "BF16"), ("fp32", "F32")])
def test_a_float16_model_goes_out_as_mla(dtype, stored):
    """The identity norm is made in float32, in which a file may have it."""
    config = ModelOptions(shape="llama", n_layer=1, n_query_head=2, n_embd=32, rope=False).resolve(256, 16)
    model = build(replace(config, learned_positions=False)).half()
    own.save(model, Path("model"), files={"tokenizer.json": train("byte", "").to_json()})
    own.save(model.float(), Path("wide"), files={"tokenizer.json": train("byte", "").to_json()})
    reader = export(*(["--dtype", dtype] if dtype else []))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == stored
    assert kinds["blk.0.attn_kv_a_norm.weight"] == "F32"
    wide = export("--dtype", dtype or "fp16", source="wide", file="wide.gguf")
    for one, other in zip(reader.tensors, wide.tensors, strict=True):
        assert one.name == other.name
        assert np.array_equal(one.data, other.data), one.name


def test_what_config_and_tokenizer_refuse_is_refused_before_the_weights_are_read(capsys, monkeypatch):
    monkeypatch.setattr(export_gguf, "open_model", lambda *given, **named: pytest.fail("read"))
    gguf_models.write(Path("model"), *REFUSED["window"])
    refused(capsys, "window", status=(2,))
    gguf_models.write(Path("model"), "Llama", GQA | {"vocab_size": 300}, wordpiece().to_str())
    refused(capsys, "the tokenizer has a WordPiece model")


def test_a_licence_with_a_name_of_its_own_comes_back():
    fields = GQA | {"vocab_size": 270, "eos_token_id": 0}
    gguf_models.write(Path("model"), "Llama", fields, published())
    licence = {
        "license": "other",
        "license_name": "qwen-research",
        "license_link": "https://example.org/LICENSE",
    }
    Path("model/README.md").write_text(f"---\n{yaml.safe_dump(licence)}---\n")
    reader = export()
    keys = {"license": "license", "license_name": "license.name", "license_link": "license.link"}
    assert {key: value(reader, f"general.{name}") for key, name in keys.items()} == licence
    assert main(["import", "out.gguf", "again"]) == 0
    card = yaml.safe_load(Path("again/README.md").read_text().split("---")[1])
    assert card == card | licence


def test_json_says_what_was_written(capsys):
    gguf_models.write(Path("model"), "Llama", GQA)
    export("--json", "--dtype", "bf16")
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "architecture": "LlamaForCausalLM",
        "file": "out.gguf",
        "types": {"BF16": 23, "F32": 7},
        "relative_error": None,
    }


REFUSED = {
    "window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "scaled rope (YarnScaling)": ("Qwen3", gguf_models.rope("yarn", beta_fast=16.0)),
    "qkv_bias, o_bias": ("Qwen3", {"attention_bias": True}),
    "exact gelu": ("GPT2", gguf_models.GPT2 | {"activation_function": "gelu"}),
    "rope_layout=half-split": ("DeepseekV3", gguf_models.MLA | {"rope_interleave": False}),
    "no format can represent this model as it is. window=9": ("Mistral", {"sliding_window": 9}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused(why, capsys):
    gguf_models.write(Path("model"), *REFUSED[why])
    refused(capsys, why, status=(2,))


def wordpiece():
    return hf.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


def other_cut():
    inner = hf.Tokenizer.from_str(published())
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), inner.pre_tokenizer])
    return inner


def space_first():
    inner = hf.Tokenizer.from_str(published())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return inner


def normalized():
    inner = hf.Tokenizer.from_str(published())
    inner.normalizer = normalizers.NFKC()
    return inner


def merging_whole_words():
    """Llama 3's tokenizer without its `ignore_merges`, as some publish it."""
    inner = hf.Tokenizer.from_str(published())
    tokenizer.CUTS["llama-bpe"](inner)
    table = json.loads(inner.to_str())
    table["model"]["ignore_merges"] = False
    return hf.Tokenizer.from_str(json.dumps(table))


def sentencepiece():
    inner = hf.Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Prepend("▁")
    return inner


def suffixed():
    inner = hf.Tokenizer(models.BPE({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return inner


def no_end():
    inner = hf.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return inner


def taking_spaces():
    inner = hf.Tokenizer.from_str(published())
    inner.add_tokens([hf.AddedToken("<mask>", lstrip=True)])
    return inner


def two_before():
    return around("<|end|> <|end|> $A")


def two_after():
    return around("$A <|end|> <|end|>")


def around(template):
    inner = hf.Tokenizer.from_str(published())
    inner.post_processor = processors.TemplateProcessing(template, special_tokens=[("<|end|>", 0)])
    return inner


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (wordpiece, "a WordPiece model"),
        (other_cut, "a pre-tokenizer other than those of gpt-2, smollm, llama-bpe, qwen2"),
        (space_first, "a pre-tokenizer other than those of"),
        (normalized, "the pre-tokenizer of gpt-2, but normalizer=NFKC and ignore_merges=False"),
        (merging_whole_words, "the pre-tokenizer of llama-bpe, but normalizer=None and ignore_merges=False"),
        (
            sentencepiece,
            "SentencePiece's BPE (byte_fallback): rehead writes only byte-level BPE for llama.cpp",
        ),
        (suffixed, "BPE with end_of_word_suffix"),
        (taking_spaces, "tokens that take the spaces beside them, such as '<mask>'"),
        (two_before, "2 tokens around every text"),
        (two_after, "2 tokens around every text"),
        (no_end, "no token that ends a text: llama.cpp would end it at token 11"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(made, why, capsys):
    gguf_models.write(
        Path("model"), "Llama", GQA | {"vocab_size": 300, "eos_token_id": None}, made().to_str()
    )
    refused(capsys, f"the tokenizer has {why}", "data.tokenizer=bpe")


def test_letters_beyond_ascii_are_refused(capsys):
    gguf_models.write(Path("model"), "Llama", GQA, train("char", "aéz").to_json())
    refused(capsys, "characters beyond ASCII, such as 'é'")


def test_a_normalizer_is_left_out_with_a_warning(capsys):
    inner = hf.Tokenizer.from_str(published())
    tokenizer.CUTS["qwen2"](inner)
    gguf_models.write(Path("model"), "Llama", GQA | {"vocab_size": 261, "eos_token_id": 0}, inner.to_str())
    assert value(export(), "tokenizer.ggml.pre") == "qwen2"
    assert "does not normalize a text before reading it (NFC)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_scaled_angles_of_llama_are_divisors_and_a_factor(kind):
    """Those of transformers' own table, which llama.cpp divides its angles by."""
    theirs = gguf_models.write(Path("model"), *MODELS[f"llama, {kind}"])
    angles = theirs.model.rotary_emb.inv_freq.double()
    plain = 10_000.0 ** -(torch.arange(0, 16, 2).double() / 16)
    reader = export()
    divisors = next(tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    torch.testing.assert_close(torch.tensor(divisors), (plain / angles).float(), rtol=1e-5, atol=0)
    factor = value(reader, "llama.rope.scaling.attn_factor")
    assert factor == pytest.approx(theirs.model.rotary_emb.attention_scaling)
    assert factor == pytest.approx(1.1 if kind == "longrope" else 1 + 0.1 * math.log(4.0))
    assert "llama.rope.scaling.type" not in reader.fields


def test_yarn_of_qwen_is_llama_cpps_own():
    """llama.cpp multiplies 1 + 0.1 ln(factor) itself."""
    for name, factor in (("qwen2, yarn", 1.0), ("qwen3, yarn", 1.2 / (1 + 0.1 * math.log(4.0)))):
        kind, fields = MODELS[name]
        gguf_models.write(Path(name), kind, fields)
        reader = export(source=name, file=f"{name}.gguf")
        arch = value(reader, "general.architecture")
        assert value(reader, f"{arch}.rope.scaling.type") == "yarn"
        assert value(reader, f"{arch}.rope.scaling.factor") == 4.0
        assert value(reader, f"{arch}.rope.scaling.original_context_length") == 32
        assert value(reader, f"{arch}.rope.scaling.attn_factor") == pytest.approx(factor)
        assert "rope_freqs.weight" not in {tensor.name for tensor in reader.tensors}


def test_four_ends_and_no_tokenizer_are_refused(capsys):
    gguf_models.write(
        Path("model"), "Llama", GQA | {"vocab_size": 270, "eos_token_id": [0, 7, 8, 9]}, published()
    )
    refused(capsys, "4 tokens that end a text")
    Path("model/tokenizer.json").unlink()
    refused(capsys, "tokenizer.json")


def test_commands_that_make_no_sense(capsys):
    gguf_models.write(Path("model"), "Llama", GQA)
    refused(capsys, "--for vllm with --format gguf", flags=["--for", "vllm"])
    assert main(["export", "model", "out", "--format", "gguf"]) == 2
    assert "Give a name that ends in .gguf" in capsys.readouterr().err
    assert main(["export", "model", "out", "--dtype", "fp16"]) == 2
    assert "--dtype fp16: a folder is written in bf16 or fp32" in capsys.readouterr().err
    assert main(["export", "model", "model/out.gguf", "--format", "gguf"]) == 2
    Path("out.gguf").mkdir()
    refused(capsys, "out.gguf exists: choose another name", status=(3,))
    Path("out.gguf").rmdir()
    Path("out.gguf").write_text("mine")
    refused(capsys, "out.gguf exists: choose another name", status=(3,))
    assert Path("out.gguf").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "dtype", "said"),
    [(70_000, "fp16", "F16: use --dtype bf16 or fp32"), (3.4e38, "bf16", "BF16: use --dtype fp32")],
)
def test_numbers_beyond_a_type_are_refused(number, dtype, said, capsys):
    theirs = gguf_models.write(Path("model"), "Llama", GQA)
    theirs.lm_head.weight.data[5, 3] = number
    theirs.save_pretrained("model")
    refused(capsys, f"output.weight has numbers beyond {said}", flags=["--dtype", dtype], status=(7,))
    export("--dtype", {"fp16": "bf16", "bf16": "fp32"}[dtype])


def test_a_full_disk_leaves_nothing(capsys, monkeypatch):
    gguf_models.write(Path("model"), "Llama", GQA)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "sync", full)
    refused(capsys, "cannot write out.gguf: No space left on device", status=(5,))


def test_what_changes_in_the_meantime(capsys, monkeypatch):
    """The source, which makes the file none of one model; a file of the same name, which is somebody's."""
    gguf_models.write(Path("model"), "Llama", GQA)
    write_file = export_gguf.write_file

    def while_another_writes(what):
        def write(*args):
            write_file(*args)
            what()

        monkeypatch.setattr(export_gguf, "write_file", write)

    def another_model():
        with open("model/model.safetensors", "r+b") as file:
            file.seek(-4, 2)
            file.write(b"1234")

    while_another_writes(another_model)
    refused(capsys, "model.safetensors", status=(4,))
    while_another_writes(lambda: Path("out.gguf").write_text("mine"))
    assert main(["export", "model", "out.gguf", "--format", "gguf"]) == 3
    assert Path("out.gguf").read_text() == "mine"


def test_without_the_package(capsys, monkeypatch):
    gguf_models.write(Path("model"), "Llama", GQA)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(capsys, 'pip install "rehead[gguf]"', status=(2,))


def test_the_file_is_written_tensor_by_tensor(monkeypatch):
    """No two tensors are read before the first is written."""
    gguf_models.write(Path("model"), "Llama", GQA)
    events = []
    read, write = writing.materialise, gguf.GGUFWriter.write_tensor_data
    monkeypatch.setattr(writing, "materialise", lambda weight: events.append("read") or read(weight))
    monkeypatch.setattr(
        gguf.GGUFWriter, "write_tensor_data", lambda *args: events.append("write") or write(*args)
    )
    export()
    assert events == ["read", "write"] * 30
