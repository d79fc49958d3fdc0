"""Refusals of exports: every way out that a message names is taken, and leads out."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families_corpus import GOOD, SMALL

import rehead
from rehead.attention import GroupedConfig, RopeConfig
from rehead.attention.rope_scaling import YarnScaling
from rehead.attention.score import ScaledDot
from rehead.checkpoint import families
from rehead.checkpoint.huggingface import stock
from rehead.cli import main
from rehead.conversion.export.fit import KEPT, Asked, require_fit
from rehead.conversion.target import Target
from rehead.errors import ConfigError
from rehead.model import build
from rehead.tokenizer import train
from small import llama_shaped

pytestmark = pytest.mark.heavy

BIG = SMALL | {"vocab_size": 256}
MLA = {"kv_lora_rank": 6, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
KINDS = GOOD | {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 7},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 6},
    "minicpm3": MLA,
    "youtu": MLA,
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16},
}
GPT2 = ("vocab_size",)
MADE = {
    "rebuilt": {"to": "mla"},
    "uneven": {"to": "mla", "target": "uneven", "kv_fraction": 0.75},
    "modular": {"head_map": "modular"},
}
SCALED = RopeConfig(scaling=YarnScaling(factor=4.0, original_max_position_embeddings=16))
ENGINES = (None, "transformers", "mlx")
SEEN = "O God, O God! How weary, stale, flat and unprofitable\n"


def stock_config(kind):
    table = {name: value for name, value in BIG.items() if kind != "gpt2" or name in GPT2}
    return stock.read_config(table | {"model_type": kind} | KINDS[kind], kind)


def made(config, wanted):
    """The model that `convert` would make, or None where it refuses."""
    try:
        return replace(
            config,
            attention=tuple(Target(**wanted).attention(layer, config.n_embd) for layer in config.attention),
        )
    except ConfigError:
        return None


def sources():
    """Every family; and what was made of those whose heads can become a latent."""
    for kind in KINDS:
        yield pytest.param(kind, "", id=kind)
        for name, wanted in MADE.items():
            config = stock_config(kind)
            grouped = hasattr(config.attention[0], "head_dim") and config.attention[0].score == ScaledDot()
            if grouped and made(config, wanted) is not None:
                yield pytest.param(kind, name, id=f"{kind}, {name}")


def written(config, folder):
    rehead.save(build(config), folder, files={"tokenizer.json": train("byte", SEEN).to_json()})


def refusals(config):
    """The messages of all formats and engines, with the words that were typed."""
    for kind in ("auto", *families, "gguf"):
        for engine in ENGINES if kind in ("auto", "deepseek_v3") else (None,):
            words = ["--format", kind, *(() if engine is None else ("--for", engine))]
            try:
                require_fit(config, Asked.of(kind, engine))
            except ConfigError as error:
                yield words, str(error)


def taken(way, typed):
    """The options of `convert` and those of `export` that a way out means."""
    option = dict(zip(typed[::2], typed[1::2], strict=True))
    option |= dict(re.findall(r"(--format|--for) (\w+)", way))
    if "llama.cpp" not in way and option["--format"] != "gguf" and "writes a folder" in way:
        option.pop("--for", None)
    converted = re.search(r"(?<=with )(--to \w+( --target \w+)?|--head-map contiguous)", way)
    return ("" if converted is None else converted[0]), tuple(sorted(option.items())), "its source" in way


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "form"), list(sources()))
def test_every_way_out_leads_out(kind, form, tmp_path, monkeypatch):
    """The oracle is the command that the message names."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    original = stock_config(kind)
    config = made(original, MADE[form]) if form else original
    written(original, "source")
    written(config, "model")
    done, kept = set(), 0
    for typed, message in refusals(config):
        reason, _, ways = message.rpartition(". ")
        assert reason
        for way in ways.removesuffix(".").split(", or "):
            if way.casefold() == KEPT.casefold():
                kept += 1
                continue
            if way.startswith("train one like it"):
                continue
            todo = taken(way, typed)
            if todo not in done:
                done.add(todo)
                follow(*todo, f"out{len(done)}")
    if not form:  # a checkpoint of a family always has its own
        assert not kept
        assert done


def follow(converted, option, of_source, name):
    model = "source" if of_source else "model"
    if converted:
        made = f"{model} {converted}"  # once for all exports of it
        if not Path(made).exists():
            assert main(["convert", model, made, *converted.split(), "--allow-loss", "--json"]) == 0
        model = made
    words = [word for pair in option for word in pair]
    suffix = ".gguf" if dict(option)["--format"] == "gguf" else ""
    words = ["export", model, name + suffix, *words, "--json"]
    assert main(words) == 0, words


