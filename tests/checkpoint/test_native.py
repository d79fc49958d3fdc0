"""A model folder gives back the model, bit by bit, or says what is wrong with it."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint import read_config
from rehead.checkpoint.own import LARGEST_CONFIG, read_dtype
from rehead.config import ModelOptions, RNNConfig
from rehead.errors import IntegrityError, InvalidInput
from rehead.model import build

SIZES = {"n_layer": 2, "n_embd": 30, "n_query_head": 6, "n_hidden": 19, "head_dim": 4}
KINDS = {
    "mha": {},
    "gqa, rope": {"n_kv_head": 2, "rope": True},
    "llama, scaled rope": {"shape": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "mla": {"attention": "mla", "kv_lora_rank": 9, "q_lora_rank": 7, "rope": True},
    "additive, modular": {"score": "additive", "n_kv_head": 2, "head_map": "modular"},
    "pattern": {"layers": [{"window": 3}, {"attention": "mla"}]},
    "tied": {"tie_embeddings": True},
}
CONFIGS = {name: ModelOptions(**SIZES | flags).resolve(29, 11) for name, flags in KINDS.items()} | {
    f"rnn, {direction}": RNNConfig(
        vocab_size=29, block_size=11, n_embd=5, n_layer=2, n_hidden=7, n_output=29, direction=direction
    )
    for direction in ("forward", "bidirectional", "prefix")
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def make(name="gqa, rope", dtype=torch.float32):
    return build(CONFIGS[name]).to(dtype)


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.fixture
def folder(tmp_path):
    """A saved model, its MANIFEST taken away so that each check behind it shows."""
    rehead.save(make(), tmp_path / "model")
    (tmp_path / "model" / "MANIFEST.json").unlink()
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CONFIGS), *(("gqa, rope", dtype) for dtype in DTYPES[1:])],
)
def test_what_is_loaded_is_what_was_saved(name, dtype, tmp_path):
    model = make(name, dtype)
    rehead.save(model, tmp_path / "model")
    loaded = rehead.load(tmp_path / "model")
    assert same_weights(loaded, model)
    assert (loaded.config, read_config(tmp_path / "model")) == (model.config, model.config)
    assert not loaded.training
    assert all(weight.requires_grad for weight in loaded.parameters())
    ids = torch.randint(29, (3, 7))
    assert torch.equal(loaded(ids), model.eval()(ids))


def test_another_default_device_does_not_matter(tmp_path):
    """A model goes where it is asked to; weights are read into the CPU's memory."""
    model = make(next(iter(CONFIGS)), torch.float32)
    rehead.save(model, tmp_path / "model")
    with torch.device("meta"):
        loaded = rehead.load(tmp_path / "model")
    assert same_weights(loaded, model)


def test_odd_numbers_survive(tmp_path):
    model = make()
    model.head.weight.data[0, :5] = torch.tensor([-0.0, 1e-45, float("nan"), float("inf"), 3.4e38])
    rehead.save(model, tmp_path / "model")
    with pytest.warns(UserWarning, match="NaN or infinity"):
        kept = rehead.load(tmp_path / "model").head.weight.data
    assert torch.equal(kept.view(torch.int32), model.head.weight.data.view(torch.int32))


def test_a_tied_weight_is_written_once_and_shared_again(tmp_path):
    rehead.save(make("tied"), tmp_path / "model")
    assert "head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    loaded = rehead.load(tmp_path / "model")
    assert loaded.head.weight is loaded.embed_tokens.weight


