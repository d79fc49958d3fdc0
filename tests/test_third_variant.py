"""tests/toy_variant.py, one file and one registration: it keeps the contract, and every command works with it or
refuses it by name in one line.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import rehead
from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, variants
from rehead.checkpoint.huggingface.base import families
from rehead.cli import main
from rehead.config import ModelOptions, decode, encode, model_options
from rehead.conversion.base import heads_of
from rehead.conversion.export.deepseek import to_deepseek
from rehead.conversion.plan import plan
from rehead.errors import ConfigError
from rehead.measure.parts import parts
from rehead.model import build
from toy_variant import ToyAttention, ToyConfig


@pytest.fixture(autouse=True)
def _toy(monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(variants, "_entries", dict(variants._entries))
    variants.add("toy")(ToyConfig)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("O God, O God! How weary, stale, flat\n" * 40)


PLUGIN = """
from rehead.attention import variants
from toy_variant import ToyConfig
variants.add("toy")(ToyConfig)
"""


@pytest.mark.process
def test_it_keeps_the_contract():
    """The contract tests, which read the registry, run on its examples in a process that registers it first."""
    Path("register_toy.py").write_text(PLUGIN)
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}:{tests}"}
    options = [
        "-p",
        "register_toy",
        "-n",
        "0",
        "--jaxtyping-packages=",
        "-p",
        "no:cacheprovider",
        "-k",
        "toy",
    ]
    contract = [tests / "contract" / f"test_{name}.py" for name in ("attention", "dtypes", "steps")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *contract],
        cwd=tests.parent, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 60


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
    assert main([*TRAIN, "model.attention=toy", "system.work_dir=run"]) == 0
    capfd.readouterr()


def said(capfd, *argv):
    """Exit status, what --json gave, and stderr."""
    capfd.readouterr()
    code = main(list(argv))
    out, err = capfd.readouterr()
    return code, json.loads(out) if out.strip() else None, err


def test_what_works_without_knowing_it(run, capfd, monkeypatch):
    assert (
        json.loads(Path("run/checkpoints/step-000002/config.json").read_text())["attention"][0]["variant"]
        == "toy"
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
    assert [row["variant"] for row in found["rows"]] == ["toy"]
    assert found["rows"][0]["kv_bytes_per_token"] == 2 * 5 * 4
    assert found["advice"].startswith(
        "toy: no conversion starts from this attention, only from mha, gqa, mqa, mla"
    )
    code, found, _ = said(capfd, "plan", "run", "--tp", "4", "--json")
    assert code == 0
    assert found["notes"][-1].startswith("6 query heads do not divide among 4 GPUs")
    sizes = ["--prompt-lengths", "8", "--new-tokens", "3", "--rounds", "1"]
    code, found, _ = said(capfd, "bench", "run", *sizes, "--explain", "--json")
    assert code == 0
    assert "C++ decoder" in found["explain"][0]
    assert "layers 0, 1, toy, prompts: 1 to 4 tokens: query heads folded into rows" in found["explain"][2]
    assert found["cases"][0]["cache_bytes_held"] == found["cases"][0]["cache_bytes_predicted"]
    assert found["cases"][0]["same_tokens"]
    for optional in ("lower", "choice"):
        monkeypatch.delattr(ToyAttention, optional)
    code, found, _ = said(capfd, "bench", "run", *sizes, "--explain", "--json")
    assert code == 0
    assert "it has a ToyAttention" in found["explain"][0]
    assert found["explain"][2:] == [
        "layers 0, 1, toy, prompts: this variant does not say", "layers 0, 1, toy, training: this variant does not say"
    ]  # fmt: skip
    assert found["cases"][0]["same_tokens"]


def test_what_is_refused_by_name(run, capfd):
    for argv, code, words in (
        (["convert", "run", "out", "--to", "mqa"], 2, "toy: no conversion starts from this attention"),
        (["convert", "run", "out", "--to", "mla", "--kv-fraction", "0.5"], 2, "toy: no conversion starts"),
        (["convert", "run", "out", "--head-map", "modular"], 2, "--head-map modular means nothing for toy"),
        (["export", "run", "out"], 2, "can represent this model"),
        (["export", "run", "out", "--format", "llama"], 2, "attention"),
    ):
        found, _, err = said(capfd, *argv)
        assert found == code, err
        assert words in err
        assert len(err.strip().splitlines()) == 1
        assert not Path("out").exists()


def test_in_python():
    model = build(ModelOptions(attention="toy", head_dim=5, n_layer=1).resolve(11, 8))
    for to in ("mha", model.config.attention[0].__class__(n_query_head=6, head_dim=6)):
        with pytest.raises(
            ConfigError,
            match=r"toy: no conversion starts from (it\.|this attention, only from mha)",
        ):
            rehead.convert(model, to=to)
    llama = build(
        ModelOptions(attention="toy", head_dim=5, n_layer=1, shape="llama", rope=False).resolve(11, 8)
    )
    with pytest.raises(ConfigError, match=r"learned_positions=True|no conversion starts"):
        to_deepseek(llama, "transformers")
    with pytest.raises(ConfigError, match=r"toy: .* Keep it as it is\."):
        heads_of(ToyConfig(n_query_head=6, head_dim=3))


def test_flags_come_from_the_roster():
    with pytest.raises(
        ConfigError, match=r"model.attention='tyo' is not a known attention\. Did you mean 'toy'. Known: mha,"
    ):
        ModelOptions(attention="tyo").resolve(11, 8)
    with pytest.raises(ConfigError, match=r"model.n_kv_head=2 has no effect with model.attention=toy"):
        ModelOptions(attention="toy", head_dim=5, n_kv_head=2).resolve(11, 8)
    assert ModelOptions(attention="toy", n_layer=1).resolve(11, 8).attention[0].head_dim == 32


def test_help_names_the_roster(monkeypatch):
    monkeypatch.undo()
    source = Path(model_options.__file__).read_text()
    line = source.split("    attention: str | None = None\n")[1].splitlines()[0]
    assert [name for name in variants if name not in line.replace(",", " ").split()] == []


def test_a_study_of_it(capfd):
    flags = [*TRAIN[1:], "trainer.max_iters=1", "model.n_kv_head=null"]
    flags.remove("trainer.max_iters=2")
    Path("study.yaml").write_text(
        "about: A toy beside MHA.\nvariants:\n  Toy: {model: {attention: toy}}\n  MHA: {model: {attention: mha}}\n"
    )
    code = main(["study", "--preset", "study.yaml", "system.work_dir=out/study", *flags[:-1]])
    assert code == 0, capfd.readouterr().err
    assert Path("out/study/report.html").exists()


def test_parts_of_a_layer_without_o_proj_are_refused_by_name(monkeypatch):
    build = ToyConfig.build

    def other_name(self, d_model):
        module = build(self, d_model)
        module.out = module.o_proj
        del module.o_proj
        return module

    monkeypatch.setattr(ToyConfig, "build", other_name)
    with pytest.raises(
        ConfigError, match=r"toy has no weight o_proj\.weight\. Name its output projection o_proj"
    ):
        parts(ToyConfig(n_query_head=6, head_dim=7), 12, 9)


@dataclass(frozen=True, kw_only=True)
class Softmax1(GroupedConfig):
    """Has its parent's name."""


