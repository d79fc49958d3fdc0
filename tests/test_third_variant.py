"""A variant that nothing but the roster knows: every command works with it, or refuses it by name in one line."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import rehead
from rehead.attention import Attention, AttentionConfig, kernels, variants
from rehead.cli import main
from rehead.config import ModelOptions, model_options
from rehead.conversion.base import heads_of
from rehead.conversion.export.deepseek import to_deepseek
from rehead.errors import ConfigError
from rehead.measure.parts import parts
from rehead.model import build


@dataclass(frozen=True, kw_only=True)
class BagConfig(AttentionConfig):
    """Each token gathers the mean of what it sees: no queries, no keys, one value of `head_dim` per token."""

    head_dim: int

    @classmethod
    def examples(cls):
        return {"bag": cls(head_dim=7)}

    @property
    def name(self):
        return "bag"

    def build(self, d_model):
        return Bag(self, d_model)

    def cache_rows(self):
        return {"value": (1, self.head_dim)}

    def n_parameters(self, d_model):
        return 2 * d_model * self.head_dim

    def projection_flops(self, d_model):
        return 4 * d_model * self.head_dim

    def attention_flops(self, n_key):
        return 2 * self.head_dim * n_key


class Bag(Attention):
    def __init__(self, config, d_model):
        super().__init__()
        self.config = config
        self.v_proj = nn.Linear(d_model, config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.head_dim, d_model, bias=False)

    def forward(self, x, context=None, positions=None, cache=None, context_positions=None):
        value, key_positions = self.v_proj(x)[:, :, None], positions
        if cache is not None:
            rows, key_positions = cache.append(positions, value=value)
            value = rows["value"]
        mask = self._mask(x.shape[1], value.shape[1], positions, key_positions)
        query = x.new_zeros(*x.shape[:2], 1, 1)
        gathered = kernels.attend(query, torch.zeros_like(value[..., :1]), value, mask, pdrop=self._pdrop)
        return self.o_proj(gathered.flatten(2))

    def weights(self, x, context=None, positions=None, context_positions=None):
        seen = self._mask(x.shape[1], x.shape[1], positions, positions).dense(x.device)
        seen = torch.ones(1, 1, 1, dtype=torch.bool) if seen is None else seen
        return (seen / seen.sum(-1, keepdim=True)).to(x.dtype).expand(len(x), -1, -1)[:, None]


@pytest.fixture(autouse=True)
def _bag(monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(variants, "_entries", dict(variants._entries))
    variants.add("bag")(BagConfig)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("O God, O God! How weary, stale, flat\n" * 40)


TINY = [
    "model.n_layer=2",
    "model.n_embd=12",
    "trainer.batch_size=2",
    "trainer.eval_batches=1",
    "trainer.max_iters=2",
]
TRAIN = ["train", "data.path=text.txt", "data.block_size=16", "model.head_dim=5", "model.rope=False", *TINY]


@pytest.fixture
def run(capfd):
    assert main([*TRAIN, "model.attention=bag", "system.work_dir=run"]) == 0
    capfd.readouterr()


def said(capfd, *argv):
    """Exit status, what --json gave, and stderr."""
    capfd.readouterr()
    code = main(list(argv))
    out, err = capfd.readouterr()
    return code, json.loads(out) if out.strip() else None, err


def test_what_works_without_knowing_it(run, capfd):
    assert (
        json.loads(Path("run/checkpoints/step-000002/config.json").read_text())["attention"][0]["variant"]
        == "bag"
    )
    texts = [
        said(capfd, "generate", "run", "--prompt", "O", "--temperature", "0", "--max-new-tokens", n, "--json")
        for n in ("4", "40")  # past its context
    ]
    assert [code for code, _, _ in texts] == [0, 0]
    code, found, _ = said(capfd, "eval", "run", "--data", "text.txt", "--json")
    assert code == 0
    assert found["tokens"] > 100
    code, found, _ = said(capfd, "inspect", "run", "--text", "O God", "--json")
    assert code == 0
    code, found, _ = said(capfd, "plan", "run", "--json", "--parts")
    assert code == 0
    assert [row["variant"] for row in found["rows"]] == ["bag"]
    assert found["rows"][0]["kv_bytes_per_token"] == 2 * 5 * 4
    assert found["advice"].startswith(
        "bag: no conversion starts from this attention, only from mha, gqa, mqa, mla"
    )
    sizes = ["--prompt-lengths", "8", "--new-tokens", "3", "--rounds", "1"]
    code, found, _ = said(capfd, "bench", "run", *sizes, "--explain", "--json")
    assert code == 0
    assert "it has a Bag" in found["explain"][0]
    assert found["explain"][2:] == [
        "layers 0, 1, bag, prompts: this variant does not say", "layers 0, 1, bag, training: this variant does not say"
    ]  # fmt: skip
    assert found["cases"][0]["cache_bytes_held"] == found["cases"][0]["cache_bytes_predicted"]
    assert found["cases"][0]["same_tokens"]


def test_what_is_refused_by_name(run, capfd):
    for argv, code, words in (
        (["convert", "run", "out", "--to", "mqa"], 2, "bag: no conversion starts from this attention"),
        (["convert", "run", "out", "--to", "mla", "--kv-fraction", "0.5"], 2, "bag: no conversion starts"),
        (["convert", "run", "out", "--head-map", "modular"], 2, "--head-map modular means nothing for bag"),
        (["export", "run", "out"], 2, "can represent this model"),
        (["export", "run", "out", "--format", "llama"], 2, "attention"),
    ):
        found, _, err = said(capfd, *argv)
        assert found == code, err
        assert words in err
        assert len(err.strip().splitlines()) == 1
        assert not Path("out").exists()


def test_in_python():
    model = build(ModelOptions(attention="bag", head_dim=5, n_layer=1).resolve(11, 8))
    for to in ("mha", model.config.attention[0].__class__(head_dim=6)):
        with pytest.raises(
            ConfigError,
            match=r"bag: no conversion starts from (it\.|this attention, only from mha)",
        ):
            rehead.convert(model, to=to)
    llama = build(
        ModelOptions(attention="bag", head_dim=5, n_layer=1, shape="llama", rope=False).resolve(11, 8)
    )
    with pytest.raises(ConfigError, match=r"learned_positions=True|no conversion starts"):
        to_deepseek(llama, "transformers")
    with pytest.raises(ConfigError, match=r"bag: .* Keep it as it is\."):
        heads_of(BagConfig(head_dim=3))


def test_flags_come_from_the_roster():
    with pytest.raises(
        ConfigError, match=r"model.attention='bog' is not a known attention\. Did you mean 'bag'. Known: mha,"
    ):
        ModelOptions(attention="bog").resolve(11, 8)
    with pytest.raises(ConfigError, match=r"model.n_kv_head=2 has no effect with model.attention=bag"):
        ModelOptions(attention="bag", head_dim=5, n_kv_head=2).resolve(11, 8)
    assert ModelOptions(attention="bag", n_layer=1).resolve(11, 8).attention[0].head_dim == 32


def test_help_names_the_roster(monkeypatch):
    monkeypatch.undo()
    source = Path(model_options.__file__).read_text()
    line = source.split("    attention: str | None = None\n")[1].splitlines()[0]
    assert [name for name in variants if name not in line.replace(",", " ").split()] == []


def test_a_study_of_it(capfd):
    flags = [*TRAIN[1:], "trainer.max_iters=1", "model.n_kv_head=null"]
    flags.remove("trainer.max_iters=2")
    Path("study.yaml").write_text(
        "about: A toy beside MHA.\nvariants:\n  Bag: {model: {attention: bag}}\n  MHA: {model: {attention: mha}}\n"
    )
    code = main(["study", "--preset", "study.yaml", "system.work_dir=out/study", *flags[:-1]])
    assert code == 0, capfd.readouterr().err
    assert Path("out/study/report.html").exists()


def test_parts_of_a_layer_without_o_proj_are_refused_by_name(monkeypatch):
    build = BagConfig.build

    def other_name(self, d_model):
        module = build(self, d_model)
        module.out = module.o_proj
        del module.o_proj
        return module

    monkeypatch.setattr(BagConfig, "build", other_name)
    with pytest.raises(
        ConfigError, match=r"bag has no weight o_proj\.weight\. Name its output projection o_proj"
    ):
        parts(BagConfig(head_dim=7), 12, 9)
