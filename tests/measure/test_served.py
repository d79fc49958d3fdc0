"""Whether a model can be served in a smaller format: models that can, and ways in which one cannot."""

import numpy as np
import pytest
import torch

from rehead.attention import GroupedConfig
from rehead.measure.served import SAFE, Verdict, compared, verdicts
from rehead.measure.stored import rounded
from rehead.model import build
from rehead.report.served import line
from small import llama_shaped

HEADS = GroupedConfig(n_query_head=2, n_kv_head=2, head_dim=32, rope=True)
IDS = np.arange(150) * 7919 % 31
KINDS = ("fp16", "bf16", "q8_0")


@pytest.fixture
def model():
    """Two layers, 64 wide, in float32, with weights large enough to matter."""
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float32)
    config = llama_shaped(*[HEADS] * 2, vocab_size=32, block_size=24, n_embd=64, n_hidden=96)
    made = build(config).eval()
    for weight in made.parameters():
        weight.data *= 4 if weight.ndim > 1 else 1
    return made


def by_name(model, *kinds):
    return {found.dtype: found for found in verdicts(model, kinds, IDS, 24)}


@torch.no_grad()
def test_a_sound_model_is_safe_in_all(model):
    found = by_name(model, *KINDS)
    assert [line(found[kind]) for kind in KINDS] == [f"{kind}: safe, on 149 tokens only" for kind in KINDS]
    ids = torch.from_numpy(IDS)
    inputs, targets = ids[:-1].split(24), ids[1:].split(24)
    exact = torch.cat([model(block[None])[0].double().log_softmax(-1) for block in inputs])
    for weight in model.parameters():
        weight.copy_(rounded(weight, "q8_0"))
    logs = torch.cat([model(block[None])[0].double().log_softmax(-1) for block in inputs])
    wanted = torch.cat(targets)[:, None]
    said = found["q8_0"]
    assert said.kl == pytest.approx(float((exact.exp() * (exact - logs)).sum(-1).mean()), rel=1e-3)
    assert said.loss_exact == pytest.approx(-float(exact.gather(1, wanted).mean()), abs=1e-5)
    assert said.loss == pytest.approx(-float(logs.gather(1, wanted).mean()), abs=1e-5)
    assert said.argmax_flips == float((exact.argmax(-1) != logs.argmax(-1)).double().mean())
    assert said.kl_computed is None


def test_what_a_format_cannot_hold_is_not_safe(model):
    model.layers[1].self_attn.o_proj.weight.data[3] *= 1e7
    found = by_name(model, *KINDS)
    assert [found[kind].safe for kind in KINDS] == [False, True, False]
    said = line(found["fp16"])
    assert said.startswith("fp16: NOT SAFE: layers.1.self_attn.o_proj.weight leaves the range of fp16")
    assert "It loses 0.781 % of the rows of self_attn.o_proj." in said
    assert found["fp16"].kl is None


def test_a_number_that_hides_its_block_is_not_safe_in_8_bits(model):
    """No row is lost by its size: the large number reads a place of the residual stream that stays 0."""
    model.embed_tokens.weight.data[:, 5] = 0
    for layer in model.layers:
        layer.self_attn.o_proj.weight.data[5] = 0
        layer.mlp.down_proj.weight.data[5] = 0
        layer.mlp.up_proj.weight.data[:, [5, 40]] = torch.tensor([3e3, 0.0])
    found = by_name(model, "fp16", "q8_0")
    assert found["fp16"].safe
    assert found["q8_0"].kl > SAFE
    assert line(found["q8_0"]) == (
        f"q8_0: NOT SAFE, on 149 tokens only: its predictions change by {found['q8_0'].kl:.2g} "
        "nats (mean KL); up to 0.01 is safe."
    )


def test_a_computation_that_overflows_is_not_safe(model):
    """In float16 the MLP's product leaves the range, though every weight is in it."""
    for layer in model.layers:
        layer.mlp.up_proj.weight.data *= 2.0**14
        layer.mlp.down_proj.weight.data *= 2.0**-7
        layer.post_attention_layernorm.weight.data *= 64
        layer.mlp.gate_proj.weight.data /= 64
    found = by_name(model, "fp16", "bf16")["fp16"]
    assert found.kl < SAFE
    assert "computed in fp16" in line(found)
    assert not found.safe


def test_lost_rows_that_do_not_matter_are_told(model):
    model.embed_tokens.weight.data[31] *= 2.0**-60  # a token that the text does not have
    found = by_name(model, "fp16")["fp16"]
    assert found.safe
    assert found.lost == {"embed_tokens.weight": 1 / 32}
    assert "It loses 3.12 % of the rows of embed_tokens, which did not matter here" in line(found)


@pytest.mark.parametrize(
    ("n_id", "length", "counts"), [(2, 24, 1), (150, 24, 149), (9000, 24, 4080), (9000, 5000, 5000)]
)
def test_how_many_tokens_are_compared(n_id, length, counts, model):
    """As many as the blocks have targets; a verdict on few says so."""
    ids = np.arange(n_id) * 7919 % 31
    assert compared(ids, length) == counts
    if length <= model.config.block_size:
        (found,) = verdicts(model, ["q8_0"], ids, length)
        assert found.tokens == counts
        few = {1: ", on 1 token only", 149: ", on 149 tokens only"}
        assert line(found) == f"q8_0: safe{few.get(counts, '')}"


@pytest.mark.parametrize("tokens", [255, 256])
def test_few_tokens_are_fewer_than_256(tokens):
    verdict = Verdict(dtype="fp16", tokens=tokens, kl=0.5, lost={"o_proj.weight": 1.0}, problem="it changes.")
    few = ", on 255 tokens only" if tokens == 255 else ""
    assert line(verdict) == f"fp16: NOT SAFE{few}: it changes. It loses 100 % of the rows of o_proj."
