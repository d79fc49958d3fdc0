"""A source that changes while it is converted or exported: an error, and nothing is published."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint.files.shards import Shards
from rehead.checkpoint.gguf import file as gguf_file
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.errors import IntegrityError
from rehead.model import build
from rehead.tokenizer import OpenedModel, train

CONVERT = ["convert", "source", "made", "--to", "mla"]
pytestmark = pytest.mark.heavy
EXPORT = ["export", "source", "made"]
SAID = "source/model.safetensors changed while it was read: nothing of it can be relied on. Start again when nothing"


def save(folder, n_layer):
    options = ModelOptions(
        shape="llama", n_layer=n_layer, n_embd=24, n_query_head=6, n_kv_head=3, head_dim=4, rope=True
    )
    rehead.save(build(options.resolve(29, 32)), folder, overwrite=True)


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("source"), 2)
    return Path("source")


def flip(file, keep_time):
    """Change the last bit of every tensor, in the same file."""
    before = file.stat()
    whole = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(whole[:8], "little")
    for at in range(begin, len(whole), 8):
        whole[at] ^= 1
    with file.open("r+b") as out:
        out.write(whole)
    if keep_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file, keep_time):
    """Put another file under its name; the one that is read stays what it is."""
    file.rename("old")
    shutil.copy2("old", file)
    flip(file, keep_time)


def converted(monkeypatch, words, n, change, keep_time):
    """The exit status of a command in which `change` comes before the n-th read of a weight; whether it came."""
    read, reads = Shards.read, []

    def watched(shards, name):
        if shards.folder.name == "source":
            reads.append(name)
            if len(reads) == n:
                change(shards.folder / "model.safetensors", keep_time)
        return read(shards, name)

    with monkeypatch.context() as patch:
        patch.setattr(Shards, "read", watched)
        return main(words), len(reads) >= n


@pytest.mark.parametrize("words", [CONVERT, EXPORT], ids=["convert", "export"])
@pytest.mark.parametrize("keep_time", [False, True])
def test_a_change_at_any_read_ends_it(words, keep_time, source, monkeypatch, capfd):
    shutil.copytree(source, "whole")
    n, step = 1, 11
    while True:
        status, came = converted(monkeypatch, words, n, flip, keep_time)
        if not came:
            break
        assert status == 4, n
        assert SAID in capfd.readouterr().err
        assert sorted(os.listdir()) == ["source", "whole"], n
        shutil.rmtree(source)
        shutil.copytree("whole", source)
        n += step
    assert n > 2 * step
    assert status == 0
    rehead.load("made")


def test_a_source_whose_file_is_replaced_ends_it(source, monkeypatch, capfd):
    """Nothing is published of a folder that is no longer whole."""
    assert converted(monkeypatch, CONVERT, 5, replace, False) == (4, True)
    assert "source/model.safetensors is damaged" in capfd.readouterr().err
    assert sorted(os.listdir()) == ["old", "source"]


def test_what_was_changed_between_the_check_and_the_first_read_is_noticed(source, monkeypatch, capfd):
    init = Shards.__init__

    def late(shards, folder):
        if folder.name == "source":
            flip(folder / "model.safetensors", True)
        init(shards, folder)

    monkeypatch.setattr(Shards, "__init__", late)
    assert main(CONVERT) == 4
    assert SAID in capfd.readouterr().err


def test_a_folder_without_a_manifest_is_held_to_what_it_was_at_the_start(source, monkeypatch, capfd):
    assert main(["export", "source", "stock"]) == 0
    Path("stock/MANIFEST.json").unlink()
    shutil.rmtree(source)
    Path("stock").rename(source)
    for n in (1, 30):
        whole = Path("source/model.safetensors").read_bytes()
        assert converted(monkeypatch, CONVERT, n, flip, True) == ((0, True) if n == 1 else (4, True))
        shutil.rmtree("made", ignore_errors=True)
        Path("source/model.safetensors").write_bytes(whole)


def test_a_loaded_model_that_stays_in_its_file_notices_it_too(source):
    model = rehead.load(source, in_memory=False)
    ids = torch.randint(29, (1, 5))
    model(ids)
    flip(source / "model.safetensors", False)
    with pytest.raises(rehead.errors.IntegrityError, match="changed while it was read"):
        model(ids)


def open_below(folder):
    """The number of files of a folder that this process has open."""
    handles = [Path("/proc/self/fd") / handle for handle in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(handle).startswith(f"{folder.resolve()}/") for handle in handles)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the files that are open now need /proc")
def test_of_many_files_sixteen_are_open_at_once(source, monkeypatch):
    """Of 1,173 files as of 40: many systems let a process open 1,024."""
    save(source, 4)
    assert main(CONVERT) == 0
    expected = load_file("made/model.safetensors")
    shutil.rmtree("made")
    weights = load_file("source/model.safetensors")
    source.rename("whole")
    source.mkdir()
    shutil.copy("whole/config.json", source)
    places = {}
    for number, (name, weight) in enumerate(weights.items(), 1):
        places[name] = f"model-{number:05}-of-{len(weights):05}.safetensors"
        save_file({name: weight}, source / places[name])
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    read, counts = Shards.read, []

    def watched(shards, name):
        counts.append(open_below(source))
        return read(shards, name)

    monkeypatch.setattr(Shards, "read", watched)
    assert main(CONVERT) == 0
    assert len(places) > 2 * max(counts)
    assert max(counts) == 16
    made = load_file("made/model.safetensors")
    assert all(torch.equal(made[name], expected[name]) for name in expected)


@pytest.mark.parametrize("words", [EXPORT, ["export", "source", "made.gguf", "--format", "gguf"], CONVERT])
def test_a_checkpoint_dropped_meanwhile_loses_no_text(words, source, monkeypatch):
    """Its run drops it for newer ones; the weights stay readable, and what stands beside them is read before."""
    template = "{{ messages }}"
    shutil.copytree(source, "run/checkpoints/step-000001")
    kept = Path("run/checkpoints/step-000001")
    shutil.rmtree(kept)
    tokenizer = train("byte", "abc")
    options = ModelOptions(
        shape="llama", n_layer=1, n_embd=24, n_query_head=6, n_kv_head=3, head_dim=4, rope=True
    )
    files = {"tokenizer.json": tokenizer.to_json(), "chat_template.jinja": template}
    files["README.md"] = "---\nlicense: mit\n---\n"
    rehead.save(build(options.resolve(256, 32)), kept, files=files)
    require, calls = OpenedModel.require_standing, []

    def dropping(opened):
        require(opened)
        calls.append(opened)
        if len(calls) == 2:  # once it is opened, and once its texts are read
            shutil.rmtree(kept)

    monkeypatch.setattr(OpenedModel, "require_standing", dropping)
    assert main([*words[:1], str(kept), *words[2:]]) == 0
    assert not kept.exists()
    if words[2].endswith(".gguf"):
        facts = gguf_file.File(Path("made.gguf")).facts
        assert (facts["tokenizer.chat_template"], facts["general.license"]) == (template, "mit")
    else:
        assert Path("made/chat_template.jinja").read_text() == template
        assert "license: mit" in Path("made/README.md").read_text()


def test_a_checkpoint_dropped_before_its_texts_are_read_is_an_error(source, monkeypatch):
    gone = OpenedModel(folder=Path("gone/source"), model=rehead.load(source), tokenizer=None, special={})
    with pytest.raises(IntegrityError, match="source changed while it was read"):
        gone.require_standing()
