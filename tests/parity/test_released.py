"""What released checkpoints have and few others: keys that say a default, one name of a shared tensor, other words."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_model

import rehead
from rehead.checkpoint import families
from rehead.checkpoint.huggingface import stock
from rehead.conversion.export.folder import export_folder
from rehead.errors import InvalidInput
from rehead.measure import stored
from rehead.measure.served import verdicts

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
BASE = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GEMMA = BASE | {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 14}
MLA = {"kv_lora_rank": 14, "q_lora_rank": 11, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 7}
IDS = torch.arange(40).view(2, 20) % 53


@torch.no_grad()
def made(name, fields, folder):
    """Their model with no weight at its first value, saved in `folder`."""
    torch.set_default_dtype(torch.float32)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    model = class_of(name)(config(**fields)).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def class_of(name):
    return getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def say(folder, **more):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.parametrize("kind", list(families))
def test_an_encoder_is_not_read_as_a_decoder(kind):
    """transformers attends in both directions then, in any class."""
    table = transformers.CONFIG_MAPPING[kind]().to_dict() | {"model_type": kind, "num_experts_per_tok": 6}
    for said in (True, None):
        assert stock.read_config(table | {"is_causal": said}, "config.json")
    with pytest.raises(
        InvalidInput, match="is_causal=False: rehead does not know this key, which may change"
    ):
        stock.read_config(table | {"is_causal": False}, "config.json")


@torch.no_grad()
@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"])
def test_gemma_without_windows_is_read_by_transformers_again(name, tmp_path):
    """Which looks at the window even where no layer slides."""
    made(name, GEMMA | {"layer_types": ["full_attention"] * 3}, tmp_path / "theirs")
    model = rehead.load(tmp_path / "theirs")
    assert {layer.window for layer in model.config.attention} == {None}
    export_folder(tmp_path / "theirs", tmp_path / "out")
    theirs = class_of(name).from_pretrained(tmp_path / "out")
    assert relative(model(IDS), theirs(IDS).logits) < 2e-5
    assert rehead.load(tmp_path / "out").config == model.config


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_shared_tensor_may_have_the_name_of_the_head_alone(name, tmp_path):
    """As `safetensors.torch.save_model` writes it, whose first name in the alphabet stays."""
    fields = {"GPT2": {"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 64}}
    model = made(name, fields.get(name, BASE | {"tie_word_embeddings": True}), tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"))
    held = load_file(tmp_path / "model.safetensors").keys()
    assert not [one for one in held if one.endswith(("embed_tokens.weight", "wte.weight"))]
    assert relative(rehead.load(tmp_path)(IDS), model(IDS).logits) < 2e-5


@torch.no_grad()
@pytest.mark.parametrize("word", ["su", "yarn"])
def test_longrope_of_phi3_had_other_names(word, tmp_path):
    """As Phi3Config reads them."""
    rope = {"type": word, "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 1.5, 2.0]}
    rope["original_max_position_embeddings"] = 64
    fields = BASE | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 64,
    }
    made("Phi3", fields, tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    table.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(table | {"rope_theta": 10_000.0, "rope_scaling": rope}))
    theirs = transformers.Phi3ForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.rope_parameters["rope_type"] == "longrope"
    assert relative(rehead.load(tmp_path)(IDS), theirs(IDS).logits) < 2e-5


@torch.no_grad()
def test_a_factor_that_rotates_all_of_a_head_says_nothing(tmp_path):
    model = made("Llama", BASE, tmp_path)
    say(tmp_path, partial_rotary_factor=1.0)
    assert relative(rehead.load(tmp_path)(IDS), model(IDS).logits) < 2e-5
    say(tmp_path, partial_rotary_factor=0.5)
    with pytest.raises(InvalidInput, match=r"partial_rotary_factor=0\.5: rehead does not know"):
        rehead.load(tmp_path)


@torch.no_grad()
def test_the_token_that_pads_is_not_named_to_youtu(tmp_path):
    """Its class zeroes that token's row as it is loaded, which is the head's row where the two are tied."""
    fields = BASE | MLA | {"rms_norm_eps": 1e-5, "pad_token_id": 7}
    made(
        "DeepseekV3", fields | {"first_k_dense_replace": 3, "tie_word_embeddings": True}, tmp_path / "theirs"
    )
    model = rehead.load(tmp_path / "theirs")
    export_folder(tmp_path / "theirs", tmp_path / "out", "youtu")
    theirs = transformers.YoutuForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(model(IDS), theirs(IDS).logits) < 2e-5
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["pad_token_id"] == 7


@torch.no_grad()
def test_a_routers_bias_keeps_its_digits_in_every_format(tmp_path):
    """As in transformers and vLLM; bfloat16 has not those in which the biases of experts differ."""
    moe = {
        "moe_intermediate_size": 28,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
    }
    made("DeepseekV3", BASE | MLA | moe | {"n_group": 1, "topk_group": 1}, tmp_path)
    model = rehead.load(tmp_path)
    for name, weight in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            weight.copy_(4 + 0.002 * torch.arange(8))
        else:
            weight.copy_(weight.bfloat16())
    ids = torch.randint(53, (600,)).numpy()
    assert stored.changed(model, stored.as_stored(model, "bf16"), ids, 64)["kl"] == 0
    (found,) = verdicts(model, ["bf16"], ids, 64)
    assert found.kl == 0
    assert found.kl_computed < 0.003
    fresh = rehead.load(tmp_path)
    exact, kept = (dict(one.named_parameters()) for one in (fresh, stored.as_stored(fresh, "q8_0")))
    whole = {name for name in exact if exact[name].dim() > 1 and torch.equal(exact[name], kept[name])}
    assert whole == {f"layers.{layer}.mlp.gate.weight" for layer in (1, 2)}
