"""What is said of folders nobody should trust; that all of them are refused, test_corpus.py shows."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpus import CORPUS, file_of, native_folder, one, sharded_folder, stock_folder
from safetensors.torch import load_file, save_file

import rehead
from rehead.attention.score import ScaledDot
from rehead.checkpoint import families, read_config
from rehead.checkpoint.files import opened, shards
from rehead.checkpoint.files.publish import sha256
from rehead.checkpoint.huggingface import stock
from rehead.config import ModelOptions
from rehead.errors import ConfigError, IntegrityError, InvalidInput, NumericError
from rehead.model import build
from rehead.stages import listening


@pytest.fixture
def folder(tmp_path):
    """A stock Llama of 11 symbols that loads."""
    stock_folder(tmp_path / "model")
    assert rehead.load(tmp_path / "model")(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 11)
    return tmp_path / "model"


def refused(folder, *words, kinds=(InvalidInput, IntegrityError)):
    with pytest.raises(kinds) as caught:
        rehead.load(folder)
    message = str(caught.value)
    assert len(message) < 900
    assert message.isprintable()
    for word in words:
        assert word in message


SAID = {
    "C01 empty": "model.safetensors is not a safetensors file, or is cut short: 0 bytes",
    "C02 last byte cut": "model.safetensors has ",
    "C04 length 0": "model.safetensors is not a safetensors file, or is cut short",
    "C04 length 18446744073709551615": "with a header of 18,446,744,073,709,551,615",
    "C03 trailing bytes": "download it again",
    "C06 a tensor twice": "a key appears twice",
    "C07 hole": "a hole or an overlap",
    "C09 F8_E4M3": "nothing quantised",
    "C25 LFS": "a Git LFS pointer",
    "C25 HTML": "a web page",
    "C26 pickle": "a pickle: convert it",
    "C26 pickles only": "pytorch_model.bin is a pickle",
    "C30 is_causal": "is_causal='no': rehead does not know this key",
    "C30 quantization_config": "from before its quantisation",
    "C31 another architecture": "unknown model_type 'gpt_oss'. Known: deepseek_v2,",  # not: did you mean gpt_neox
    "C32 GPTQ": "holds quantised weights (model.layers.0.self_attn.q_proj.qweight",
    "C34 a later format": "upgrade rehead",
    "C34 an extra file": "extra.json is not recorded",
}


@pytest.mark.parametrize("name", SAID)
def test_the_message_says_what_it_is(name, tmp_path):
    case = CORPUS[name]
    (case.base or stock_folder)(tmp_path / "model")
    case.damage(tmp_path / "model")
    refused(tmp_path / "model", SAID[name])


def test_missing_extra_and_misshapen_weights(folder):
    """C13, C14, C15: by name."""
    path = folder / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.0.self_attn.v_proj.weight"
    save_file({k: v for k, v in whole.items() if k != name}, path)
    refused(folder, "lacks 1", name, kinds=InvalidInput)
    save_file(whole | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}, path)
    refused(folder, "beyond what its config describes", "q_proj.bias")
    save_file(whole | {name: torch.zeros(13, 24)}, path)
    refused(folder, "shape")


def test_tied_heads(folder):
    """C19"""
    CORPUS["C19 tied, another"].damage(folder)
    refused(folder, "lm_head.weight differs from the embedding", "tie_word_embeddings=false")
    CORPUS["C19 tied, the same"].damage(folder)
    assert rehead.load(folder).config.tie_embeddings
    CORPUS["C19 untied, absent"].damage(folder)
    refused(folder, "lacks 1", "lm_head.weight")


def test_weights_that_are_not_finite_are_named(folder):
    """C17: whoever only looks at such a model may."""
    CORPUS["C17 NaN in lm_head.weight"].damage(folder)
    with pytest.warns(UserWarning, match=r"1 weights hold NaN or infinity: head\.weight"):
        rehead.load(folder)


def test_links_pipes_and_folders_are_no_weights(folder, tmp_path_factory):
    """C22: nothing outside is opened, nothing blocks."""
    path, elsewhere = folder / "model.safetensors", tmp_path_factory.mktemp("elsewhere") / "w.safetensors"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    refused(folder, "link out of its folder")
    path.unlink()
    os.mkfifo(path)
    refused(folder, "not a regular file")


def test_the_hugging_face_cache_is_read_through_its_links(folder, tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(cache / "blobs" / name[:3])
        (snapshot / name).symlink_to(f"../../blobs/{name[:3]}")
    assert rehead.load(snapshot).config.n_layer == 1


def test_a_config_is_held_against_its_manifest(tmp_path):
    """What reads only the config, as `rehead plan` does, checks that one file and no weights."""
    native_folder(tmp_path / "model")
    CORPUS["C34 weights gone"].damage(tmp_path / "model")
    assert read_config(tmp_path / "model").n_layer == 1
    CORPUS["C34 config changed"].damage(tmp_path / "model")
    with pytest.raises(IntegrityError, match=r"config\.json is damaged"):
        read_config(tmp_path / "model")


def test_a_config_yaml_in_a_model_folder_names_no_text(folder, tmp_path):
    """It would make `rehead convert` read any file of this machine."""
    (tmp_path / "secret.txt").write_text("abc " * 999)
    (folder / "config.yaml").write_text(
        f"system:\ndata:\n  path: {tmp_path / 'secret.txt'}\nmodel:\ntrainer:\n"
    )
    from rehead.conversion import Target
    from rehead.conversion.folder import convert_folder

    certificate = convert_folder(folder, tmp_path / "out", Target(to="mha"))
    assert certificate.calibration == []
    assert certificate.test is None


def test_an_index_says_how_much_there_is(tmp_path):
    """Right, or not at all."""
    sharded_folder(tmp_path / "model")
    assert rehead.load(tmp_path / "model").config.n_layer == 1
    index = tmp_path / "model" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["metadata"]
    index.write_text(json.dumps(table))
    assert rehead.load(tmp_path / "model").config.n_layer == 1


def test_a_missing_file_of_an_index_is_named(tmp_path):
    sharded_folder(tmp_path / "model")
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    refused(
        tmp_path / "model",
        "index.json names model-00002-of-00002.safetensors, which does not exist: download",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_offsets": [0, 24, 48]}, "data_offsets [0, 24, 48]: expected a beginning and an end"),
        ({"data_offsets": []}, "data_offsets []: expected a beginning and an end"),
        ({"stride": [3, 1]}, "'a': expected dtype, shape and data_offsets"),
    ],
)
def test_what_a_tensor_says_of_itself(change, words, folder):
    (folder / "model.safetensors").write_bytes(file_of(one(**change), bytes(24)))
    refused(folder, words, kinds=InvalidInput)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((5, 16, 48), "c_attn.weight has shape [5, 16, 48], expected 3 equal parts"),
        ((6, 16, 48), "q_proj.weight has shape [2, 16, 48], the config says [16, 16]"),
        ((16, 47), "c_attn.weight has shape [16, 47], expected 3 equal parts"),
        ((48,), "q_proj.weight has shape [16], the config says [16, 16]"),
        ((), "c_attn.weight has shape [], expected 3 equal parts"),
    ],
)
def test_a_stacked_tensor_of_another_shape_is_refused(shape, words, tmp_path):
    """GPT-2's queries, keys and values are one tensor, which is transposed."""
    config = ModelOptions(n_layer=1, n_embd=16, n_query_head=2).resolve(11, 16)
    stock.export(build(config).float(), tmp_path / "model", families["gpt2"], {})
    (tmp_path / "model" / "MANIFEST.json").unlink()
    path = tmp_path / "model" / "model.safetensors"
    name = "transformer.h.0.attn.c_attn.weight"
    assert load_file(path)[name].shape == (16, 48)
    save_file(load_file(path) | {name: torch.zeros(shape)}, path)
    refused(tmp_path / "model", words, kinds=InvalidInput)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": 10**400}, "is too large. Use at most 1.7976931348623157e+308."),
        ({"attention_dropout": -(10**400)}, "is too large. Use at most"),
        ({"rope_theta": 10**400}, "rope_theta=1000000000000000000000000000000000000000 is too large"),
        (
            {"rope_parameters": {"rope_theta": 10**400}},
            "rope_theta=1000000000000000000000000000000000000000: expected",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 10**400}},
            "expected a number",
        ),
        (
            {"rope_parameters": {"rope_theta": 5000.0}, "rope_theta": 6000.0},
            "5000.0 in rope_parameters and 6000.0 out",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "rope_type default with factor"),
        (
            {"rope_parameters": {"rope_type": ["linear"], "rope_theta": 1e4}},
            "rope_type=['linear']: rehead knows",
        ),
        ({"hidden_size": 2**24 + 1}, "hidden_size=16777217 is too large. Use at most 16,777,216."),
        ({"rms_norm_eps": None}, "rms_norm_eps=null, which the stock class does not read"),
        ({"max_position_embeddings": 3.0}, "max_position_embeddings=3.0: expected int"),
    ],
)
def test_numbers_of_a_stock_config(change, words, folder):
    """JSON has whole numbers that no float holds."""
    table = json.loads((folder / "config.json").read_text())
    if "rope_parameters" in change:
        table.pop("rope_theta", None)
    (folder / "config.json").write_text(json.dumps(table | change))
    refused(folder, words, kinds=InvalidInput)


