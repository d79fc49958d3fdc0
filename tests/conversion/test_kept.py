"""A step on one layer: the same bits with any number of threads, and from its files."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, RopeConfig
from rehead.config import ModelOptions
from rehead.conversion import Target
from rehead.conversion.base import Statistics
from rehead.conversion.kept import Kept, Order
from rehead.conversion.search import path
from rehead.model import build
from rehead.tokenizer import train
from typed_lines import typed


@pytest.fixture
def order():
    """Two pairs of heads of a layer 384 wide become a latent; so large that two threads sum in another order."""
    layer = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=64, rope=RopeConfig())
    (step,) = path(layer, Target(to="mla", kv_fraction=0.5).attention(layer, 384), 384)
    draw = torch.Generator().manual_seed(0)
    rows = {"q_proj": 384, "k_proj": 128, "v_proj": 128, "o_proj": 384}
    weights = {f"{name}.weight": torch.randn(size, 384, generator=draw) for name, size in rows.items()}
    return Order(
        turn=0, index=3, step=step, method="svd", weights=weights, seen=Statistics(), dtype=torch.float64
    )


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name].detach()) for name in one)


def test_threads_change_no_bit(order):
    alone = order.take()
    torch.set_num_threads(2)
    try:
        pair = order.take()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert same(alone.weights, pair.weights)
    assert (alone.lost, alone.residual) == (pair.lost, pair.residual)


def test_a_kept_layer_is_the_one_that_was_made_and_is_not_made_again(order, tmp_path):
    alone = order.take()
    ((index, first),) = Kept(tmp_path / "layers").take([order])
    unmade = replace(order, weights={})
    ((again, second),) = Kept(tmp_path / "layers").take([unmade])
    assert (index, again) == (3, 3)
    assert same(alone.weights, first.weights)
    assert same(alone.weights, second.weights)
    assert (second.lost, second.residual) == (alone.lost, alone.residual)


def test_a_kept_layer_is_on_the_disk_before_it_has_its_name(order, tmp_path, monkeypatch):
    """A power cut leaves all of it or nothing: its files are flushed, it is renamed, the folder above flushed."""
    events = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(Path, "rename", lambda old, new: (events.append(new.name), rename(old, new))[1])
    list(Kept(tmp_path / "layers").take([order]))
    place = tmp_path / "layers" / "0-3"
    at = events.index("0-3")
    assert {file.stat().st_ino for file in (*place.iterdir(), place)} == set(events[:at])
    assert events[at + 1 :] == [place.parent.stat().st_ino]
    assert {file.name for file in place.iterdir()} == {"figures.json", "model.safetensors"}


def test_only_one_conversion_s_layers_are_kept(order, tmp_path):
    first = Kept.only(tmp_path, ["one"], 1)
    list(first.take([order]))
    assert Kept.only(tmp_path, ["one"], 2).folder == first.folder
    assert (first.folder / "0-3").exists()
    Kept.only(tmp_path, ["other"], 1)
    assert not first.folder.exists()


@pytest.mark.process
def test_more_layers_than_files_may_be_open(tmp_path):
    """At the usual limit of macOS, divided by four."""
    torch.set_default_dtype(torch.float32)
    options = ModelOptions(n_layer=40, n_query_head=2, n_embd=8, shape="llama")
    tokenizer = train("char", "To be, or not to be")
    model = build(options.resolve(tokenizer.vocab_size, 16))
    rehead.save(model, tmp_path / "deep", files={"tokenizer.json": tokenizer.to_json()})
    (tmp_path / "text.txt").write_text("To be, or not to be" * 40)
    words = "--to mla --target uneven --kv-fraction 0.5 --calibration text.txt --length 16 --allow-loss"
    limited = ("sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh")
    [(code, _, error)] = typed(f"convert deep made {words}", cwd=tmp_path, before=limited)
    assert code == 0, error
