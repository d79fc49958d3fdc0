"""A plan's numbers are those of the models it speaks of, and its advice is sound."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, kernels, scalings
from rehead.attention.score import scores
from rehead.checkpoint import families, own
from rehead.checkpoint.huggingface import stock
from rehead.cli import main
from rehead.config import RNNConfig
from rehead.conversion.plan import plan
from rehead.errors import ConfigError
from rehead.measure.size import decode_bytes, decode_flops
from rehead.model import build
from small import llama_shaped

pytestmark = pytest.mark.heavy

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
MHA, MQA = replace(GQA, n_kv_head=6), replace(GQA, n_kv_head=1)
MLA = LatentConfig(
    n_query_head=6, n_kv_head=2, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
)
TIED = GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=9, tie_kv=True)
ROPE = RopeConfig()
MODELS = {
    "mha": MHA,
    "gqa": GQA,
    "gqa, rope, bias": replace(GQA, rope=ROPE, qkv_bias=True),
    "mqa, window": replace(MQA, window=5),
    "mla": MLA,
    "reduced": TIED,
    "deepseek": replace(MLA, latent_norm=True, qk_rope_head_dim=6, rope=ROPE),
}
models = pytest.mark.parametrize("attention", MODELS.values(), ids=MODELS)


def wish_of(command):
    words = shlex.split(command)
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    kinds = {"--to": str, "--n-kv-head": int, "--kv-fraction": float, "--target": str}
    return {name[2:].replace("-", "_"): kinds[name](value) for name, value in pairs.items()}


def cache_held(model, n_token, batch):
    cache = model.new_cache(batch, n_token)
    with torch.no_grad():
        model(torch.zeros(batch, n_token, dtype=torch.long), cache=cache)
    return sum(layer.n_bytes for layer in cache)


@models
def test_rows_are_the_converted_models(attention, gpt):
    """Every row that says it can be done is done: sizes, verdict and words are those of the result."""
    model = gpt(attention)
    made = plan(model.config, context=11, batch_size=3, dtype=torch.float64)
    present, *others = made.rows
    assert (present.verdict, present.command) == ("present", "")
    assert (made.context, made.batch_size, made.dtype) == (11, 3, "float64")
    assert len({row.variant for row in made.rows}) == len(made.rows)
    tried = 0
    for row in made.rows:
        result, exact = model, True
        if row.command.startswith("export"):
            continue
        if row.verdict in ("exact", "approximate") or row.why.startswith("exact, but"):
            result, certificate = rehead.convert(model, **wish_of(row.command))
            exact = certificate.exact
            made = certificate.layers[0].result
            if "--target uneven" in row.command:
                made = made.replace("rank ", "").replace(", rope", ", uneven")
            assert row.variant == made
            tried += 1
        elif row is not present:
            continue
        assert row.parameters == sum(weight.numel() for weight in result.parameters())
        assert row.cache_bytes == cache_held(result, 11, 3)
        assert row.kv_bytes_per_token == 8 * sum(c.kv_numbers() for c in result.config.attention)
        assert row.decode_flops == 3 * decode_flops(result.config, 11)
        assert row.decode_bytes == decode_bytes(result.config, 11, 3, torch.float64)
        if row.verdict == "exact":
            assert exact is True
        if row.verdict == "approximate":
            assert exact is False
        if row.verdict in ("exact", "approximate"):
            assert row.kv_bytes_per_token < present.kv_bytes_per_token
    assert tried > 0 or attention == MODELS["deepseek"]
    assert others


@models
def test_what_is_called_impossible_is(attention, gpt):
    model = gpt(attention)
    for row in plan(model.config, context=11).rows:
        if row.verdict == "impossible" and row.command.startswith("--to"):
            with pytest.raises(ConfigError) as caught:
                rehead.convert(model, **wish_of(row.command))
            assert row.why in str(caught.value)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@models
def test_what_is_called_pointless_would_not_shrink_the_cache(attention, gpt, kv_dtype):
    rows = plan(gpt(attention).config, context=11, kv_dtype=kv_dtype).rows
    exact = {row.command: row.kv_bytes_per_token for row in plan(gpt(attention).config, context=11).rows}
    for row in rows[1:]:
        grows = row.kv_bytes_per_token >= rows[0].kv_bytes_per_token or exact[row.command] >= exact[""]
        assert (row.verdict == "pointless") == grows or row.verdict == "impossible"
        if row.verdict == "pointless":
            share = 100 * row.kv_bytes_per_token / rows[0].kv_bytes_per_token
            assert f"{share:.4g} % of the present cache" in row.why


@pytest.mark.parametrize(("width", "served"), [(64, True), (256, False)])
def test_who_serves_the_canonical_target(width, served):
    """vLLM's heads hold 128 numbers that do not rotate; `convert` says the same."""
    heads = GroupedConfig(n_query_head=8, n_kv_head=4, head_dim=width, rope=ROPE)
    config = llama_shaped(heads, heads, n_embd=1024, vocab_size=29, n_hidden=31)
    (note,) = [note for note in plan(config, context=11).notes if note.startswith("canonical: ")]
    assert note.endswith("vLLM and SGLang serve it with their MLA kernels.") == served
    assert ("vLLM and SGLang cannot serve it: heads of 256 numbers" in note) != served