@pytest.mark.parametrize("name", CONFIGS)
def test_two_saves_give_the_same_bytes(name, tmp_path):
    model = make(name)
    for folder in ("one", "two"):
        rehead.save(model, tmp_path / folder)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["MANIFEST.json", "config.json", "generation_config.json", "model.safetensors"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_further_files_lie_beside_the_model(tmp_path):
    rehead.save(make(), tmp_path / "model", files={"tokenizer.json": '{"é": "\r\n"}'})
    assert (tmp_path / "model" / "tokenizer.json").read_bytes().decode() == '{"é": "\r\n"}'


def test_the_config_says_its_format_and_dtype(tmp_path):
    rehead.save(make(dtype=torch.bfloat16), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["format"], config["dtype"], config["model_type"]) == ("rehead-1", "bfloat16", "gpt")


def test_the_config_of_a_folder_named_like_a_file(tmp_path):
    rehead.save(make(dtype=torch.bfloat16), tmp_path / "model.json")
    assert read_config(tmp_path / "model.json") == CONFIGS["gqa, rope"]
    assert read_dtype(tmp_path / "model.json") == torch.bfloat16


def test_the_name_of_a_folder_means_nothing(tmp_path):
    rehead.save(make(), tmp_path / "llama-mla-rnn")
    (tmp_path / "llama-mla-rnn").rename(tmp_path / "x")
    assert same_weights(
        rehead.load(tmp_path / "x"), rehead.load(shutil.copytree(tmp_path / "x", tmp_path / "y"))
    )


def test_a_loaded_model_does_not_hang_on_its_file(folder):
    loaded = rehead.load(folder)
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.state_dict().items())


def test_a_model_can_be_saved_over_the_folder_it_came_from(tmp_path):
    rehead.save(make(), tmp_path / "model")
    loaded = rehead.load(tmp_path / "model")
    rehead.save(loaded, tmp_path / "model", overwrite=True)
    assert same_weights(rehead.load(tmp_path / "model"), loaded)


def fewer_outputs(model):
    model.head.weight = torch.nn.Parameter(model.head.weight[:21].clone())


def no_output_norm(model):
    model.norm = torch.nn.Identity()


def another_norm(model):
    model.layers[0].mlp.norm = torch.nn.RMSNorm(3)


def tied_by_hand(model):
    model.head.weight = model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fewer_outputs, "head.weight: the model has [21, 30], its config says [29, 30]"),
        (no_output_norm, "norm.weight: the model has none, its config says [30]"),
        (another_norm, "layers.0.mlp.norm.weight: the model has [3], its config says none"),
        (tied_by_hand, "head.weight: the model has none, its config says [29, 30]"),
    ],
)
def test_weights_beside_the_config_are_not_saved_over_a_good_model(change, said, tmp_path):
    good, changed = make(), make()
    rehead.save(good, tmp_path / "model")
    change(changed)
    with pytest.raises(InvalidInput) as caught:
        rehead.save(changed, tmp_path / "model", overwrite=True)
    assert said in str(caught.value)
    assert same_weights(rehead.load(tmp_path / "model"), good)


def test_a_config_changed_with_the_weights_is_saved(tmp_path):
    model = make()
    for layer in model.layers:
        mlp = layer.mlp
        mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight[:10].clone())
        mlp.up_proj.bias = torch.nn.Parameter(mlp.up_proj.bias[:10].clone())
        mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :10].clone())
    model.config = replace(model.config, n_hidden=10)
    rehead.save(model, tmp_path / "model")
    loaded, ids = rehead.load(tmp_path / "model"), torch.arange(8)[None]
    assert torch.equal(loaded(ids), model.eval()(ids))


def test_loading_draws_no_random_numbers(folder):
    before = torch.get_rng_state()
    rehead.load(folder)
    assert torch.equal(torch.get_rng_state(), before)


def weights_changed(change):
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