@dataclass(frozen=True, kw_only=True)
class Sinks(GroupedConfig):
    """Has a name of its own."""

    @property
    def name(self):
        return "sinks"


@dataclass(frozen=True, kw_only=True)
class OtherLatent(LatentConfig):
    """Has a name of its own."""

    @property
    def name(self):
        return "other"


def test_a_variant_with_the_name_of_its_parent_is_refused_before_it_learns():
    variants.add("softmax1")(Softmax1)
    with pytest.raises(
        ConfigError, match=r"Softmax1 calls itself 'mha', .* Let `name` return what `variants.add`"
    ):
        ModelOptions(attention="softmax1").resolve(11, 8)
    with pytest.raises(ConfigError, match=r"Softmax1 calls itself 'mha'"):
        encode(Softmax1(n_query_head=6, head_dim=4))


@pytest.mark.parametrize(("kind", "parent"), [(Sinks, "llama"), (OtherLatent, "deepseek_v3")])
def test_a_variant_is_not_converted_or_exported_as_its_parent(kind, parent):
    name = kind.examples()["mla" if kind is OtherLatent else "gqa, rope"].name
    variants.add(name)(kind)
    rank = {"kv_lora_rank": 9, "qk_nope_head_dim": 8, "v_head_dim": 8} if kind is OtherLatent else {}
    config = ModelOptions(attention=name, n_layer=1, n_embd=48, shape="llama", **rank).resolve(11, 8)
    for to in ("mla", "mqa"):
        with pytest.raises(
            ConfigError, match=rf"^{name}: no conversion starts from .* only from mha, gqa, mqa, mla, gqa_sum"
        ):
            rehead.convert(build(config), to=to, **({"kv_rank": 5} if to == "mla" else {}))
    target = replace(config.attention[0], window=3)
    with pytest.raises(
        ConfigError, match=rf"no conversion leads from {name} .* no conversion starts from it"
    ):
        rehead.convert(build(config), to=target)
    found = plan(config, 8)
    assert len(found.rows) == 1
    assert found.advice.startswith(f"{name}: no conversion starts")
    with pytest.raises(ConfigError, match=r"cannot represent this model's .*attention"):
        families[parent].write(config)