@models
def test_advice_is_a_row_that_pays(attention, gpt):
    made = plan(gpt(attention).config, context=11)
    named = [row for row in made.rows if row.command and f"{row.command} " in made.advice]
    named = sorted(named, key=lambda row: len(row.command))[-1:]  # --to mla is the start of another
    assert all(row.verdict in ("exact", "approximate") for row in named)
    pays = [row for row in made.rows if row.verdict in ("exact", "approximate")]
    assert bool(named) == bool(pays)
    if any(row.verdict == "exact" for row in pays):
        best = min(row.cache_bytes for row in pays if row.verdict == "exact")
        assert min(row.cache_bytes for row in named) == best
    if not pays:
        assert "keep it as it is" in made.advice


def shape(n_layer, n_embd, n_query_head, n_kv_head, head_dim):
    attention = GroupedConfig(n_query_head=n_query_head, n_kv_head=n_kv_head, head_dim=head_dim, rope=ROPE)
    sizes = {"vocab_size": 49_152, "block_size": 2048, "n_embd": n_embd, "n_hidden": 4 * n_embd}
    return llama_shaped(*[attention] * n_layer, **sizes, tie_embeddings=True)


POINTLESS = {  # DeepSeek's 576 numbers against; fewer layers, which changes no share
    "SmolLM-135M": (shape(3, 576, 9, 3, 64), 384, "150 %"),
    "Qwen2.5-0.5B": (shape(3, 896, 14, 2, 64), 256, "225 %"),
}


@pytest.mark.parametrize(("config", "numbers", "share"), POINTLESS.values(), ids=POINTLESS)
def test_deepseeks_shape_is_pointless_for_small_caches(config, numbers, share):
    made = plan(config, context=2048, dtype=torch.bfloat16)
    (row,) = [row for row in made.rows if "deepseek" in row.command]
    assert made.rows[0].kv_bytes_per_token == 2 * config.n_layer * numbers
    assert row.kv_bytes_per_token == 2 * config.n_layer * 576
    assert row.verdict == "pointless"
    assert row.why == f"{share} of the present cache"
    assert "deepseek" not in made.advice


def test_deepseeks_shape_is_never_recommended():
    """Nor where it is smaller: no conversion leads there."""
    made = plan(shape(3, 4096, 32, 32, 128), context=2048)
    (row,) = [row for row in made.rows if "deepseek" in row.command]
    assert row.verdict == "impossible"
    assert row.why
    assert "deepseek" not in made.advice


def test_an_export_names_what_the_class_lacks():
    gpt = replace(shape(3, 4096, 32, 32, 128), norm="layernorm", mlp="gelu")
    (row,) = [row for row in plan(gpt, context=2048).rows if "deepseek" in row.command]
    assert row.verdict == "impossible"
    assert row.why == "norm=layernorm, mlp=gelu, which no conversion changes"


def test_rebuilding_is_pointed_out_where_keys_rotate(gpt):
    assert (
        plan(gpt(replace(GQA, rope=ROPE)).config, 11)
        .notes[0]
        .startswith("Rebuilt keys save memory, not time")
    )
    assert not [note for note in plan(gpt(GQA).config, 11).notes if "Rebuilt" in note]


def test_notes_explain_the_words_of_the_rows(gpt):
    """Nothing but words that occur; `reduce` stands in the way of a rotated model alone."""
    rotated, plain = (plan(gpt(layer).config, 11) for layer in (replace(GQA, rope=ROPE), GQA))
    assert [note.partition(":")[0] for note in rotated.notes[1:]] == ["uneven", "tied", "reduce"]
    assert any(row.why.startswith("reduce: ") for row in rotated.rows)
    assert "reduce: The reduced form of MLA" in rotated.notes[3]
    assert [note.partition(":")[0] for note in plain.notes] == ["tied"]
    assert any(row.variant.endswith(", tied") for row in plain.rows)
    normed = plan(gpt(replace(MLA, qk_rope_head_dim=6, rope=ROPE, latent_norm=True)).config, 11)
    assert [note.partition(":")[0] for note in normed.notes] == ["tied"]  # no row says `expand`


