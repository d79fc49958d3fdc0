"""What storing weights in a smaller format changes: against the gguf package, NumPy and transformers."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tokenizers as hf
import torch
import transformers
from gguf import GGMLQuantizationType, quants

import rehead
from rehead.attention import GroupedConfig, LatentConfig
from rehead.attention.rope import RopeConfig
from rehead.data import evaluation_blocks
from rehead.errors import NumericError, ResourceError
from rehead.measure import quality, stored
from rehead.measure.forecast import MOST_BLOCKS, batch_of
from rehead.measure.kv_dtype import kv_dtypes, rounded_caches
from rehead.measure.stored import as_stored, changed, lost_rows, rounded
from rehead.model import build
from small import llama_shaped
from typed_lines import documents, typed

HEADS = GroupedConfig(n_query_head=2, n_kv_head=2, head_dim=32, rope=True)
TEXT = "the quick brown fox jumps over the lazy dog " * 6


def gpt(*, tied=False):
    """A model of two layers, 64 wide."""
    torch.manual_seed(2)
    config = llama_shaped(
        *[HEADS] * 2, vocab_size=31, block_size=16, n_embd=64, n_hidden=32, tie_embeddings=tied
    )
    return build(config)


@pytest.fixture(params=[2**22, 100], ids=["whole", "some rows at a time"])
def _parts(request, monkeypatch):
    """Numbers of a weight that are rounded at a time."""
    monkeypatch.setattr("rehead.nn.rows.PART", request.param)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("size", [1.0, 2.0**-40, 3e4])
def test_8_bits_are_those_of_llama_cpp(size):
    weight = size * torch.randn(5, 96, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    weight[1, 32:64] = 0
    weight[2, :32] = size * (torch.arange(-16, 16) + 0.5)  # halves, which round away from 0
    weight[2, 5] = size * 127
    written = quants.quantize(weight.numpy(), GGMLQuantizationType.Q8_0)
    with np.errstate(over="ignore"):
        expected = quants.dequantize(written, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(rounded(weight, "q8_0").numpy(), expected)


@pytest.mark.usefixtures("_parts")
def test_other_formats_are_casts():
    weight = torch.randn(3, 40, dtype=torch.float32)
    np.testing.assert_array_equal(
        rounded(weight, "fp16").numpy(), weight.numpy().astype(np.float16).astype(np.float32)
    )
    low = (
        weight.numpy().view(np.uint32) + 0x7FFF + ((weight.numpy().view(np.uint32) >> 16) & 1)
    ) & 0xFFFF0000
    np.testing.assert_array_equal(rounded(weight, "bf16").numpy(), low.view(np.float32))
    assert torch.equal(rounded(weight, "q8_0"), rounded(weight, "fp16"))  # 40 is no number of blocks
    assert torch.equal(rounded(weight[0, :32], "q8_0"), weight[0, :32])  # a vector
    long = torch.randn(1001, dtype=torch.float32)
    assert torch.equal(rounded(long, "bf16"), long.bfloat16().float())
    experts = torch.randn(3, 5, 40, dtype=torch.float32).transpose(0, 1)
    assert torch.equal(rounded(experts, "bf16"), experts.bfloat16().float())


@pytest.mark.usefixtures("_parts")
def test_lost_rows_are_counted_by_kind():
    model = gpt()
    assert lost_rows(model, "fp16", "q8_0") == {}
    first, second = (layer.self_attn for layer in model.layers)
    first.q_proj.weight.data[:16] *= 2.0**-60
    first.q_proj.weight.data[60] = 0  # nothing to lose
    second.o_proj.weight.data[3] *= 1e7
    second.o_proj.weight.data[5] = (
        torch.eye(64)[0] * 1e8
    )  # its scale in q8_0 is infinite, its zeros become NaN
    found = lost_rows(model, "fp16", "q8_0")
    assert found["self_attn.q_proj.weight"] == {"fp16": 16 / 127, "q8_0": 16 / 127}
    assert found["self_attn.o_proj.weight"] == {"fp16": 2 / 128, "q8_0": 1 / 128}
    assert set(found) == {"self_attn.q_proj.weight", "self_attn.o_proj.weight"}
    with pytest.raises(NumericError, match=r"layers\.1\.self_attn\.o_proj\.weight leaves the range of fp16"):
        as_stored(model, "fp16")


@pytest.fixture
def exported(tmp_path):
    """An MQA Llama that transformers wrote, and its export as DeepSeek's class."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data *= 3
    model.to(torch.float32).save_pretrained(tmp_path / "llama")
    letters = {letter: i for i, letter in enumerate(sorted(set(TEXT)))}
    inner = hf.Tokenizer(hf.models.BPE(vocab=letters, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.mark.process
@torch.no_grad()
def test_an_export_says_what_a_smaller_format_would_lose(exported):
    """Of a model whose values and output projections are far from 1, but not their product."""
    evals = {kind: f"eval again --data text.txt --stored-as {kind} --json" for kind in ("q8_0", "fp16")}
    (code, _, err), *printed = typed("export llama again", *evals.values(), cwd=exported)
    assert code == 0
    assert "keep this export" not in err
    assert "Other number formats" not in (exported / "again/README.md").read_text()
    model = transformers.LlamaForCausalLM.from_pretrained(exported / "llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.mul_(2.0**-30)
        layer.self_attn.o_proj.weight.mul_(2.0**30)
    model.save_pretrained(exported / "llama")
    (code, _, err), (noise, _, reason) = typed(
        "export llama mla --format deepseek_v3", "eval mla --data text.txt --stored-as fp16", cwd=exported
    )
    assert code == 0
    assert "keep this export in bfloat16 or float32" in err
    assert "self_attn.o_proj" in err
    assert "| `self_attn.o_proj.weight` | 100% | 100% |" in (exported / "mla/README.md").read_text()
    assert noise != 0
    assert "o_proj.weight leaves the range of fp16" in reason
    ids = torch.tensor(hf.Tokenizer.from_file(str(exported / "again/tokenizer.json")).encode(TEXT).ids)[None]
    for kind, (_, out, _) in zip(evals, printed, strict=True):
        found = json.loads(out)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(exported / "again", dtype=torch.float32)
        exact = theirs(ids).logits[0, :-1].double().log_softmax(-1)
        for weight in theirs.parameters():
            weight.copy_(rounded(weight, kind))
        logs = theirs(ids).logits[0, :-1].double().log_softmax(-1)
        wanted = ids[0, 1:, None]
        assert found["kl"] == pytest.approx(float((exact.exp() * (exact - logs)).sum(-1).mean()), rel=1e-3)
        assert found["loss"] == pytest.approx(-float(logs.gather(1, wanted).mean()), abs=1e-5)
        assert found["loss_exact"] == pytest.approx(-float(exact.gather(1, wanted).mean()), abs=1e-5)
        assert found["kl"] > 0
        assert found["stored_as"] == kind


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_long_text_is_compared_whole(exported):
    """The loss with and without rounding is of the same tokens: that of `eval` without --stored-as."""
    texts = [TEXT, TEXT[::-1], "dog fox over the "]
    (exported / "long.txt").write_text("".join(texts[i * i % 7 % 3] * (1 + i % 5) for i in range(120)))
    words = [f"eval llama --data long.txt --length 64 --stride {stride}" for stride in (64, 48)]
    results = documents(*words, *(f"{line} --stored-as q8_0" for line in words), cwd=exported)
    for plain, found in zip(results[:2], results[2:], strict=True):
        assert found["tokens"] > 65_536
        assert found["loss_exact"] == pytest.approx(plain["loss"], rel=1e-7)
        assert found["loss"] != plain["loss"]


@pytest.mark.process
@torch.no_grad()
def test_rounded_caches_beside_rounded_weights_are_compared_too(exported):
    line = "eval llama --data text.txt --length 64 --stored-as fp16"
    stored, both = documents(line, f"{line} --kv-dtype fp8", cwd=exported)
    assert both["loss_exact"] == stored["loss_exact"]
    exact = rehead.load(exported / "llama")
    model, ids = as_stored(exact, "fp16"), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    caches = partial(rounded_caches, model, kv_dtypes["fp8"]())
    rows = exact(ids)[0], model.logits(model.hidden(ids, None, caches(ids)))[0]
    first, second = (row[:-1].double().log_softmax(-1) for row in rows)
    found = changed(exact, model, ids[0].numpy(), 7, caches=caches)
    assert found["kl"] == pytest.approx(float((first.exp() * (first - second)).sum(-1).mean()), rel=1e-6)
    assert both["kl"] > 10 * stored["kl"] > 0


def test_the_rounded_model_shares_what_the_first_shares():
    model = gpt(tied=True)
    stored = as_stored(model, "fp16")
    assert stored.head.weight is stored.embed_tokens.weight
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert 0 < (stored(ids) - model(ids)).abs().max() < 1e-2


def test_a_tied_matrix_is_rounded_once(monkeypatch):
    """Beside the look at every weight before; the forecast of the memory counts one, too."""
    made, exact = [], stored.as_in_file

    def noting(name, *given, **named):
        made.append(name)
        return exact(name, *given, **named)

    monkeypatch.setattr(stored, "as_in_file", noting)
    model = gpt(tied=True)
    as_stored(model, "fp16")
    assert made == 2 * [name for name, _ in model.named_parameters()]


@pytest.mark.process
@torch.no_grad()
def test_check_says_what_transformers_would_predict(exported):
    model = transformers.LlamaForCausalLM.from_pretrained(exported / "llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(2.0**30)
    shutil.copytree(exported / "llama", exported / "large")
    model.save_pretrained(exported / "large")
    (_, printed, _), (code, unsafe, _) = typed(
        "check llama --data text.txt --json", "check large --data text.txt --dtype fp16", cwd=exported
    )
    said = json.loads(printed)
    assert (said["blocks"], said["tokens"]) == (1, len(TEXT) - 1)
    assert (said["safe"], list(said["formats"])) == (True, ["fp16", "bf16", "q8_0"])
    model = transformers.LlamaForCausalLM.from_pretrained(exported / "llama")
    ids = torch.tensor(hf.Tokenizer.from_file(str(exported / "llama/tokenizer.json")).encode(TEXT).ids)[None]
    exact = model(ids).logits[0, :-1].double().log_softmax(-1)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    for kind, found in said["formats"].items():
        for name, weight in model.named_parameters():
            weight.copy_(rounded(weights[name], kind))
        logs = model(ids).logits[0, :-1].double().log_softmax(-1)
        assert found["kl"] == pytest.approx(float((exact.exp() * (exact - logs)).sum(-1).mean()), rel=1e-3)
        assert found["loss"] == pytest.approx(-float(logs.gather(1, ids[0, 1:, None]).mean()), abs=1e-5)
        assert found["safe"]
    assert code == 0
    assert "fp16: NOT SAFE: layers.0.self_attn.o_proj.weight leaves the range of fp16" in unsafe


@pytest.mark.process
def test_a_damaged_model_is_refused_as_convert_refuses_it(exported):
    """No format is to blame, and none helps; nothing is written, so nothing can be uploaded."""
    model = transformers.LlamaForCausalLM.from_pretrained(exported / "llama")
    for folder, bad in (("infinite", float("inf")), ("llama", float("nan"))):
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = bad
        model.save_pretrained(exported / folder)
    letters = [*sorted({*TEXT.replace(" ", "Ġ")}), "th"]
    inner = hf.Tokenizer(hf.models.BPE({letter: i for i, letter in enumerate(letters)}, [("t", "h")]))
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.save(str(exported / "llama/tokenizer.json"))  # one that llama.cpp has, too
    reason = "layers.1.mlp.up_proj.weight holds NaN or infinity: this model is damaged. Go back to one that is not."
    lines = [
        "convert llama out --to mla",
        "export llama out",
        "export llama out --push me/llama",
        "export llama out.gguf --format gguf --dtype q8_0",
        "check llama --data text.txt",
        "convert infinite out --to mla",
    ]
    for line, (code, out, err) in zip(lines, typed(*lines, cwd=exported), strict=True):
        assert (code, out) == (7, ""), line
        assert err.splitlines()[-1] == f"rehead: {reason}", line
    assert {path.name for path in exported.iterdir()} == {"llama", "infinite", "text.txt"}


def test_a_copy_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("rehead.system.memory.free_memory", lambda device: 1000)
    with pytest.raises(ResourceError, match=r"the weights as q8_0 needs about .*\(copy"):
        as_stored(gpt(), "q8_0")


def test_the_comparison_obeys_the_batch_size(monkeypatch):
    rows = []
    monkeypatch.setattr(
        quality, "evaluation_blocks", lambda *given: rows.append(given[2]) or evaluation_blocks(*given)
    )
    model, ids = gpt(), np.arange(120) % 30
    assert changed(model, model, ids, 8, batch_size=1) == pytest.approx(changed(model, model, ids, 8))
    assert rows == [1, MOST_BLOCKS]


def test_the_comparison_counts_the_logits_of_both_models(monkeypatch):
    """It reads as few blocks at once as the memory needs, and none that do not fit."""
    model, ids, rows = gpt(), np.arange(120) % 30, []
    monkeypatch.setattr(
        quality, "evaluation_blocks", lambda *given: rows.append(given[2]) or evaluation_blocks(*given)
    )
    two, parts = batch_of(model.config, 8, torch.float64, 1 << 40, 2)
    monkeypatch.setattr(
        "rehead.system.memory.free_memory", lambda device: sum(parts.values()) + parts["logits"]
    )
    monkeypatch.setattr(quality, "free_memory", lambda device: 0)
    changed(model, model, ids, 8, batch_size=two)
    changed(model, model, ids, 8)
    assert rows == [2, 1]
    with pytest.raises(ResourceError, match=r"reading 3 x 8 tokens at once .*Use a smaller --batch-size"):
        changed(model, model, ids, 8, batch_size=3)


@pytest.mark.parametrize("head", [64, 48])
def test_keys_of_a_latent_are_rounded_as_in_the_file(head):
    """llama.cpp's file has them transposed: 32 numbers of a head share a scale, not 32 latents."""
    latent = LatentConfig(
        n_query_head=2, n_kv_head=2, kv_lora_rank=64, qk_nope_head_dim=head, qk_rope_head_dim=8, v_head_dim=32,
        rope=RopeConfig(layout="interleaved"),
    )  # fmt: skip
    torch.manual_seed(2)
    other = replace(latent, n_kv_head=1, qk_nope_head_dim=96)
    config = llama_shaped(HEADS, other, latent, vocab_size=31, block_size=16, n_embd=64, n_hidden=32)
    model = build(config).float()
    name, weight = "layers.2.self_attn.kv_b_proj.weight", model.layers[2].self_attn.kv_b_proj.weight
    weight.data *= torch.logspace(0, -6, 64)  # columns, as factoring makes them
    parts = weight.detach().unflatten(0, (2, head + 32))
    kinds = {64: GGMLQuantizationType.Q8_0, 48: GGMLQuantizationType.F16}

    def of_file(part, kind):
        return torch.from_numpy(quants.dequantize(quants.quantize(part.numpy(), kind), kind)).float()

    keys = of_file(parts[:, :head].mT.contiguous(), kinds[head]).mT
    values = of_file(parts[:, head:].contiguous(), GGMLQuantizationType.Q8_0)
    found = as_stored(model, "q8_0").state_dict()[name].detach()
    assert torch.equal(found, torch.cat([keys, values], 1).flatten(0, 1))
    error = (found - weight.detach()).norm(dim=-1) / weight.detach().norm(dim=-1)
    lost = lost_rows(model, "q8_0").get("self_attn.kv_b_proj.weight", {}).get("q8_0", 0)
    assert lost == int((error > 0.1).sum()) / (len(error) + 128)  # the other latent has 128 rows