def test_annotations_may_be_texts(monkeypatch):
    """As in a module that begins with `from __future__ import annotations`."""
    module = ModuleType("toy_with_texts")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(
        "from __future__ import annotations\n" + Path(__file__).with_name("toy_variant.py").read_text(),
        vars(module),
    )
    monkeypatch.setitem(variants._entries, "toy", module.ToyConfig)
    config = ModelOptions(attention="toy", head_dim=5, n_layer=1).resolve(11, 8).attention[0]
    assert type(config) is module.ToyConfig
    assert decode(AttentionConfig, json.loads(json.dumps(encode(config)))) == config
    with pytest.raises(ConfigError, match=r"head_dim=5\.0 is a float: expected a whole number"):
        replace(config, head_dim=5.0)


@dataclass(frozen=True, kw_only=True)
class Fields(ToyConfig):
    """Further fields, of every type that can be stored."""

    names: tuple[str, ...] = ("a", "b")
    spans: tuple[tuple[int, int], ...] = ((1, 2), (3, 4))
    none: tuple[int, ...] = ()
    slope: int | str | None = "learned"


def test_further_fields_are_read_back(monkeypatch):
    monkeypatch.setitem(variants._entries, "toy", Fields)
    config = ModelOptions(attention="toy", head_dim=5, n_layer=1).resolve(11, 8).attention[0]
    for one in (config, replace(config, slope=3, names=(), none=(7,)), replace(config, slope=None)):
        assert decode(AttentionConfig, json.loads(json.dumps(encode(one)))) == one


def test_a_field_that_cannot_be_read_back_is_refused_before_it_learns(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Table(ToyConfig):
        table: dict[str, int] | None = None
        other: dict[str, int] = None

    monkeypatch.setitem(variants._entries, "toy", Table)
    with pytest.raises(
        ConfigError, match=r"toy\.other: a field of dict\[str, int\] cannot be read back\. Use a number"
    ):
        ModelOptions(attention="toy", head_dim=5, n_layer=1).resolve(11, 8)


def test_a_cell_may_be_run_twice():
    """A class that is defined again replaces the former; another class, or another name, is refused."""
    source = Path(__file__).with_name("toy_variant.py").read_text()
    again = {"__name__": ToyConfig.__module__}
    exec(source, again)
    before = ModelOptions(attention="toy", head_dim=5, n_layer=1).resolve(11, 8)
    variants.add("toy")(again["ToyConfig"])
    assert variants["toy"] is again["ToyConfig"]
    assert encode(ModelOptions(attention="toy", head_dim=5, n_layer=1).resolve(11, 8))
    with pytest.raises(ConfigError, match=r"ToyConfig calls itself 'toy', .* defined again"):
        encode(before)
    with pytest.raises(
        ConfigError, match=r"attention variant 'mha' is registered twice\. Give this one another name"
    ):
        variants.add("new", "mha")(ToyConfig)
    assert "new" not in variants