TYPED = {
    "an MLA with a window": ("mistral", "rebuilt", "auto", "window=7: DeepseekV3ForCausalLM has no window. Convert it "
                             "with --to gqa for --format mistral."),
    "that MLA as Mistral": ("mistral", "rebuilt", "mistral", "MistralForCausalLM cannot represent this model's "
                            "attention. Convert it with --to gqa."),
    "a parallel residual": ("gpt_neox", "", "deepseek_v3", "parallel_residual=True, which no conversion changes. Use "
                            "--format gpt_neox."),
    "GPT-2": ("gpt2", "", "deepseek_v3", "learned_positions=True, which no conversion changes. Use --format gpt2."),
    "DeepSeek-V2": ("deepseek_v2", "", "deepseek_v3", "into DeepseekV3ForCausalLM's. Use --format deepseek_v2."),
    "layers without rope": ("smollm3", "uneven", "auto", "layers that are all alike, and this model has different "
                            "layers (layer 1 of 0 to 1: rope, "),
    "modular heads": ("llama", "modular", "auto", "or convert it with --head-map contiguous for --format llama"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "form", "format", "said"), TYPED.values(), ids=TYPED)
def test_what_an_export_says(kind, form, format, said, tmp_path, monkeypatch, capfd):
    """As typed, before a weight is converted."""
    monkeypatch.chdir(tmp_path)
    config = stock_config(kind)
    written(made(config, MADE[form]) if form else config, "model")
    capfd.readouterr()
    assert main(["export", "model", "out", "--format", format]) == 2
    assert said in capfd.readouterr().err
    assert not Path("out").exists()


def test_reduced_weights_have_no_class():
    """The advice, to train a model of Llama's shape, is of one whose keys are not its values."""
    config = stock_config("llama")
    config = replace(config, attention=tuple(replace(layer, rope=None) for layer in config.attention))
    for wanted in ({"to": "mla"}, {"to": "reduced"}):
        config = made(config, wanted)
    with pytest.raises(ConfigError, match=r"tie_kv=True.* train one like it with model\.shape=llama"):
        require_fit(config, Asked.of("auto", None))


def test_norms_on_heads_with_an_eps_of_their_own():
    config = replace(stock_config("qwen3"), norm_eps=1e-3)
    with pytest.raises(
        ConfigError, match=r"Qwen3.* cannot represent .*qk_norm_eps=1e-06 beside norm_eps=0\.001\."
    ):
        require_fit(config, Asked.of("qwen3", None))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("changes", "served"), [({}, True), ({"qkv_bias": True}, False), ({"window": 7}, False)]
)
def test_an_uneven_latent_is_sent_to_the_target_that_an_engine_serves(engine, changes, served):
    """If that takes the heads that it was made from."""
    heads = GroupedConfig(**{"n_query_head": 16, "n_kv_head": 8, "head_dim": 64, "rope": True} | changes)
    shape = {"vocab_size": 29, "block_size": 64, "n_embd": 1024, "n_hidden": 32}
    uneven = Target(to="mla", target="uneven", kv_fraction=0.5).attention(heads, 1024)
    with pytest.raises(ConfigError) as caught:
        require_fit(llama_shaped(uneven, **shape), Asked.of("auto", engine))
    way = "onvert its source with --to mla --target canonical"
    assert (way in str(caught.value)) == served
    try:
        canonical = Target(to="mla", target="canonical").attention(heads, 1024)
        require_fit(llama_shaped(canonical, **shape), Asked.of("auto", engine))
    except ConfigError:
        assert not served
    else:
        assert served


@pytest.mark.parametrize(
    ("engine", "way"), [("vllm", "canonical"), ("sglang", "canonical"), ("transformers", "uneven")]
)
def test_rebuilt_keys_are_sent_to_a_target_that_the_engine_serves(engine, way):
    heads = GroupedConfig(n_query_head=16, n_kv_head=8, head_dim=64, rope=True)
    shape = {"vocab_size": 29, "block_size": 64, "n_embd": 1024, "n_hidden": 32}
    latent = Target(to="mla", kv_fraction=0.5).attention(heads, 1024)
    said = f"[Cc]onvert its source with --to mla --target {way}, which rebuilds no keys"
    with pytest.raises(ConfigError, match=said) as caught:
        require_fit(llama_shaped(latent, **shape), Asked.of("auto", engine))
    assert "--for transformers" not in str(caught.value)
    if engine != "transformers":
        with pytest.raises(
            ConfigError, match="convert it with --to mla --target canonical, which is not exact"
        ):
            require_fit(llama_shaped(heads, **shape), Asked.of("deepseek_v3", engine))


def test_heads_asked_to_be_deepseek_s_mla_are_sent_to_its_target():
    heads = GroupedConfig(n_query_head=16, n_kv_head=8, head_dim=64, rope=True)
    model = llama_shaped(heads, vocab_size=29, block_size=64, n_embd=1024, n_hidden=32)
    with pytest.raises(ConfigError, match="convert it with --to mla --target canonical, which is not exact"):
        require_fit(model, Asked.of("deepseek_v3", None))
