"""Models with experts, through the commands a user types: the attention is converted, the experts are copied."""

import json
import shlex

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

import rehead
from rehead.cli import main
from rehead.tokenizer import train
from typed_lines import documents

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.heavy
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 16
SIZES = {
    "vocab_size": len(set(TEXT)), "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
    "num_experts_per_tok": 3, "moe_intermediate_size": 28, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN = SIZES | {"num_experts": 5, "norm_topk_prob": True, "mlp_only_layers": [1]}
LITE = SIZES | {
    "num_key_value_heads": 6, "kv_lora_rank": 14, "q_lora_rank": None, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 7, "head_dim": None, "n_routed_experts": 8, "first_k_dense_replace": 1,
}  # fmt: skip


def written(kind, fields, folder):
    """Their model, random, with a tokenizer and two texts beside it."""
    torch.manual_seed(4)
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder / "theirs")
    (folder / "theirs" / "tokenizer.json").write_text(train("char", TEXT).to_json())
    (folder / "fit.txt").write_text(TEXT[:1000], encoding="utf-8")
    (folder / "held.txt").write_text(TEXT[1000:], encoding="utf-8")
    return model


def encoded(folder, file):
    return torch.as_tensor(rehead.load_tokenizer(folder / "theirs").encode((folder / file).read_text()))


def their_loss(theirs, ids, length):
    """Mean over every token but the first, each predicted from up to `length` before it in its window."""
    total, count = 0.0, len(ids) - 1
    for start in range(0, count, length):
        inputs, targets = ids[start : start + length], ids[start + 1 : start + length + 1]
        logits = theirs(inputs[None, : len(targets)]).logits[0]
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
    return total / count


