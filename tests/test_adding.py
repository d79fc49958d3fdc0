"""CONTRIBUTING's checklists for a kernel, a family and a conversion: one class and one line each, and it works.

tests/test_third_variant.py is the same for an attention variant.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

import rehead
from rehead.attention import GroupedConfig, kernels
from rehead.attention.kernels import Kernel, roster
from rehead.checkpoint import families
from rehead.checkpoint.huggingface.llama import Llama
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.conversion import conversions
from rehead.conversion.base import Conversion, Converted, Promise
from rehead.conversion.export.folder import export_folder
from rehead.measure.explain import explain
from rehead.model import build
from toy_variant import ToyConfig


@pytest.fixture
def registered(monkeypatch):
    """registered(registry, name, entry): there until the test ends."""

    def add(registry, name, entry):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        registry.add(name)(entry)

    return add


def made(**options):
    torch.manual_seed(0)
    return build(ModelOptions(n_layer=2, n_embd=16, **options).resolve(11, 40)).eval()


class Doubled(Kernel):
    """The definition twice, halved."""

    name = "doubled"
    words = "everything twice"
    drops_weights = True

    def limit(self, call):
        return None if call.query.shape[1] > 6 else "few queries"

    def run(self, call):
        self.calls = getattr(self, "calls", 0) + 1
        given = call.query, call.key, call.value, call.mask.dense()
        return (kernels.reference(*given, scale=call.scale) + kernels.reference(*given, scale=call.scale)) / 2


def test_a_kernel(monkeypatch):
    """A class and its place in the roster: layers use it, and `explain` says so."""
    model, ids, kernel = made(n_query_head=4, n_kv_head=2, rope=True), torch.arange(20)[None] % 11, Doubled()
    wanted = model(ids)
    monkeypatch.setattr(roster, "ROSTER", (kernel, *kernels.ROSTER))
    torch.testing.assert_close(model(ids), wanted)
    assert kernel.calls == 2
    prompts = next(line for line in explain(model) if ", prompts: " in line)
    assert "7 to 40 tokens: everything twice" in prompts
    assert "1 to 4 tokens: query heads folded into rows" in prompts


class ToyLlama(Llama):
    """Llama under another name."""

    architecture = "ToyForCausalLM"


def test_a_family(registered, tmp_path):
    """A class and a line: exported, described by its own name, read back; transformers reads it as what it is."""
    registered(families, "toy", ToyLlama())
    torch.set_default_dtype(torch.float32)
    model = made(shape="llama", n_query_head=4, n_kv_head=2, rope=True)
    rehead.save(model, tmp_path / "ours")
    assert "ToyForCausalLM" in export_folder(tmp_path / "ours", tmp_path / "toy", "toy")
    table = json.loads((tmp_path / "toy" / "config.json").read_text())
    assert (table["model_type"], table["architectures"]) == ("toy", ["ToyForCausalLM"])
    back, ids = rehead.load(tmp_path / "toy"), torch.arange(20)[None] % 11
    torch.testing.assert_close(back(ids), model(ids))
    table |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "toy" / "config.json").write_text(json.dumps(table))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "toy")
    torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


@dataclass(frozen=True, kw_only=True)
class KnownToy(ToyConfig):
    """A toy that says which attention it is, so that targets can be derived from it."""

    def equivalent(self):
        return GroupedConfig(
            n_query_head=self.n_query_head, n_kv_head=1, head_dim=self.head_dim, window=self.window
        )


class ToyToMQA(Conversion):
    """A row that is the key and the value of all heads is both of MQA."""

    takes = KnownToy
    source, target = "toy", "mqa"
    costs = "The cache doubles."

    def steps(self, source, target, d_model):
        yield source.equivalent()

    def promise(self, source, result, d_model):
        return Promise(exact=True, why="keys and values are the row")

    def convert(self, weights, source, result, statistics, method):
        row = weights["row_proj.weight"]
        kept = {name: weights[name] for name in ("q_proj.weight", "o_proj.weight")}
        return Converted(weights=kept | {"k_proj.weight": row, "v_proj.weight": row.clone()})


def test_a_conversion(registered, tmp_path, monkeypatch, capfd):
    """A class and a line: the search finds it, goes on from it, and the certificate names it."""
    from rehead.attention import variants

    registered(variants, "toy", KnownToy)
    registered(conversions, "toy-to-mqa", ToyToMQA)
    monkeypatch.chdir(tmp_path)
    model, ids = made(attention="toy", head_dim=5), torch.arange(20)[None] % 11
    for to, steps in (("mqa", ["toy-to-mqa"]), ("mla", ["toy-to-mqa", "factor"])):
        result, certificate = rehead.convert(model, to=to)
        assert certificate.exact
        assert certificate.layers[0].steps == steps
        torch.testing.assert_close(result(ids), model(ids))
    rehead.save(model, Path("toy"))
    assert main(["convert", "toy", "mla", "--to", "mla", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["exact"]
