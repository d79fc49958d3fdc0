"""Folders nobody should trust, C01 to C35: how each is made of a good one, and what reading it must give.

A case damages a copy of a good folder. `part` is what it damages (config, weights, tokenizer or the
manifest), for the commands that do not read it; `codes` are the exit statuses that are right.
"""

import base64
import functools
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import families_corpus as kinds
import torch
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint import families
from rehead.checkpoint.files.shards import LARGEST_HEADER
from rehead.checkpoint.huggingface import stock
from rehead.config import ModelOptions
from rehead.model import build
from rehead.tokenizer import train

REFUSED = (3, 4)
TEXT = "abcdefghij "  # 11 symbols
LLAMA = ModelOptions(shape="llama", n_layer=1, n_query_head=4, n_kv_head=2, n_embd=24, n_hidden=40)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
LATENT = {
    "kv_lora_rank": 6,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
EMPTY = {"bytes": 0, "sha256": "0" * 64}
CANARY = "ran"
"""A file that code in a folder would make beside it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    damage: Callable[[Path], object]
    part: str = "weights"
    codes: tuple[int, ...] = REFUSED
    base: Callable[[Path], None] | None = None  # makes the good folder: a stock Llama


def stock_folder(folder):
    """A stock Llama of 11 symbols, with a tokenizer."""
    torch.manual_seed(0)
    model = build(LLAMA.resolve(11, 16)).float()
    state = {f"model.{k}" if "head" not in k else "lm_head.weight": v for k, v in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(train("char", TEXT).to_json())


def native_folder(folder):
    """The same model as rehead writes it, with a manifest."""
    torch.manual_seed(0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = train("char", TEXT).to_json()
    rehead.save(build(LLAMA.resolve(11, 16)).float(), folder, files={"tokenizer.json": tokenizer})


@functools.cache
def folder_of(kind):
    """Makes a good folder of a family, with a tokenizer."""

    def make(folder):
        torch.manual_seed(0)
        folder.mkdir(parents=True, exist_ok=True)
        model = build(stock.read_config(kinds.config(kind), kind)).float()
        stock.write(model, folder, families[kind], {"tokenizer.json": train("char", TEXT).to_json()})

    return make


def sharded_folder(folder):
    """The stock Llama in two files with an index."""
    stock_folder(folder)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    places = {name: f"model-{1 + (i > 4):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: whole[name] for name in names if places[name] == file}, folder / file)
    total = sum(weight.nbytes for weight in whole.values())
    table = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


def file_of(header, data=b"", length=None):
    """A safetensors file with this header, as it stands."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes):
    return {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


def two(first, second):
    return {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": first},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": second},
    }


GOOD = file_of(one(), bytes(24))
MANY = b'{"t0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' + b',"t":{"dtype":"F32","shape":[0]}' * 10**6
TWICE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
FILES = {
    "C01 empty": b"",
    "C01 short": b"\x01\x02\x03",
    "C02 last byte cut": GOOD[:-1],
    **{f"C02 cut at {i} of 16": GOOD[: len(GOOD) * i // 16] for i in range(1, 16)},
    "C03 trailing bytes": GOOD + b"\x00",
    "C03 a zip behind": GOOD + b"PK\x03\x04" + bytes(30),
    **{
        f"C04 length {length}": file_of(one(), bytes(24), length)
        for length in (0, 2**31, 2**63 - 1, 2**64 - 1, 10_000, LARGEST_HEADER + 1)
    },
    "C05 a million empty tensors": file_of(MANY + b"}"),
    "C06 a tensor twice": file_of(b"{" + TWICE + b"," + TWICE + b"}", bytes(4)),
    "C06 a tensor twice, apart": file_of(
        b"{" + TWICE + b"," + TWICE.replace(b"[0,4]", b"[4,8]") + b"}", bytes(8)
    ),
    "C07 overlap": file_of(two([0, 8], [4, 12]), bytes(12)),
    "C07 hole": file_of(two([0, 8], [12, 20]), bytes(20)),
    "C07 beyond": file_of(two([0, 8], [8, 16]), bytes(12)),
    "C07 reversed": file_of(one(data_offsets=[24, 0]), bytes(24)),
    "C08 shape": file_of(one(shape=[2, 4]), bytes(24)),
    **{
        f"C08 {shape}": file_of(one(shape=shape), bytes(24))
        for shape in ([-2, -3], [2.0, 3], [True, 6], [2**63, 3], ["2", 3], 6, None, [[2], 3])
    },
    "C08 100,000 axes": file_of(one(shape=[1] * 100_000), bytes(24)),
    "C08 9 axes": file_of(one(shape=[2, 3] + [1] * 7), bytes(24)),
    "C08 1e400": file_of(json.dumps(one()).replace("[2, 3]", "[1e400, 3]").encode(), bytes(24)),
    "C08 5000 digits": file_of(json.dumps(one()).replace("[2, 3]", f"[{'9' * 5000}, 3]").encode(), bytes(24)),
    **{
        f"C09 {dtype}": file_of(one(dtype=dtype), bytes(24))
        for dtype in ("U8", "F4", "F8_E4M3", "X", 1, None, [], {}, [[]])
    },
    **{
        f"C11 {name[:9]!r}": file_of({name: one()["a"]}, bytes(24))
        for name in ("../x", "/etc/x", "a\0b", "a\nb", "\u202ea", "", "x" * 10**6, "\ud800")
    },
    "C12 metadata": file_of({"__metadata__": {"a": 1}, **one()}, bytes(24)),
    "C12 no table": file_of({"__metadata__": [], **one()}, bytes(24)),
    "C12 twice": file_of(b'{"__metadata__":{},"__metadata__":{},' + TWICE + b"}", bytes(4)),
    "C12 17 MB": file_of({"__metadata__": {"a": "x" * (17 << 20)}, **one()}, bytes(24)),
    "C25 LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    "C25 HTML": b"<!DOCTYPE html><html><body>404</body></html>" * 9,
    "C25 gz": b"\x1f\x8b\x08" + bytes(60),
    "C26 pickle": b"\x80\x02}q\x00." + bytes(60),
    "C26 zip": b"PK\x03\x04" + bytes(60),
    "header is a list": file_of(b"[]"),
    "header is no JSON": file_of(b"{" * 200_000),
    "fields": file_of({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
}
CONFIGS = {
    "C27 no JSON": "{",
    "C27 BOM": "\ufeff{}",
    "C27 list": "[]",
    "C27 NaN": json.dumps(CONFIG | {"rms_norm_eps": float("nan")}),
    "C27 deep": "[" * 100_000,
    "C27 empty": "",
    "C27 UTF-16": json.dumps(CONFIG).encode("utf-16"),
    "C27 10 MB": json.dumps(CONFIG | {"_name_or_path": "x" * (10 << 20)}),
    "C06 twice": '{"model_type": "llama", "model_type": "llama"}',
    **{
        f"C28 {name}={value}": json.dumps(CONFIG | {name: value})
        for name, values in {
            "num_attention_heads": (0, -1, 2.5, "8", True, 10**9, 5),
            "num_key_value_heads": (0, -1, 3, 8),
            "head_dim": (7, 0),
            "num_hidden_layers": (0, -1, 10**6),
            "vocab_size": (0, 10**9),
            "max_position_embeddings": (0, -4, 10**12),
            "rms_norm_eps": (0, -1),
            "rope_theta": (0, -1, "x"),
        }.items()
        for value in values
    },
    "C28 theta 1e400": json.dumps(CONFIG | {"rope_theta": 0}).replace(
        '"rope_theta": 0', '"rope_theta": 1e400'
    ),
    **{
        f"C28 window {window}": json.dumps(CONFIG | {"model_type": "mistral", "sliding_window": window})
        for window in (0, -1, 2.5)
    },
    **{
        f"C28 mla {name}={value}": json.dumps(CONFIG | LATENT | {"model_type": "deepseek_v3", name: value})
        for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for value in (0, -1, 3.5)
    },
    **{
        f"C30 {name}": json.dumps(CONFIG | {name: value})
        for name, value in {
            "rope_scaling": {"type": "xyz", "factor": 2.0},
            "is_causal": "no",
            "sliding_window": 6,
            "compression_config": {"bits": 4},
            "partial_rotary_factor": 0.5,
            "hidden_act": "gelu",
        }.items()
    },
    "C16 eps of 400 digits": json.dumps(CONFIG | {"rms_norm_eps": 10**400}),
    "C16 dropout of 400 digits": json.dumps(CONFIG | {"attention_dropout": 10**400}),
    "C31 another architecture": json.dumps(CONFIG | {"model_type": "gpt_oss"}),
    **{name: json.dumps(table).replace("Infinity", "1e400") for name, table in kinds.bad_configs()},
}
"""Refused by every command, before any weight is looked at."""
LIES = {
    "C29 giant": json.dumps(CONFIG | {"hidden_size": 2**16, "intermediate_size": 2**18}),
    "C30 quantization_config": json.dumps(CONFIG | {"quantization_config": {"bits": 4}}),
    "C30 attention_bias": json.dumps(CONFIG | {"attention_bias": True}),
    "C31 says Qwen": json.dumps(CONFIG | {"model_type": "qwen2"}),
    "C16 heads": json.dumps(CONFIG | {"num_key_value_heads": 4}),
    "C16 heads missing": json.dumps({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}),
}
"""A model of its own, not that of the weights."""
HARMLESS = {
    "C30 benign": CONFIG | {"_name_or_path": "x", "transformers_version": "9", "torch_dtype": "float32"},
    "C30 not read": CONFIG | {"qk_norm": True, "auto_map": {"AutoModelForCausalLM": "modeling_x.Y"}},
    "C30 null": CONFIG | {"new_key": None},
    "C31 two architectures": CONFIG | {"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]},
}
PLACES = ["../m.safetensors", "/m.safetensors", "a/b.safetensors", "..\\x.safetensors", "C:x.safetensors"]
PLACES += ["%2e%2e/m.safetensors", "m.safetensors ", "m.safetensors.", "m.s\u0430fetensors", "m" * 5000]
PLACES += ["m.bin", 7, None]


def weights(change, **more):
    """A case in which `change` makes other tensors of the good ones."""

    def damage(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path)

    return Case(damage=damage, **more)


def text_of(name, text, part, **more):
    """A case in which a file has another text."""
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return Case(damage=lambda folder: (folder / name).write_bytes(content), part=part, **more)


def index(change, **more):
    """A case with another index than the sharded folder's."""

    def damage(folder):
        path = folder / "model.safetensors.index.json"
        table = json.loads(path.read_text())
        made = change(table["weight_map"])
        path.write_text(made if isinstance(made, str) else json.dumps(table | made))

    return Case(damage=damage, base=sharded_folder, **more)


def moved(name, put):
    """A case in which a file of the folder is something else: `put(place)` makes it."""

    def damage(folder):
        place = folder / name
        content = place.read_bytes() if place.exists() else b"{}"
        place.unlink(missing_ok=True)
        put(place, content)

    part = {"config.json": "config", "tokenizer.json": "tokenizer", "MANIFEST.json": "config"}
    return Case(damage=damage, part=part.get(name, "weights"))


def link_out(place, content):
    outside = place.parent.parent / f"outside-{place.name}"
    outside.write_bytes(content)
    place.symlink_to(outside)


def a_socket(place, content):
    here = os.getcwd()
    os.chdir(place.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(place.name)
    finally:
        os.chdir(here)


KINDS = {
    "a link out": link_out,
    "a loop": lambda place, content: place.symlink_to(place),
    "a pipe": lambda place, content: os.mkfifo(place),
    "a socket": a_socket,
    "a device": lambda place, content: place.symlink_to("/dev/zero"),
    "a folder": lambda place, content: place.mkdir(),
}


def without(name):
    return lambda whole: {key: weight for key, weight in whole.items() if key != name}


def grown(name):
    return lambda whole: whole | {name: torch.zeros(len(whole[name]) + 1, *whole[name].shape[1:])}


def spoiled(name, value):
    def change(whole):
        whole[name].view(-1)[3] = value
        return whole

    return change


def pickles(folder):
    """A folder of pickles that would run code, beside code that it names."""
    (folder / "model.safetensors").unlink()
    out = folder.parent / CANARY
    (folder / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {out}'\ntR.".encode())
    (folder / "modeling_x.py").write_text(f"open({str(out)!r}, 'w')")


def tied(**changes):
    def damage(folder):
        path = folder / "model.safetensors"
        whole = load_file(path)
        if changes.get("head") == "absent":
            del whole["lm_head.weight"]
        if changes.get("head") == "same":
            whole["lm_head.weight"] = whole["model.embed_tokens.weight"].clone()
        save_file(whole, path)
        tie = {"tie_word_embeddings": changes["tie"]}
        (folder / "config.json").write_text(json.dumps(CONFIG | tie))

    return damage


def tokens(change):
    """A case with another tokenizer.json than a good one of bytes and merges."""
    table = json.loads(train("bpe", "abc abc " * 9, 259).to_json())
    made = change(table)
    return text_of("tokenizer.json", made if isinstance(made, str | bytes) else json.dumps(made), "tokenizer")


def added(number, content="<x>"):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


def replaces(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def splits(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def mapping(long):
    """A precompiled map, as of SentencePiece: a trie without entries, and the texts that they would map to."""
    blob = struct.pack("<I", 1024) + bytes(1024) + long.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
DEEP = "(" * 200 + "a*" + ")*" * 200 + "$"


def in_turn(normalizers):
    return {"type": "Sequence", "normalizers": normalizers}


def manifest(change, part="config"):
    """A case in which the manifest of a native folder says something else."""

    def damage(folder):
        path = folder / "MANIFEST.json"
        made = change(json.loads(path.read_text()))
        path.write_text(made if isinstance(made, str) else json.dumps(made))

    return Case(damage=damage, part=part, codes=(4,), base=native_folder)


def recorded(name, value):
    """A manifest with this entry."""
    return lambda table: table | {"files": table["files"] | {name: value}}


def flipped(folder):
    """One bit of the last weight."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


NAMES = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
NAMES += [f"model.layers.0.{part}_layernorm.weight" for part in ("input", "post_attention")]
NAMES += [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
NAMES += [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj.weight"
CORPUS: dict[str, Case] = {
    **{name: text_of("model.safetensors", content, "weights") for name, content in FILES.items()},
    **{name: text_of("config.json", text, "config") for name, text in CONFIGS.items()},
    **{name: text_of("config.json", text, "weights") for name, text in LIES.items()},
    **{name: text_of("config.json", json.dumps(table), "", codes=(0,)) for name, table in HARMLESS.items()},
    "C10 float64 among float32": weights(lambda whole: whole | {K: whole[K].double()}, codes=(0,)),
    "C10 float16 among float32": weights(lambda whole: whole | {K: whole[K].half()}, codes=(0,)),
    **{f"C13 without {name}": weights(without(name)) for name in NAMES},
    **{
        f"C13 {kind} without {name}": weights(without(name), base=folder_of(kind))
        for kind, name in kinds.SPECIAL.items()
    },
    **{
        f"C15 {kind} {name} grown": weights(grown(name), base=folder_of(kind))
        for kind, name in kinds.SPECIAL.items()
    },
    **{f"C31 a good {kind}": weights(dict, base=folder_of(kind), codes=(0,)) for kind in kinds.SPECIAL},
    "C14 a bias more": weights(lambda whole: whole | {f"{Q}.bias": torch.zeros(24)}),
    **{f"C15 {name} grown": weights(grown(name)) for name in NAMES},
    "C16 three KV heads": weights(lambda whole: whole | {K: torch.zeros(18, 24)}),
    **{f"C17 NaN in {name}": weights(spoiled(name, float("nan")), codes=(0, 7)) for name in NAMES},
    "C17 infinity": weights(spoiled(K, float("inf")), codes=(0, 7)),
    "C18 subnormal": weights(lambda whole: whole | {K: torch.full_like(whole[K], 1e-40)}, codes=(0,)),
    "C18 huge": weights(lambda whole: whole | {K: torch.full_like(whole[K], 1e38)}, codes=(0, 7)),
    "C18 all 0": weights(lambda whole: whole | {K: torch.zeros_like(whole[K])}, codes=(0,)),
    "C19 tied, absent": Case(damage=tied(tie=True, head="absent"), codes=(0,)),
    "C19 tied, the same": Case(damage=tied(tie=True, head="same"), codes=(0,)),
    "C19 tied, another": Case(damage=tied(tie=True)),
    "C19 untied, absent": Case(damage=tied(tie=False, head="absent")),
    "C20 extra": index(
        lambda places: {"weight_map": places | {"model.extra": "model-00001-of-00002.safetensors"}}
    ),
    "C20 not listed": index(lambda places: {"weight_map": without(NAMES[0])(places)}),
    "C20 elsewhere": index(
        lambda places: {"weight_map": places | {NAMES[1]: "model-00001-of-00002.safetensors"}}
    ),
    "C20 no such file": index(lambda places: {"weight_map": places | {NAMES[0]: "model-3.safetensors"}}),
    "C20 no table": index(lambda places: {"weight_map": []}),
    "C20 nothing": index(lambda places: "{}"),
    "C20 total_size": index(lambda places: {"metadata": {"total_size": 1}}, codes=(0,)),
    "C06 index twice": index(lambda places: '{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}'),
    **{
        f"C21 {place!r:.12}": index(lambda places, place=place: {"weight_map": places | {NAMES[0]: place}})
        for place in PLACES
    },
    **{
        f"C22 {name} is {kind}": moved(name, put)
        for name in ("model.safetensors", "config.json", "tokenizer.json", "MANIFEST.json")
        for kind, put in KINDS.items()
    },
    "C24 a bit, recorded": Case(damage=flipped, codes=(4,), base=native_folder),
    "C24 a bit, unrecorded": Case(damage=flipped, codes=(0,)),
    "C26 pickles only": Case(damage=pickles),
    "C27 missing": Case(
        damage=lambda folder: (folder / "config.json").unlink(), part="config", codes=REFUSED
    ),
    "C32 GPTQ": weights(
        lambda whole: (
            without(f"{Q}.weight")(whole)
            | {f"{Q}.qweight": torch.zeros(3, 24, dtype=torch.int32), f"{Q}.scales": torch.ones(1, 24)}
        )
    ),
    "C32 fp8 scales": weights(lambda whole: whole | {f"{Q}.weight_scale_inv": torch.ones(1, 1)}),
    "C32 int8": weights(lambda whole: whole | {f"{Q}.weight": torch.zeros(24, 24, dtype=torch.int8)}),
    "C33 no JSON": tokens(lambda table: "{"),
    "C33 empty": tokens(lambda table: ""),
    "C33 no UTF-8": tokens(lambda table: b"\xff\xfe{}"),
    "C33 deep": tokens(lambda table: "[" * 100_000),
    "C33 a list": tokens(lambda table: []),
    "C33 more tokens than the model": tokens(lambda table: table),
    "C33 an added token out of range": tokens(lambda table: table | {"added_tokens": [added(10**6)]}),
    "C33 a negative id": tokens(lambda table: table | {"added_tokens": [added(-1)]}),
    "C33 two tokens of one id": tokens(
        lambda table: table | {"model": table["model"] | {"vocab": {"a": 0, "b": 0, "c": 1}, "merges": []}}
    ),
    "C33 a merge of nothing": tokens(
        lambda table: table | {"model": table["model"] | {"vocab": {"a": 0}, "merges": [["x", "y"]]}}
    ),
    "C33 an id near 2^31": tokens(lambda table: table | {"added_tokens": [added(2**31 - 5)]}),
    "C33 replacements that double": tokens(
        lambda table: table | {"normalizer": in_turn([replaces("a", "aa")] * 30)}
    ),
    "C33 replacements of nothing": tokens(lambda table: table | {"normalizer": replaces("", "a" * 200)}),
    "C33 a decoder that doubles": tokens(
        lambda table: table | {"decoder": {"type": "Sequence", "decoders": [replaces("a", "aa")] * 30}}
    ),
    "C33 bytes of bytes": tokens(lambda table: table | {"normalizer": in_turn([{"type": "ByteLevel"}] * 30)}),
    "C33 bytes of bytes of words": tokens(
        lambda table: table | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}}
    ),
    "C33 a map to long texts": tokens(lambda table: table | {"normalizer": mapping("a" * 10**6)}),
    "C33 10,000 steps": tokens(lambda table: table | {"normalizer": in_turn([{"type": "NFKD"}] * 10_000)}),
    "C33 a pattern of 200 groups": tokens(lambda table: table | {"pre_tokenizer": splits(DEEP)}),
    "C33 a long pattern": tokens(lambda table: table | {"pre_tokenizer": splits("a*" * 10**5)}),
    "C33 a long beginning": tokens(
        lambda table: table | {"normalizer": {"type": "Prepend", "prepend": "a" * 10**7}}
    ),
    "C33 70 MB": Case(
        damage=lambda folder: os.truncate(folder / "tokenizer.json", 70 << 20), part="tokenizer"
    ),
    "C34 no JSON": manifest(lambda table: "{"),
    "C34 a list": manifest(lambda table: "[]"),
    "C34 deep": manifest(lambda table: "[" * 100_000),
    "C34 another hash": manifest(recorded("config.json", EMPTY)),
    "C34 an absolute name": manifest(recorded("/etc/hostname", EMPTY), "weights"),
    "C34 a name above": manifest(recorded("../x.json", EMPTY), "weights"),
    "C34 a name of two lines": manifest(recorded("tokenizer.js\n", EMPTY)),
    "C34 a missing file": manifest(recorded("gone.json", EMPTY), "weights"),
    "C34 a later format": manifest(lambda table: table | {"format": 2}),
    "C34 no files": manifest(lambda table: {"format": 1}),
    "C34 an extra file": Case(
        damage=lambda folder: (folder / "extra.json").write_text("{}"), codes=(4,), base=native_folder
    ),
    "C34 weights gone": Case(
        damage=lambda folder: (folder / "model.safetensors").unlink(), codes=(4,), base=native_folder
    ),
    "C34 config changed": replace(
        text_of("config.json", json.dumps(CONFIG), "config", codes=(4,)), base=native_folder
    ),
    "C34 tokenizer changed": replace(
        text_of("tokenizer.json", "{}", "weights", codes=(4,)), base=native_folder
    ),
}