ENDS = {  # of the floats: a model with such a scale, and the classes that can represent it
    "score 1e-160": ("mha", {}, 1e-160, {"granite"}),
    "score 5e-324": ("mha", {}, 5e-324, {"granite"}),
    "score 1e300": ("mha", {}, 1e300, {"granite"}),
    "logits 1e308": ("mla", {"logit_scale": 1e308}, None, set()),
    "residual 5e-324": ("mla", {"residual_scale": 5e-324}, None, {"minicpm3"}),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_scale_at_the_ends_of_the_floats_is_written_or_refused(name):
    """`export` asks one class after the other."""
    attention, changes, score, classes = ENDS[name]
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    flags = ModelOptions(shape="llama", n_layer=1, n_embd=16, n_query_head=2, attention=attention, **dropout)
    config = replace(flags.resolve(11, 16), **changes)
    if score is not None:
        config = replace(config, attention=(replace(config.attention[0], score=ScaledDot(scale=score)),))
    written = set()
    for kind in families:
        with suppress(ConfigError):
            table = json.loads(json.dumps(families[kind].write(config), allow_nan=False))
            assert stock.read_config(table, kind) == config
            written.add(kind)
    assert written == classes


def test_whole_numbers_are_no_weights(folder):
    path = folder / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.0.self_attn.v_proj.weight"
    save_file(whole | {name: whole[name].long()}, path)
    refused(folder, f"{name} holds 'I64'", "nothing quantised", kinds=InvalidInput)


def test_the_reading_of_large_files_is_shown(tmp_path, monkeypatch):
    sharded_folder(tmp_path / "model")
    digests = {file: sha256(file) for file in sorted((tmp_path / "model").glob("*.safetensors"))}
    assert len(digests) == 2
    weights = shards.Shards(tmp_path / "model")
    for least, shown in ((2**28, []), (2, [f"checking {tmp_path / 'model'}"])):
        monkeypatch.setattr(shards, "LONG", least)
        stages = []
        with listening(stages.append):
            assert weights.digests() == digests
        assert [stage.title for stage in stages if stage.state == "begun"] == shown
        assert [stage.done for stage in stages if stage.state == "ended"] == [2] * len(shown)


def test_more_files_than_are_open_at_once(folder, tmp_path):
    """Each tensor in a file of its own; all are read, in both directions, and one that changes is noticed."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"{name}.{row}": one for name, weight in whole.items() for row, one in enumerate(weight)}
    assert len(parts) > 2 * opened.MOST_OPEN
    for name, weight in parts.items():
        save_file({name: weight.contiguous()}, folder / f"{name}.safetensors")
    places = {name: f"{name}.safetensors" for name in parts}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    weights = shards.Shards(folder)
    for name in [*parts, *reversed(parts)]:
        assert torch.equal(weights.read(name), parts[name])
    descriptors = Path("/proc/self/fd")
    files = [Path(os.readlink(one)) for one in descriptors.iterdir() if one.is_symlink()]
    assert sum(file.parent == folder for file in files) == opened.MOST_OPEN
    last = [*parts][-1]
    save_file({last: parts[last].new_zeros(parts[last].shape)}, folder / "other")
    os.utime(folder / "other", ns=(1, 1))
    (folder / "other").rename(folder / f"{last}.safetensors")
    for name in [*parts][:-1]:
        weights.read(name)
    with pytest.raises(IntegrityError, match=f"{last}.safetensors changed while it was read"):
        weights.read(last)
    first = next(iter(parts))
    (folder / f"{first}.safetensors").unlink()
    assert torch.equal(weights.read(first), parts[first])  # open since the beginning
    gone = [*parts][-2]
    (folder / f"{gone}.safetensors").unlink()
    with pytest.raises(IntegrityError, match=f"{gone}.safetensors cannot be read: No such file or directory"):
        weights.read(gone)


def test_a_cast_that_overflows_is_no_damage(folder, tmp_path):
    """The file is sound: the dtype asked for is what cannot hold it."""
    large, damaged = tmp_path / "large", tmp_path / "damaged"
    model = rehead.load(folder)
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    rehead.save(model, large)
    for dtype in (None, torch.float32, torch.bfloat16):
        assert rehead.load(large, dtype=dtype).head.weight[0, 0].item() == pytest.approx(1e6, rel=1e-2)
    for in_memory in (True, False):
        with pytest.raises(
            NumericError, match=r"large: head\.weight leaves the range of float16: use bfloat16 or float32\.$"
        ):
            rehead.load(large, dtype=torch.float16, in_memory=in_memory)
    with torch.no_grad():
        model.head.weight[0, 0] = float("inf")
    rehead.save(model, damaged)
    with pytest.warns(UserWarning, match="1 weights hold NaN or infinity"):
        rehead.load(damaged, dtype=torch.float16)


def test_another_total_size_is_told_of_and_read_all_the_same(tmp_path):
    """transformers does not look at it, and tools write the sizes of files there, or 0."""
    sharded_folder(tmp_path / "model")
    before = rehead.load(tmp_path / "model").state_dict()
    CORPUS["C20 total_size"].damage(tmp_path / "model")
    with pytest.warns(
        UserWarning, match="total_size=1, its files hold [0-9,]+ bytes of weights. They are read."
    ):
        after = rehead.load(tmp_path / "model").state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