def test_engines_own_sizes_are_a_row_and_no_advice():
    """Llama 3.2's 1B, whose scaled rope becomes a yarn: 576 of 1,024 numbers, and a larger loss than rebuilt keys."""
    scaling = scalings["llama3"](factor=32.0)
    rope = RopeConfig(theta=500_000.0, scaling=scaling)
    heads = GroupedConfig(n_query_head=32, n_kv_head=8, head_dim=64, rope=rope)
    config = replace(shape(16, 2048, 32, 8, 64), attention=(heads,) * 16, block_size=131_072)
    found = plan(config, context=8192)
    (row,) = [row for row in found.rows if row.command == "--to mla --target canonical"]
    assert (row.variant, row.verdict) == ("mla, 512 + 64 rotated, canonical", "approximate")
    assert row.gpu_kv_bytes_per_token * 1024 == found.rows[0].gpu_kv_bytes_per_token * 576
    assert "by a yarn's angles, up to 0.31 rad off after 2,048 tokens" in row.why
    assert found.advice.startswith("Nothing smaller is exact. --to mla --kv-fraction 0.5 usually")
    assert any(note.startswith("canonical: as uneven") and "vLLM" in note for note in found.notes)


def test_rotary_parts_that_are_not_listed_are_accounted_for(gpt):
    """Layers that rotate in two ways, as Gemma 3's, leave no row of them: a note has the reason, and what to do."""
    rotated = replace(GQA, rope=ROPE)
    mixed = plan(gpt(rotated, replace(rotated, rope=replace(ROPE, theta=77.0))).config, 11)
    said = [
        note for note in mixed.notes if note.startswith("--target uneven is left out: the layers rotate in")
    ]
    assert len(said) == 1
    assert said[0].endswith("Use --target rebuilt.")
    assert not any("--target" in row.command for row in mixed.rows)
    for known in (rotated, GQA, replace(rotated, qk_norm_eps=1e-6)):
        assert not [note for note in plan(gpt(known).config, 11).notes if "left out" in note]


def test_a_context_longer_than_the_models_own_is_noted(gpt):
    config = gpt(GQA).config
    note = f"The model was made for {config.block_size:,} tokens: with a context of {config.block_size + 1:,}"
    assert plan(config, config.block_size + 1).notes[-1].startswith(note)
    assert not [note for note in plan(config, config.block_size).notes if "made for" in note]


def test_a_way_through_copies_is_told(gpt):
    """From 3 KV heads to 2 by way of 6."""
    rows = plan(gpt(replace(GQA, n_kv_head=3)).config, 11).rows
    whys = {row.command: row.why for row in rows}
    assert whys["--to gqa --n-kv-head 2"] == (
        "3 KV heads are copied to 6, so every query head reads what it read; 6 KV heads become 2"
    )
    assert whys["--to mqa"] == "3 KV heads become one"


def test_layers_may_differ(gpt):
    """Rows are for the whole model; the words are of its first layer."""
    model = gpt(MHA, GQA)
    made = plan(model.config, 11)
    assert made.rows[0].kv_bytes_per_token == 4 * (54 + 18)
    exact = [row for row in made.rows if row.command == "--to mla"]
    assert [row.kv_bytes_per_token for row in exact] == [4 * (23 + 18)]
    assert exact[0].verdict == "exact"


def test_an_rnn_and_sizes_that_are_none(gpt):
    rnn = RNNConfig(vocab_size=29, block_size=16, n_embd=5, n_layer=1, n_hidden=7, n_output=29)
    for context in (11, 4000):
        made = plan(rnn, context, 3)
        (row,) = made.rows
        assert (row.variant, row.verdict) == ("rnn, a state of 1 x 7", "present")
        assert (row.kv_bytes_per_token, row.cache_bytes, row.layer) == (0, 3 * 7 * 4, None)
        assert (
            row.cache_bytes == 4 * sum(layer.n_bytes for layer in build(rnn).new_cache(3)) / 8
        )  # float64 here
        assert "type rnn has no heads to convert: its state is as large after any number" in made.advice
    config = gpt(GQA).config
    with pytest.raises(ConfigError, match=r"context=0. Use 1 to 16,777,216"):
        plan(config, 0)
    with pytest.raises(ConfigError, match=r"batch=-1. Use 1 to 1,048,576"):
        plan(config, 11, -1)


# FLOPs of one decoded token


