"""What a conversion is asked for is done, or refused before any work; work that was done is not done again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.cli import main
from rehead.conversion import converter as converting
from rehead.conversion.base import CannotConvert
from rehead.conversion.converter import Converter
from rehead.conversion.fit.turns import Turns
from rehead.conversion.kept import Kept
from rehead.conversion.plan import plan
from rehead.conversion.ranks import Allocation
from rehead.conversion.search import path
from rehead.conversion.target import Target
from rehead.conversion.texts import Passage
from rehead.errors import ConfigError, InvalidInput
from rehead.model import build
from small import llama_shaped

GQA = GroupedConfig(n_query_head=6, n_kv_head=3, head_dim=8, rope=RopeConfig(theta=100.0))
UNEVEN = {"to": "mla", "target": "uneven", "kv_fraction": 0.5}


@pytest.fixture
def model(gpt):
    return gpt(GQA, n_step=3)


@pytest.fixture
def read(monkeypatch):
    """The needs of every pass over the text."""
    passes, gather = [], converting.gather
    monkeypatch.setattr(
        converting,
        "gather",
        lambda *given, needs, **more: (passes.append(sorted(needs)), gather(*given, needs=needs, **more))[1],
    )
    return passes


def text(words, n=300):
    return [Passage(name="text", ids=words(n))]


@pytest.mark.parametrize("target", ["uneven", "rebuilt"])
def test_a_layout_is_that_asked_for(target, model, words, apart):
    given = {"calibration": words(300), "length": 16, "kv_fraction": 0.5, "target": target}
    usual, _ = rehead.convert(model, "mla", **given)
    turned, _ = rehead.convert(model, "mla", rope_layout="interleaved", **given)
    assert [one.config.attention[0].rope.layout for one in (usual, turned)] == ["half-split", "interleaved"]
    assert apart(usual, turned) < 1e-6


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (UNEVEN | {"method": "procrustes"}, ConfigError, "procrustes"),
        ({"to": "mla", "kv_fraction": 0.5, "test": [1]}, InvalidInput, "leaves nothing to predict"),
        ({"to": "mla", "kv_fraction": 0.5, "teach": 2, "n": 17}, InvalidInput, "a single window"),
        (UNEVEN | {"teach": 2, "n": 17}, InvalidInput, "a single window"),
        (UNEVEN | {"kv_fraction": 0.05}, ConfigError, "kv_fraction=0.05 is 2 of 48 numbers"),
    ],
)
def test_refused_before_a_text_is_read(given, error, said, model, words, read):
    n = given.pop("n", 300) if "n" in given else 300
    options = {name: value for name, value in given.items() if name != "n"}
    with pytest.raises(error, match=said):
        rehead.convert(model, calibration=words(n), length=16, **options)
    assert read == []


def test_nothing_is_sampled_in_windows_of_one_token(model):
    with pytest.raises(ConfigError, match="length=1: nothing is sampled in a window of one token"):
        rehead.convert(model, "mla", kv_fraction=0.5, calibration="self", length=1)


def test_a_rotary_part_is_not_rebuilt(model, words):
    """Not called what was asked for."""
    uneven, _ = rehead.convert(model, calibration=words(300), length=16, **UNEVEN)
    with pytest.raises(ConfigError, match="target=rebuilt: this MLA has a rotary part"):
        rehead.convert(uneven, "mla", target="rebuilt")


def test_what_the_second_step_is_fitted_to_is_kept(model, words, read, tmp_path):
    """For --resume; and nothing is read for layers that are done."""
    wanted = None
    for kept_layers in (None, "0-", "all"):
        converter = Converter(model, None, text(words), length=16, scratch=tmp_path)
        targets = converter.attentions(Target(**UNEVEN))
        kept = converter.kept(targets, 1)
        if kept_layers == "0-":  # as if killed in the second turn
            for place in kept.folder.glob("1-*"):
                place.rename(place.with_name("gone-" + place.name))
        result, _ = converter.convert(targets, kept=kept)
        state = {name: weight.clone() for name, weight in result.state_dict().items()}
        wanted = wanted or state
        assert all(torch.equal(state[name], weight) for name, weight in wanted.items())
    assert read[:2] == [["turns"], ["pair"]]
    again = [needs for needs in read[2:] if needs == ["pair"]]
    assert len(again) == 1  # asked for the layers that were lost, and read from files
    assert isinstance(kept, Kept)


@pytest.mark.parametrize(("n_text", "length"), [(2, 8192), (2, 16_384), (3, 4096), (5, 2048), (1, 16_384)])
def test_every_text_has_a_say_in_what_rotates(n_text, length, monkeypatch):
    """At least a window of each, also where a window alone is all that is read of one text."""
    each = max(1, 49_152 // n_text // length)
    seen = []
    monkeypatch.setattr(
        "rehead.conversion.fit.turns._of_text",
        lambda _, x, __: (seen.append(int(x[0, 0, 0])), torch.zeros(1))[1],
    )
    turns = Turns(n_text * each * length, n_text * length)
    for window in range(n_text * each):
        turns.add(None, torch.full((1, 1, 1), float(window)), torch.zeros(1, 1, 1))
    assert {window // each for window in seen} == set(range(n_text))
    assert len(seen) <= max(n_text, 4)


def test_many_layers_are_allotted_at_once():
    """80 layers, 20 ranks: less damage than one rank everywhere (test_ranks.py has all choices of few layers)."""
    latent = LatentConfig(n_query_head=6, kv_lora_rank=1, qk_nope_head_dim=4, v_head_dim=4, latent_norm=False)
    random = np.random.default_rng(0)
    table = object.__new__(Allocation)
    table.grids = [[replace(latent, kv_lora_rank=rank) for rank in range(100, 2001, 100)] for _ in range(80)]
    table.damages = [sorted(random.random(20), reverse=True) for _ in range(80)]
    chosen = table._cheapest(80_000)
    assert sum(one.kv_lora_rank for one in chosen) <= 80_000
    even = sum(row[9] for row in table.damages)
    assert (
        sum(row[one.kv_lora_rank // 100 - 1] for row, one in zip(table.damages, chosen, strict=True)) < even
    )
    assert table._cheapest(7_999) is None


def test_a_plan_of_layers_of_which_the_first_has_no_rope():
    layers = (replace(GQA, rope=None), GQA)
    both = [
        {row.command for row in plan(llama_shaped(*order, vocab_size=29, n_embd=48, n_hidden=31), 64).rows}
        for order in (layers, layers[::-1])
    ]
    assert any("uneven" in command for command in both[0])
    assert both[0] == both[1]


def test_a_rank_that_no_factor_has_is_refused_where_the_steps_are_sought():
    wide = LatentConfig(
        n_query_head=6, n_kv_head=1, kv_lora_rank=24, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
    )
    with pytest.raises(CannotConvert):
        path(wide, replace(wide, kv_lora_rank=13), 23)  # 9 numbers hold all
    assert path(wide, replace(wide, kv_lora_rank=9), 23)[0].promise.exact


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({"head_dim": 256, "n_kv_head": 4}, {}, "heads of 256 numbers that do not rotate|hold 128"),
        ({"head_dim": 128, "n_kv_head": 8}, {"kv_fraction": 0.5}, "the kernels of engines take 512"),
    ],
)
@pytest.mark.filterwarnings("always:vLLM and SGLang cannot serve")
def test_a_canonical_result_that_no_server_takes_is_told_of(
    changes, asked, said, tmp_path, monkeypatch, capsys
):
    """Before hours of work, as a class that is missing is."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    heads = GroupedConfig(**{"n_query_head": 8, "rope": RopeConfig()} | changes)
    rehead.save(build(llama_shaped(heads, vocab_size=29, n_embd=1400, n_hidden=31)), Path("model"))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    words = ["convert", "model", "out", "--to", "mla", "--target", "canonical", *flags, "--length", "16"]
    words += ["--method", "svd"]
    assert main([*words, "--allow-loss"]) == 0
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "cannot serve the result" in one]
    assert any(part in line for part in said.split("|"))