Q = "layers.1.self_attn.q_proj.weight"
WEIGHTS = {  # damage, error, what the message must name
    "missing": (lambda w: w.pop(Q), [f"lacks 1 weights: {Q}"]),
    "all missing": (lambda w: w.clear(), ["lacks 36 weights", "embed_tokens.weight"]),
    "extra": (lambda w: w.update(gate=torch.ones(1)), ["beyond what its config describes, 1 weights: gate"]),
    "extra, long names": (
        lambda w: w.update({f"{'x' * 190}{i}": torch.ones(1) for i in range(30)}),
        ["beyond what its config describes, 30 weights"],
    ),
    "renamed": (lambda w: w.update({Q + "s": w.pop(Q)}), [f"lacks 1 weights: {Q}"]),
    "wrong shape": (lambda w: w.update({Q: w[Q][:5]}), [Q, "shape [5, 30]", "[24, 30]"]),
    "transposed": (lambda w: w.update({Q: w[Q].T.contiguous()}), [Q, "shape [30, 24]", "[24, 30]"]),
    "flattened": (lambda w: w.update({Q: w[Q].flatten()}), [Q, "shape [720]", "[24, 30]"]),
    "whole numbers": (lambda w: w.update({Q: w[Q].int()}), [Q, "'I32'", "F32"]),
    "bits": (lambda w: w.update({Q: w[Q] > 0}), [Q, "'BOOL'", "F32"]),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit_are_refused(case, folder):
    change, named = WEIGHTS[case]
    weights_changed(change)(folder)
    with pytest.raises(InvalidInput) as caught:
        rehead.load(folder)
    for part in [*named, "model.safetensors"]:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["mla", "tied", "rnn, forward"])
def test_each_missing_weight_is_refused(name, tmp_path):
    rehead.save(make(name), tmp_path / "model")
    (tmp_path / "model" / "MANIFEST.json").unlink()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for missing in weights:
        save_file(
            {k: w for k, w in weights.items() if k != missing}, tmp_path / "model" / "model.safetensors"
        )
        with pytest.raises(InvalidInput, match=missing):
            rehead.load(tmp_path / "model")


def replaced(old, new):
    return lambda text: text.replace(old, new, 1)


CONFIG_FILES = {  # config.json, as a function of the good one; what the message must name
    "no JSON": (lambda text: text[:-9], "is not JSON"),
    "empty": (lambda text: "", "is not JSON"),
    "array": (lambda text: f"[{text}]", "format='rehead-1'"),
    "string": (lambda text: '"rehead-1"', "format='rehead-1'"),
    "null": (lambda text: "null", "format='rehead-1'"),
    "of another program": (lambda text: '{"hidden_size": 64}', "format='rehead-1'"),
    "of another format": (replaced('"rehead-1"', '"rehead-2"'), "format='rehead-2', this version"),
    "key twice": (replaced('"n_embd": 30', '"n_embd": 60, "n_embd": 30'), "a key appears twice"),
    "key twice, inside": (replaced('"head_dim": 4', '"head_dim": 4, "head_dim": 4'), "a key appears twice"),
    "NaN": (replaced('"norm_eps": 1e-05', '"norm_eps": NaN'), "NaN is not a number"),
    "Infinity": (replaced('"norm_eps": 1e-05', '"norm_eps": -Infinity'), "-Infinity is not a number"),
    "too large a float": (
        replaced('"norm_eps": 1e-05', '"norm_eps": 1e400'),
        "1e400 is not a number that float64 can hold",
    ),
    "5000 digits": (replaced('"n_embd": 30', f'"n_embd": {"3" * 5000}'), "is not JSON"),
    "400 digits": (replaced('"norm_eps": 1e-05', f'"norm_eps": {"3" * 400}'), "norm_eps=333"),
    "deep": (lambda text: "[" * 100_000, "is not JSON"),
    "unknown key": (
        replaced('"n_embd": 30', '"n_embd": 30, "n_embed": 30'),
        "'n_embed'. Did you mean 'n_embd'?",
    ),
    "missing key": (replaced('  "n_embd": 30,\n', ""), "n_embd is missing"),
    "bool": (replaced('"n_embd": 30', '"n_embd": true'), "n_embd=True"),
    "text": (replaced('"n_embd": 30', '"n_embd": "30"'), "n_embd='30'"),
    "no size": (replaced('"n_embd": 30', '"n_embd": 0'), "n_embd=0"),
    "head division": (
        replaced('"n_kv_head": 2', '"n_kv_head": 4'),
        "n_kv_head=4 does not divide n_query_head=6",
    ),
    "BOM": (lambda text: "\ufeff" + text, "is not JSON"),
    "too big": (lambda text: text + " " * LARGEST_CONFIG, f"more than {LARGEST_CONFIG:,} bytes"),
}