def by_reference(query, key, value, mask, *, pdrop=0.0, **options):
    return kernels.reference(query, key, value, mask.dense(), **options)


def counted(config, n_token, batch):
    """What torch counts for token number `n_token`, the others being in the cache."""
    model = build(config).eval()
    cache, ids = model.new_cache(batch), torch.zeros(batch, n_token, dtype=torch.long)
    with torch.no_grad():
        model(ids[:, :-1], cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(ids[:, -1:], cache=cache)
    return counter.get_total_flops() / batch


DECODED = {
    "mha": MHA,
    "gqa": GQA,
    "mqa": MQA,
    "gqa, rope": replace(GQA, rope=ROPE),
    "window": replace(GQA, window=5),
    "mla absorbed": replace(MLA, kv_lora_rank=8),
    "mla absorbed, all heads": replace(MLA, kv_lora_rank=8, n_kv_head=6),
    "mla absorbed, window": replace(MLA, window=5),
    "mla absorbed, rotated part": replace(MLA, kv_lora_rank=11, qk_rope_head_dim=6),
    "mla, query latent": replace(MLA, qk_rope_head_dim=6, q_lora_rank=7),
    "mla expanded": replace(MLA, n_query_head=12, n_kv_head=1, kv_lora_rank=300),
    "rebuilt keys": replace(MLA, rope=ROPE),
    "rebuilt keys, window": replace(MLA, rope=ROPE, window=5),
    "reduced": TIED,
    **{score: replace(GQA, score=scores[score]()) for score in scores},
    "additive, window": replace(GQA, score="additive", window=5),
}


@pytest.mark.parametrize("n_token", [2, 13])
@pytest.mark.parametrize("attention", DECODED.values(), ids=DECODED)
def test_decode_flops_are_those_torch_counts(attention, n_token, gpt, monkeypatch):
    """With a cache, by the reference kernel, which skips nothing."""
    monkeypatch.setattr(kernels, "attend", by_reference)
    config = gpt(attention).config

    def check(predicted):
        assert counted(config, n_token, 3) == predicted

    check(decode_flops(config, n_token))
    window = attention.window
    for mutant in (
        decode_flops(config, n_token + 1) if window is None or n_token < window else None,
        decode_flops(replace(config, attention=config.attention[:1]), n_token),
        decode_flops(replace(config, mlp="swiglu"), n_token),
    ):
        if mutant is not None:
            with pytest.raises(AssertionError):
                check(mutant)


def test_c5_to_c8_by_one_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # one table, not folded
    (tmp_path / "quiz.yaml").write_text("model: {n_layer: 1, n_query_head: 8, n_embd: 1024}")
    words = ["plan", str(tmp_path / "quiz.yaml"), "--context", "2048", "--dtype", "fp16"]
    assert main([*words, "--parts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in reversed(lines) if "mqa, 1 KV head of 128" in line)
    assert row.split()[-6:] == ["262,144", "1,024", "x", "1,024", "9,663,676,416", "17,179,869,184"]
    assert main([*words, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["rows"][0]
    assert (first["layer"]["kv_parameters"], first["cache_bytes"]) == (2_097_152, 8_388_608)


def advised(capsys, n_kv_head, *words):
    """What is said of a Llama of 2 layers with 32 heads of 64."""
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 2048,
        "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "head_dim": 64,
        "num_key_value_heads": n_kv_head, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(fields))
    assert main(["plan", "config.json", "--context", "4096", "--dtype", "bf16", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_an_exact_latent_of_a_rounded_cache(capsys, tmp_path, monkeypatch):
    """As many numbers are as many, whatever their scales take; and what rounds keeps no logit."""
    monkeypatch.chdir(tmp_path)
    shown = advised(capsys, 8, "--kv-dtype", "int8")
    assert "of the present cache, in which only scales are fewer" in shown
    assert "Nothing smaller is exact. --to mla --kv-fraction 0.5 usually loses least" in shown
    shown = advised(capsys, 32, "--kv-dtype", "int8")
    assert "--to mla is the same function before the cache is rounded, with " in shown
    assert "--to mla keeps every logit and 50 % of the cache." in advised(capsys, 32)


def test_of_16_gpus_each_holds_a_whole_latent_or_a_head(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = advised(capsys, 8, "--tp", "16")
    assert "On 16 GPUs the KV heads are split, but each GPU holds the whole latent." in shown
    assert (
        "KV heads that are fewer than 16 GPUs, or do not divide among them, are held several times." in shown
    )
    assert "None of these is smaller on each GPU." in shown
    assert "only --to mla with --kv-fraction below 0.125 would be." in shown
    assert "KV heads that are fewer" not in advised(capsys, 8, "--tp", "4")


def test_what_one_of_several_gpus_caches(tmp_path, capsys):
    """8 KV heads of 64 on 4 GPUs: 2 on each; a latent of half the cache is on all of them, so that it is no smaller."""
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 2048,
        "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    words = ["plan", str(tmp_path / "config.json"), "--context", "4096", "--dtype", "bf16"]
    assert main([*words, "--tp", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tp"] == 4
    rows = {row["command"]: row for row in found["rows"]}
    present, half, sixteenth = (
        rows[""],
        rows["--to mla --kv-fraction 0.5"],
        rows["--to mla --kv-fraction 0.1875"],
    )
    assert present["gpu_kv_bytes_per_token"] == 2 * (2 * 2 * 64) * 2 == present["kv_bytes_per_token"] / 4
    assert present["gpu_cache_bytes"] == 4096 * present["gpu_kv_bytes_per_token"]
    assert half["gpu_kv_bytes_per_token"] == half["kv_bytes_per_token"] == 2 * 512 * 2
    assert sixteenth["gpu_kv_bytes_per_token"] == 2 * 192 * 2 < present["gpu_kv_bytes_per_token"]
    assert half["variant"] in next(note for note in found["notes"] if note.startswith("On 4 GPUs"))
    assert "--kv-fraction 0.1875" in found["advice"]  # the largest that is smaller on a GPU
    assert main([*words, "--tp", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "what one of 4 GPUs caches" in shown
    assert f"{present['gpu_kv_bytes_per_token']:,}" in shown
    assert main([*words, "--tp", "1", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert not any("GPUs" in note for note in alone["notes"])
    assert "--kv-fraction 0.5" in alone["advice"]
    assert main([*words, "--tp", "3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 KV heads do not divide among 3 GPUs" in shown
    assert "32 query heads do not divide among 3 GPUs" in shown
    weights = alone["rows"][0]["decode_bytes"] - alone["rows"][0]["cache_bytes"]
    assert present["decode_bytes"] == weights + 4 * present["gpu_cache_bytes"]  # each reads what it holds
    single = {row["command"]: row for row in alone["rows"]}["--to mla --kv-fraction 0.5"]
    assert half["decode_bytes"] == single["decode_bytes"] + 3 * half["cache_bytes"]
    for wrong in ("0", "5000"):
        assert main([*words, "--tp", wrong]) == 2
        assert f"--tp {wrong}. Use 1 to 4,096." in capsys.readouterr().err


FIELDS = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 53, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip


def planned(capsys, *words):
    assert main(["plan", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["plan", *words]) == 0
    assert f", batch 1, {found['dtype']}" in capsys.readouterr().out  # said above the table
    return found["dtype"], found["rows"][0]["kv_bytes_per_token"]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_the_folders_dtype(kind, tmp_path, capsys):
    """As the cache of the loaded model holds them; --dtype counts in another."""
    config = own.read_config(table(tmp_path / "config.json", FIELDS))
    rehead.save(build(config).to(kind), tmp_path / "own")
    model = rehead.load(tmp_path / "own")
    wanted = str(kind)[6:], cache_held(model, 7, 1) / 7
    assert planned(capsys, str(tmp_path / "own")) == wanted
    stock.export(model, tmp_path / "stock", families["llama"], {})
    assert planned(capsys, str(tmp_path / "stock")) == wanted
    named = json.loads((tmp_path / "stock/config.json").read_text())
    assert named.pop("dtype") == wanted[0]
    (tmp_path / "stock/MANIFEST.json").unlink()  # as others write it
    for fields in (named, named | {"dtype": None}):  # of the weights
        table(tmp_path / "stock/config.json", fields)
        assert planned(capsys, str(tmp_path / "stock")) == wanted
    for key in ("dtype", "torch_dtype"):
        table(tmp_path / "config.json", FIELDS | {key: wanted[0]})
        assert planned(capsys, str(tmp_path / "config.json")) == wanted
    assert planned(capsys, str(tmp_path / "own"), "--dtype", "fp32") == ("float32", 2 * 2 * 8 * 4)


def test_without_a_dtype_or_weights_bytes_are_float32s(tmp_path, capsys):
    table(tmp_path / "config.json", FIELDS)
    (tmp_path / "quiz.yaml").write_text("model: {n_layer: 2, n_query_head: 3, n_embd: 24}")
    for place in (tmp_path, tmp_path / "config.json", tmp_path / "quiz.yaml"):
        assert planned(capsys, str(place))[0] == "float32"


def table(path, fields):
    path.write_text(json.dumps(fields))
    return path
