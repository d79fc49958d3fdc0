"""Folders nobody should trust: each is refused with a reason, quickly, before anything large is made."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint.shards import LARGEST_HEADER, Shards
from rehead.config import ModelOptions
from rehead.errors import IntegrityError, InvalidInput
from rehead.model import build

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
FILES = {
    "C01 empty": b"",
    "C01 short": b"\x01\x02\x03",
    "C02 last byte cut": GOOD[:-1],
    **{f"C02 cut at {i}/16": GOOD[: len(GOOD) * i // 16] for i in range(1, 16)},
    "C03 trailing bytes": GOOD + b"\x00",
    "C03 a zip behind": GOOD + b"PK\x03\x04" + bytes(30),
    **{
        f"C04 length {length}": file_of(one(), bytes(24), length)
        for length in (0, 2**31, 2**63 - 1, 2**64 - 1, 10_000, LARGEST_HEADER + 1)
    },
    "C06 a tensor twice": file_of(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
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
    "C08 1e400": file_of(json.dumps(one()).replace("[2, 3]", "[1e400, 3]").encode(), bytes(24)),
    "C08 5000 digits": file_of(json.dumps(one()).replace("[2, 3]", f"[{'9' * 5000}, 3]").encode(), bytes(24)),
    **{
        f"C09 {dtype}": file_of(one(dtype=dtype), bytes(24))
        for dtype in ("U8", "F4", "F8_E4M3", "X", 1, None)
    },
    **{
        f"C11 {name[:9]!r}": file_of({name: one()["a"]}, bytes(24))
        for name in ("../x", "/etc/x", "a\0b", "a\nb", "\u202ea", "", "x" * 10**6, "\ud800")
    },
    "C12 metadata": file_of({"__metadata__": {"a": 1}, **one()}, bytes(24)),
    "C12 no table": file_of({"__metadata__": [], **one()}, bytes(24)),
    "C25 LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    "C25 HTML": b"<!DOCTYPE html><html><body>404</body></html>" * 9,
    "C25 gz": b"\x1f\x8b\x08" + bytes(60),
    "C26 pickle": b"\x80\x02}q\x00." + bytes(60),
    "C26 zip": b"PK\x03\x04" + bytes(60),
    "header is a list": file_of(b"[]"),
    "header is no JSON": file_of(b"{" * 200_000),
    "fields": file_of({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
}


@pytest.fixture
def folder(tmp_path):
    """A stock Llama of 11 symbols that loads."""
    model = build(LLAMA.resolve(11, 16)).float()
    state = {f"model.{k}" if "head" not in k else "lm_head.weight": v for k, v in model.state_dict().items()}
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert rehead.load(tmp_path)(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 11)
    return tmp_path


def refused(folder, *words, kinds=(InvalidInput, IntegrityError)):
    begun = time.monotonic()
    with pytest.raises(kinds) as caught:
        rehead.load(folder)
    assert time.monotonic() - begun < 2
    message = str(caught.value)
    assert len(message) < 900
    assert message.isprintable()
    for word in words:
        assert word in message


@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_files_that_no_writer_makes(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors")


def test_the_good_file_is_read(tmp_path):
    """Or the cases above would be refused for another reason."""
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert Shards(tmp_path).read("a").tolist() == [[0.0] * 3] * 2


def test_a_million_empty_tensors(folder):
    """C05"""
    one = (
        b'{"t0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        + b',"t":{"dtype":"F32","shape":[0]}' * 10**6
    )
    (folder / "model.safetensors").write_bytes(file_of(one + b"}"))
    refused(folder)


def test_missing_extra_and_misshapen_weights(folder):
    """C13, C14, C15, C16: never a fresh weight in place of one that is missing."""
    path = folder / "model.safetensors"
    whole = load_file(path)
    for name in whole:
        save_file({k: v for k, v in whole.items() if k != name}, path)
        refused(folder, "lacks 1", name, kinds=InvalidInput)
    save_file(whole | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}, path)
    refused(folder, "beyond what its config describes", "q_proj.bias")
    for name, weight in whole.items():
        save_file(whole | {name: torch.zeros(weight.shape[0] + 1, *weight.shape[1:])}, path)
        refused(folder, "shape")


def test_tied_heads(folder):
    """C19"""
    path, config = folder / "model.safetensors", folder / "config.json"
    whole = load_file(path)
    config.write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    refused(folder, "lm_head.weight differs from the embedding", "tie_word_embeddings=false")
    save_file(whole | {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}, path)
    assert rehead.load(folder).config.tie_embeddings
    del whole["lm_head.weight"]
    save_file(whole, path)
    assert rehead.load(folder).config.tie_embeddings
    config.write_text(json.dumps(CONFIG))
    refused(folder, "lacks 1", "lm_head.weight")


@pytest.fixture
def sharded(folder):
    """The same model in two files with an index."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    places = {name: f"model-{1 + (i > 4):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: whole[name] for name in names if places[name] == file}, folder / file)
    table = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    assert rehead.load(folder).config.n_layer == 1
    return folder, table