def untouched(theirs, ours):
    """Names of the tensors outside the attention, after each was compared byte for byte."""
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
    names = [name for name in before if ".self_attn." not in name]
    for name in names:
        here = name if name in after else name.removeprefix("model.").replace("lm_head", "head")
        assert before[name].dtype == after[here].dtype
        assert before[name].numpy().tobytes() == after[here].numpy().tobytes(), name
    return names


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(600)  # seven commands, on a machine that may be busy
@torch.no_grad()
def test_qwen3_moe_as_typed(tmp_path):
    """Exact at full rank, fitted below it, pooled and exported: each figure twice."""
    theirs = written("Qwen3Moe", QWEN, tmp_path)
    ids = encoded(tmp_path, "held.txt")
    loss = their_loss(theirs, ids, 64)
    fitted = "--calibration fit.txt --test held.txt --length 64 --allow-loss"
    prompt = shlex.quote((tmp_path / "held.txt").read_text()[:5])
    planned, certificate, half, measured, pooled, exported, generated = documents(
        "plan theirs",
        "convert theirs exact --to mla --test held.txt --length 64",
        f"convert theirs half --to mla --kv-fraction 0.5 {fitted}",
        "eval half --data held.txt --length 64",
        f"convert theirs pooled --to mqa {fitted}",
        "export pooled stock",
        f"generate pooled --prompt {prompt} --max-new-tokens 32 --temperature 0",
        cwd=tmp_path,
    )

    rows = {row["command"]: row for row in planned["rows"]}
    verdicts = [rows[key]["verdict"] for key in ("", "--to mla", "--to mla --kv-fraction 0.5", "--to mqa")]
    assert verdicts == ["present", "exact", "approximate", "approximate"]
    per_expert = 3 * 24 * 28
    assert rows[""]["parameters"] == theirs.num_parameters()
    assert rows[""]["parameters"] - rows[""]["active_parameters"] == 2 * (5 - 3) * per_expert
    assert any("2 of 3 layers have 5 experts; a token uses 3" in note for note in planned["notes"])

    assert certificate["exact"]
    assert certificate["loss"] == pytest.approx([loss, loss], abs=1e-5)
    wanted = theirs(ids[None, :64]).logits
    assert (rehead.load(tmp_path / "exact")(ids[None, :64]) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    names = untouched(tmp_path / "theirs", tmp_path / "exact")
    assert sum(".mlp.experts." in name for name in names) == 2 * 5 * 3
    assert (
        "Experts and their routers are those of the source" in (tmp_path / "exact/CONVERSION.md").read_text()
    )

    assert not half["exact"]
    assert {method for layer in half["layers"] for method in layer["methods"]} == {"weighted"}
    assert half["loss"][0] == pytest.approx(loss, abs=1e-5)
    assert measured["loss"] == pytest.approx(half["loss"][1], abs=1e-5)
    untouched(tmp_path / "theirs", tmp_path / "half")

    assert exported["architecture"] == "Qwen3MoeForCausalLM"
    untouched(tmp_path / "theirs", tmp_path / "stock")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert their_loss(stock, ids, 64) == pytest.approx(pooled["loss"][1], abs=1e-5)
    tokens = stock.generate(ids[None, :5], max_new_tokens=32, do_sample=False)
    assert generated["results"][0]["completion"] == rehead.load_tokenizer(tmp_path / "theirs").decode(
        tokens[0, 5:].tolist()
    )


def test_what_no_engine_has_a_class_for_is_refused_by_name(tmp_path, capfd):
    written("Qwen3Moe", QWEN, tmp_path)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "mla"), "--to", "mla"]) == 0
    for format in ("auto", "deepseek_v3", "qwen3_moe"):
        capfd.readouterr()
        status = main(["export", str(tmp_path / "mla"), str(tmp_path / "out"), "--format", format])
        error = capfd.readouterr().err
        assert status == 2
        assert (
            "Experts can only be exported" in error
            or "Qwen3MoeForCausalLM cannot represent this model's attention" in error
        )
        assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_deepseek_v2_lite_is_measured_and_exported(tmp_path, capfd):
    """Its latent has a norm, which no conversion shrinks: refused by name; it is evaluated and goes out as it is."""
    theirs, held = written("DeepseekV2", LITE, tmp_path), str(tmp_path / "held.txt")
    folder, out = str(tmp_path / "theirs"), str(tmp_path / "out")
    assert main(["eval", folder, "--data", held, "--length", "64", "--json"]) == 0
    measured = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert measured["loss"] == pytest.approx(their_loss(theirs, encoded(tmp_path, "held.txt"), 64), abs=1e-5)
    assert main(["convert", folder, out, "--to", "mla", "--kv-fraction", "0.5", "--allow-loss"]) == 2
    assert "latent_norm=True" in capfd.readouterr().err
    assert main(["export", folder, out]) == 0
    untouched(tmp_path / "theirs", tmp_path / "out")
    assert isinstance(
        transformers.AutoModelForCausalLM.from_pretrained(out), transformers.DeepseekV2ForCausalLM
    )


def test_healing_trains_the_attention_beside_frozen_experts(tmp_path, capfd):
    written("Qwen3Moe", QWEN, tmp_path)
    theirs, pooled = str(tmp_path / "theirs"), str(tmp_path / "pooled")
    assert main(["convert", theirs, pooled, "--to", "mqa", "--allow-loss"]) == 0
    words = ["heal", pooled, "--teacher", theirs, f"data.path={tmp_path / 'fit.txt'}", "trainer.max_iters=2"]
    capfd.readouterr()
    assert main([*words, "data.block_size=32"]) == 2
    assert "Use trainer.train=attention" in capfd.readouterr().err
    assert (
        main([*words, "data.block_size=32", "trainer.train=attention", "system.work_dir=" + pooled + "-h2"])
        == 0
    )
    healed = rehead.load(pooled + "-h2").state_dict()
    for name, weight in rehead.load(pooled).state_dict().items():
        assert torch.equal(healed[name], weight) == (".self_attn." not in name), name