@pytest.mark.parametrize("case", CONFIG_FILES)
def test_a_bad_config_is_refused(case, folder):
    change, named = CONFIG_FILES[case]
    path = folder / "config.json"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        rehead.load(folder)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b'{"format": "\xff"}', '{"format": "rehead-1"}'.encode("utf-16")]
)
def test_a_config_that_is_no_text_is_refused(content, folder):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(InvalidInput, match="is not text in UTF-8"):
        rehead.load(folder)


def test_sizes_beyond_the_file_are_refused_before_anything_is_allocated(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 29', '"vocab_size": 4000000'))
    with pytest.raises(InvalidInput, match=r"embed_tokens\.weight has shape .*says \[4000000, 30\]"):
        rehead.load(folder)


FOLDERS = {  # what stands at the path, what the message must name
    "nothing": (lambda path: None, "does not exist"),
    "a file": (lambda path: path.write_text(""), "is a file"),
    "an empty folder": (lambda path: path.mkdir(), "holds nothing"),
    "another folder": (lambda path: (path.mkdir(), (path / "pytorch_model.bin").touch()), "holds pytorch_model.bin"),
    "no config": (lambda path: (path.mkdir(), (path / "model.safetensors").touch()), "config.json"),
    "no weights": (lambda path: (rehead.save(make(), path), [
        (path / name).unlink() for name in ("model.safetensors", "MANIFEST.json")]), "model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_no_model_folder_is_refused(case, tmp_path):
    prepare, named = FOLDERS[case]
    prepare(tmp_path / "model")
    with pytest.raises(InvalidInput) as caught:
        rehead.load(tmp_path / "model")
    assert named in str(caught.value)
    assert str(tmp_path / "model") in str(caught.value)


@pytest.mark.parametrize("path", ["x" * 300, "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InvalidInput):
        rehead.load(path)


def test_flipped_bits_are_detected(tmp_path):
    """100 of them, anywhere: a flip is refused, or (in the white space of MANIFEST.json) changes nothing."""
    folder, draw = tmp_path / "model", random.Random(0)
    model = make("mla")
    rehead.save(model, folder)
    files = sorted(folder.iterdir())
    harmless = 0
    for _ in range(100):
        path = draw.choice(files)
        whole = path.read_bytes()
        at, bit = draw.randrange(len(whole)), draw.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        try:
            loaded = rehead.load(folder)
        except IntegrityError:
            loaded = None
        if loaded is not None:
            assert path.name == "MANIFEST.json"
            assert loaded.config == model.config
            assert same_weights(loaded, model)
            harmless += 1
        path.write_bytes(whole)
    assert harmless < 10
    assert same_weights(rehead.load(folder), model)


def test_every_truncation_is_detected(tmp_path):
    rehead.save(make(), tmp_path / "model")
    for path in sorted((tmp_path / "model").iterdir()):
        whole = path.read_bytes()
        for length in {*range(0, len(whole), len(whole) // 16), len(whole) - 1}:
            path.write_bytes(whole[:length])
            with pytest.raises(IntegrityError, match=path.name):
                rehead.load(tmp_path / "model")
        path.write_bytes(whole)


def test_an_example_is_loaded_from_a_relative_path(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert rehead.load("examples/both-seen").config.activation == "slide"


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "", "..", "config.json", "MANIFEST.json", "model.safetensors", "a\n.txt", "\x1b[2J"],
)
def test_a_further_file_is_in_the_folder_and_not_the_model_s_own(name, tmp_path):
    with pytest.raises(InvalidInput, match=re.escape(f"files has the name {name!r}")):
        rehead.save(make(), tmp_path / "in" / "model", files={name: "text"})
    assert not list(tmp_path.iterdir())
