"""Experts as transformers computes them: mutants of the router are seen, its bias keeps its dtype, words agree."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

import rehead
from rehead.checkpoint import families
from rehead.checkpoint.huggingface import stock
from rehead.conversion.export.deepseek import with_eps
from rehead.errors import ConfigError, InvalidInput

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
BASE = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 64, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
QWEN_MOE = BASE | {"num_key_value_heads": 2, "head_dim": 10, "num_experts": 5}
LATENT_MOE = BASE | {
    "kv_lora_rank": 14, "q_lora_rank": 11, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 7,
    "num_key_value_heads": 6, "first_k_dense_replace": 1, "n_routed_experts": 8,
}  # fmt: skip
V3 = ("DeepseekV3", LATENT_MOE | {"n_group": 4, "topk_group": 2})
V2 = ("DeepseekV2", LATENT_MOE | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2})
QWEN = ("Qwen3Moe", QWEN_MOE | {"norm_topk_prob": True})
MUTANTS = {
    "weights not normed": (QWEN, {"norm_topk_prob": False}),
    "weights normed": (V2, {"norm_topk_prob": True}),
    "one expert less": (QWEN, {"num_experts_per_tok": 2}),
    "v3, weights not normed": (V3, {"norm_topk_prob": False}),
    "v3, another factor": (V3, {"routed_scaling_factor": 1.0}),
    "v3, no groups": (V3, {"n_group": 1, "topk_group": 1}),
    "v3, no bias": (V3, {}),
    "v2, another factor": (V2, {"routed_scaling_factor": 1.1}),
    "v2, one group": (V2, {"topk_group": 4}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MUTANTS)
def test_another_router_is_seen(name, tmp_path):
    (kind, fields), change = MUTANTS[name]
    torch.manual_seed(2)
    theirs = made(kind, fields, tmp_path)
    ours, ids = rehead.load(tmp_path), torch.randint(1, 53, (2, 30))
    assert relative(ours(ids), theirs(ids).logits) <= 2e-5
    wrong = rehead.model.build(replace(ours.config, experts=replace(ours.config.experts, **change))).eval()
    wrong.load_state_dict(ours.state_dict())
    if not change:
        for layer in wrong.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.zero_()
    assert relative(wrong(ids), theirs(ids).logits) > 1e-3


@torch.no_grad()
def test_the_correction_keeps_its_dtype_beside_narrower_weights(tmp_path):
    """Theirs is in float32 in a model of bfloat16: the others are not widened for it, nor it rounded."""
    theirs = made(V3[0], V3[1] | {"moe_intermediate_size": 48}, tmp_path / "wide").bfloat16()
    for layer in theirs.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = torch.randn(8, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = rehead.load(tmp_path / "theirs")
    kinds = {name: weight.dtype for name, weight in ours.named_parameters()}
    biases = {name for name in kinds if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    assert {kinds.pop(name) for name in biases} == {torch.float32}
    assert set(kinds.values()) == {torch.bfloat16}
    ids = torch.randint(1, 53, (2, 30))
    wanted = theirs(ids).logits
    assert (
        ours(ids) - wanted
    ).abs().mean() < 0.05 * wanted.abs().mean()  # rounding may choose another expert
    assert rehead.generate(ours, ids, max_new_tokens=3, temperature=0).shape == (2, 33)
    assert rehead.load(tmp_path / "theirs", dtype=torch.float32)(ids).dtype == torch.float32
    stock.export(ours, tmp_path / "back", families["deepseek_v3"], {})
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert (weight.dtype, after[name].dtype) == (weight.dtype,) * 2
        assert torch.equal(weight, after[name]), name


@torch.no_grad()
def test_norms_with_another_eps_take_experts_along(tmp_path):
    theirs = made("DeepseekV3", V3[1] | {"rms_norm_eps": 1e-4, "tie_word_embeddings": True}, tmp_path)
    ids = torch.randint(1, 53, (2, 30))
    scaled = with_eps(rehead.load(tmp_path), 1e-6, tied=False)
    assert scaled.config.norm_eps == 1e-6
    assert relative(scaled(ids), theirs(ids).logits) <= 2e-5


@torch.no_grad()
def made(kind, fields, folder):
    """Their model with no weight at its first value, saved in `folder`."""
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    state = [*model.parameters(), *(b for name, b in model.named_buffers() if "correction" in name)]
    for weight in state:
        weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return model


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def say(folder, **changes):
    path = folder / "config.json"
    table = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in table.items() if value is not ...}))


ALIASES = {
    "Qwen3Moe": ("num_local_experts", "num_experts"),
    "DeepseekV2": ("n_routed_experts", "num_experts"),
}
ALIASES["DeepseekV3"] = ("n_routed_experts", "num_local_experts")


@pytest.mark.parametrize("case", [QWEN, V2, V3], ids=lambda case: case[0])
def test_the_number_of_experts_has_two_names(case, tmp_path):
    """Those on the Hub and those that transformers 5 writes; that they mean the same is asked of its config."""
    theirs, (old, new) = made(*case, tmp_path), ALIASES[case[0]]
    number = json.loads((tmp_path / "config.json").read_text())[old]
    say(tmp_path, **{old: ..., new: number})
    assert getattr(transformers.AutoConfig.from_pretrained(tmp_path), old) == number
    assert rehead.load(tmp_path).config.experts.n_routed_experts == number
    say(tmp_path, **{old: number, new: number + 4})
    with pytest.raises(InvalidInput, match="contradict each other: remove one"):
        rehead.load(tmp_path)
    assert getattr(theirs.config, old) == number


UNSAYABLE = {
    "qwen3_moe": ({"n_shared_experts": 1}, "shared experts"),
    "deepseek_v2": ({"norm_topk_prob": True}, "norm_topk_prob"),
    "deepseek_v3": ({"layers": (0, 2)}, "not in all later layers"),
    "qwen3": ({}, "experts"),
    "gpt2": ({}, "experts"),
}


@pytest.mark.parametrize("kind", UNSAYABLE)
def test_a_class_refuses_experts_it_cannot_represent(kind, tmp_path):
    change, why = UNSAYABLE[kind]
    made(*{"deepseek_v2": V2, "deepseek_v3": V3}.get(kind, QWEN), tmp_path)
    config = rehead.load(tmp_path).config
    with pytest.raises(ConfigError, match=why):
        families[kind].write(replace(config, experts=replace(config.experts, **change)))
