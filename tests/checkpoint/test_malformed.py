"""What is said of folders nobody should trust; that all of them are refused, test_corpus.py shows."""

import json
import os
import shutil

import pytest
import torch
from corpus import CORPUS, native_folder, sharded_folder, stock_folder
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint import read_config
from rehead.errors import IntegrityError, InvalidInput, NumericError


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
    "C03 trailing bytes": "download it again",
    "C06 a tensor twice": "a key appears twice",
    "C07 hole": "a hole or an overlap",
    "C09 F8_E4M3": "nothing quantised",
    "C20 total_size": "total_size=1",
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
    (folder / "config.yaml").write_text(f"data: {{path: {tmp_path / 'secret.txt'}}}")
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