PLACES = ["../m.safetensors", "/m.safetensors", "a/b.safetensors", "..\\x.safetensors", "C:x.safetensors"]
PLACES += [
    "%2e%2e/m.safetensors",
    "m.safetensors ",
    "m.safetensors.",
    "m.s\u0430fetensors",
    "m" * 5000,
    "m.bin",
]


@pytest.mark.parametrize("file", [*PLACES, 7, None])
def test_an_index_stays_in_its_folder(sharded, file):
    """C21"""
    folder, table = sharded
    table["weight_map"]["model.norm.weight"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    refused(folder, "index.json")


def test_an_index_and_its_files_agree(sharded):
    """C20"""
    folder, table = sharded
    index = folder / "model.safetensors.index.json"
    names, files = list(table["weight_map"]), sorted(set(table["weight_map"].values()))
    changes = [
        {"weight_map": table["weight_map"] | {"model.extra": files[0]}},
        {"weight_map": {k: v for k, v in table["weight_map"].items() if k != names[0]}},
        {"weight_map": table["weight_map"] | {names[0]: files[1]}},
        {"weight_map": table["weight_map"] | {names[0]: "model-3.safetensors"}},
        {"weight_map": []},
        {},
    ]
    for change in changes:
        index.write_text(json.dumps(change))
        refused(folder)
    index.write_text('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}')
    refused(folder, "twice")


def test_links_pipes_and_folders_are_no_weights(folder, tmp_path_factory):
    """C22: nothing outside is opened, nothing blocks."""
    path, elsewhere = folder / "model.safetensors", tmp_path_factory.mktemp("elsewhere") / "w.safetensors"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    refused(folder, "link out of its folder")
    path.unlink()
    path.symlink_to(path)
    refused(folder)
    path.unlink()
    os.mkfifo(path)
    refused(folder, "no regular file")
    path.unlink()
    path.mkdir()
    refused(folder, "no regular file")
    path.rmdir()
    path.symlink_to("/dev/zero")
    refused(folder)


def test_the_hugging_face_cache_is_read_through_its_links(folder, tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(cache / "blobs" / name[:3])
        (snapshot / name).symlink_to(f"../../blobs/{name[:3]}")
    assert rehead.load(snapshot).config.n_layer == 1


def test_a_folder_of_pickles_is_refused_unread(folder):
    """C26"""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n(S'false'\ntR.")
    refused(folder, "pytorch_model.bin is a pickle")


CONFIGS = {
    "C27 no JSON": "{",
    "C27 BOM": "\ufeff{}",
    "C27 list": "[]",
    "C27 NaN": json.dumps(CONFIG | {"rms_norm_eps": float("nan")}),
    "C27 deep": "[" * 100_000,
    "C27 empty": "",
    "C06 twice": '{"model_type": "llama", "model_type": "llama"}',
    **{
        f"C28 {name}={value}": json.dumps(CONFIG | {name: value})
        for name, values in {
            "num_attention_heads": (0, -1, 2.5, "8", True, 10**9, 5),
            "num_key_value_heads": (0, -1, 3, 8),
            "head_dim": (7, 0),
            "num_hidden_layers": (0, -1, 10**6),
            "vocab_size": (0, 10**9),
            "max_position_embeddings": (0, -4),
            "rms_norm_eps": (0, -1),
            "rope_theta": (0, -1, "x"),
        }.items()
        for value in values
    },
    **{
        f"C30 {name}": json.dumps(CONFIG | {name: value})
        for name, value in {
            "rope_scaling": {"type": "xyz", "factor": 2.0},
            "attention_bias": True,
            "qk_norm": True,
            "sliding_window_pattern": 6,
            "auto_map": {"AutoModel": "x.Y"},
            "quantization_config": {"bits": 4},
            "partial_rotary_factor": 0.5,
            "hidden_act": "gelu",
        }.items()
    },
    "C31 another architecture": json.dumps(CONFIG | {"model_type": "mamba"}),
    "C31 a lie": json.dumps(CONFIG | {"model_type": "qwen2"}),
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=list(CONFIGS))
def test_configs_that_describe_no_model(folder, text):
    """C27-C31: refused before any weight is made, whatever sizes they ask for."""
    (folder / "config.json").write_text(text)
    refused(folder)


def test_harmless_keys_are_carried(folder):
    """C30: what changes nothing is no reason to refuse."""
    more = {"_name_or_path": "x", "transformers_version": "9", "torch_dtype": "float32", "new_key": None}
    (folder / "config.json").write_text(json.dumps(CONFIG | more))
    assert rehead.load(folder).config.n_layer == 1


def test_little_memory_and_no_other_file(folder):
    """A config of a giant model beside small weights: 300 MB, and nothing outside the folder is opened."""
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"hidden_size": 2**20, "intermediate_size": 2**22})
    )
    program = f"""
import resource, sys
import rehead.checkpoint, rehead.errors
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
try:
    rehead.checkpoint.load({str(folder)!r})
except rehead.errors.InvalidInput as error:
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    others = [file for file in opened if not file.startswith(({str(folder)!r}, sys.prefix, sys.base_prefix))]
    print("refused", more < 300_000, [file for file in others if not file.endswith((".py", ".pyc"))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "refused True []", done.stderr + done.stdout