@pytest.mark.filterwarnings("always:vLLM's kernels know")
@pytest.mark.parametrize(("fraction", "said"), [
    (0.5, "caches of 320, 512 and 576 numbers per token and layer: an export for vLLM pads the 256 of this one to 320, "
    "62.5 % of the source's"),
    (0.625, None),
])  # fmt: skip
def test_a_cache_that_vllm_pads_is_told_of(fraction, said, tmp_path, monkeypatch, capsys):
    """And its export has that many numbers."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    heads = GroupedConfig(n_query_head=4, n_kv_head=4, head_dim=64, rope=RopeConfig())
    rehead.save(build(llama_shaped(heads, vocab_size=29, n_embd=512, n_hidden=31)), Path("model"))
    words = [
        "convert",
        "model",
        "out",
        "--to",
        "mla",
        "--target",
        "canonical",
        "--length",
        "16",
        "--allow-loss",
    ]
    assert main([*words, "--kv-fraction", str(fraction)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "vLLM's kernels" in line]
    assert said in lines[0] if said else not lines
    assert main(["export", "out", "served", "--for", "vllm"]) == 0
    config = json.loads(Path("served/config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 320


def test_biases_of_the_output_alone_are_refused_with_canonical():
    with pytest.raises(ConfigError, match="its attention has biases, which vLLM's and SGLang's"):
        Target(to="mla", target="canonical").attention(
            replace(GQA, head_dim=64, n_query_head=8, n_kv_head=8, o_bias=True), 512
        )


@pytest.mark.parametrize("n_kv_head", [1, 3])
def test_an_export_for_llama_cpp_does_not_speak_of_a_rope_that_is_not_there(
    n_kv_head, tmp_path, monkeypatch, capsys
):
    """A scaled model, which llama.cpp's llama is not, and whose heads rotate side by side as DeepSeek's."""
    monkeypatch.chdir(tmp_path)
    heads = replace(GQA, n_kv_head=n_kv_head)
    config = llama_shaped(heads, vocab_size=29, n_embd=48, n_hidden=31)
    rehead.save(build(replace(config, residual_scale=0.5)).float(), Path("model"))
    assert main(["export", "model", "out.gguf", "--format", "gguf"]) != 0
    said = capsys.readouterr().err
    assert ("3 KV heads would rotate side by side, as a longrope" in said) == (n_kv_head == 3)


def test_a_method_is_refused_before_a_text_is_sampled(tmp_path, monkeypatch, capsys):
    """As typed: `self` takes minutes on a model of somebody's."""
    monkeypatch.chdir(tmp_path)
    rehead.save(build(llama_shaped(GQA, vocab_size=29, n_embd=48, n_hidden=31)), Path("model"))
    monkeypatch.setattr("rehead.conversion.reading.sampled_once", lambda *_, **__: pytest.fail("sampled"))
    words = ["convert", "model", "out", "--to", "mla", "--target", "uneven", "--kv-fraction", "0.5"]
    assert main([*words, "--calibration", "self", "--method", "procrustes", "--length", "16"]) == 2
    assert "procrustes belongs to pool-heads" in capsys.readouterr().err
