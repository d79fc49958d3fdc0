"""vLLM's CPU build generates the same tokens from an exported MLA folder as from the Llama it was."""

import shutil
from dataclasses import replace

import gguf_models
import pytest
import torch
from safetensors.torch import load_file, save_file

import rehead
from mlx_models import GQA, SLIDING, WINDOW, rope
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.model import build

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]
MODELS = {
    "mqa, heads of 64": {"n_query_head": 3, "head_dim": 64, "n_embd": 48},
    "mqa, heads of 32, tied": {"n_query_head": 5, "head_dim": 32, "n_embd": 40, "tie_embeddings": True},
    "no rope": {"n_query_head": 6, "n_kv_head": 2, "n_embd": 48, "rope": False},
}
PROMPTS = [[3, 14, 15, 9, 26], [7 * i % 53 for i in range(17)], [i * i % 53 for i in range(40)]]
"""Shorter than one of vLLM's blocks of 16, a little longer, and much longer."""


class Written:
    """What a model in float64 writes after every prompt, and how likely it finds the prompts' own tokens."""

    def __init__(self, model, prompts=PROMPTS):
        each = [self.after(model, prompt) for prompt in prompts]
        self.tokens, self.logprobs, leads = map(list, zip(*each, strict=True))
        self.lead = min(leads)

    def after(self, model, prompt, n_new=24):
        ids = rehead.generate(model, torch.tensor([prompt]), max_new_tokens=n_new, temperature=0)
        with torch.no_grad():
            logits = model(ids[:, :-1])[0]
        own = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[: len(prompt) - 1, 0]
        best = logits[len(prompt) - 1 :].topk(2).values
        return ids[0, len(prompt) :].tolist(), own.tolist(), float((best[:, 0] - best[:, 1]).min())

    def errors(self, answer):
        """How far an engine's log-probabilities are from these."""
        pairs = zip(answer["logprobs"], self.logprobs, strict=True)
        return torch.cat([torch.tensor(here) - torch.tensor(there) for here, there in pairs])

    def apart(self, answer):
        """The largest of the errors."""
        return float(self.errors(answer).abs().max())


class Case:
    """A model that is no engine's, and what `rehead export` makes of it."""

    def __init__(self, name, folder, dtype=torch.float32):
        fields = {"n_kv_head": 1, "rope": True} | MODELS[name]
        config = ModelOptions(shape="llama", n_layer=2, **fields).resolve(53, 96)
        torch.manual_seed(1)
        model = build(replace(config, learned_positions=False)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        rehead.save(model.to(dtype), folder / "source")
        self.folder = folder
        self.written = Written(model.double())

    def exported(self, family):
        folder = self.folder / family
        if not folder.exists():
            assert main(["export", str(self.folder / "source"), str(folder), "--format", family]) == 0
        return folder


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("case"))


def test_the_models_can_tell(case):
    """No token is a tie that rounding decides, and no text is one token again and again."""
    assert case.written.lead > 1e-3
    assert all(len(set(tokens)) > 5 for tokens in case.written.tokens)


@pytest.mark.parametrize("implementation", ["vllm", "transformers"])
def test_an_exported_mla_generates_what_its_source_does(case, vllm, implementation):
    answer = vllm(case.exported("deepseek_v3"), PROMPTS, implementation=implementation)
    assert (answer["architecture"] == "DeepseekV3ForCausalLM") == (implementation == "vllm")
    assert answer["tokens"] == case.written.tokens
    assert case.written.apart(answer) < 1e-4


@pytest.mark.parametrize("case", [name for name in MODELS if name != "no rope"], indirect=True)
def test_so_does_its_source_as_llama(case, vllm):
    answer = vllm(case.exported("llama"), PROMPTS)
    assert answer["architecture"] == "LlamaForCausalLM"
    assert answer["tokens"] == case.written.tokens
    assert case.written.apart(answer) < 1e-4


def test_a_wrong_query_scale_is_seen(case, vllm, tmp_path):
    """The checks above can fail."""
    wrong = tmp_path / "wrong"
    shutil.copytree(case.exported("deepseek_v3"), wrong)
    weights = load_file(wrong / "model.safetensors")
    scaled = {name: weight * 1.1 for name, weight in weights.items() if name.endswith("q_proj.weight")}
    save_file(weights | scaled, wrong / "model.safetensors", metadata={"format": "pt"})
    answer = vllm(wrong, PROMPTS)
    assert answer["tokens"] != case.written.tokens
    assert case.written.apart(answer) > 1e-2


LLAMA3 = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_a_canonical_latent_of_eight_kv_heads(scaling, tmp_path, vllm):
    """Approximate, with one rotary part of DeepSeek's angles: vLLM's own class writes what rehead does with it."""
    sizes = {"n_query_head": 8, "n_kv_head": 8, "head_dim": 64, "n_embd": 300}
    config = ModelOptions(shape="llama", n_layer=2, rope=True, rope_scaling=scaling, **sizes).resolve(53, 96)
    torch.manual_seed(1)
    model = build(replace(config, learned_positions=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    text = torch.randint(53, (400,), generator=torch.Generator().manual_seed(2))
    half, _ = rehead.convert(model, "mla", target="canonical", kv_rank=280, calibration=text)
    rehead.save(half, tmp_path / "half")
    assert main(["export", str(tmp_path / "half"), str(tmp_path / "out"), "--for", "vllm"]) == 0
    written = Written(half.double())
    answer = vllm(tmp_path / "out", PROMPTS)
    assert written.lead > 1e-3
    assert answer["tokens"] == written.tokens
    assert written.apart(answer) < 1e-4


def test_a_yarn_that_scales_rotations_and_scores(tmp_path, vllm):
    """`mscale` and `mscale_all_dim` that differ, as DeepSeek-V2-Lite's nearly do.

    The last prompt is longer than the 4 x 16 positions for which vLLM would have angles (`yarn.reaching`).
    """
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "mscale": 0.7}
    config = ModelOptions(
        shape="llama", n_layer=2, n_query_head=4, n_embd=64, attention="mla", rope=True, rope_layout="interleaved",
        rope_scaling=yarn | {"beta_fast": 8, "mscale_all_dim": 0.5}, **sizes,
    ).resolve(53, 96)  # fmt: skip
    torch.manual_seed(1)
    model = build(replace(config, learned_positions=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    rehead.save(model, tmp_path / "mla")
    assert main(["export", str(tmp_path / "mla"), str(tmp_path / "out"), "--for", "vllm"]) == 0
    prompts = [*PROMPTS, [i * i % 53 for i in range(70)]]
    written = Written(model.double(), prompts)
    answer = vllm(tmp_path / "out", prompts)
    assert written.lead > 1e-4
    assert answer["tokens"] == written.tokens
    assert written.apart(answer) < 1e-4


def test_weights_in_bfloat16(tmp_path, vllm):
    """Computed in float32 the folder's own tokens; in bfloat16 nearly as near to float64 as its source.

    A third of the weights are rounded once more than the source's.
    """
    case = Case("mqa, heads of 64", tmp_path, torch.bfloat16)
    mla, llama = case.exported("deepseek_v3"), case.exported("llama")
    written = Written(rehead.load(mla).double())
    answer = vllm(mla, PROMPTS)
    assert written.lead > 1e-3
    assert answer["tokens"] == written.tokens
    assert written.apart(answer) < 1e-4
    errors = [case.written.errors(vllm(folder, PROMPTS, dtype="bfloat16")).norm() for folder in (mla, llama)]
    assert errors[0] <= 1.5 * errors[1]


def test_the_rotary_kernel_of_this_build_is_wrong(tmp_path, vllm):
    """Why docs/serving.md turns it off. When this fails, it need not be."""
    case = Case("mqa, heads of 64", tmp_path)
    answer = vllm(case.exported("deepseek_v3"), PROMPTS, custom_ops=())
    assert case.written.apart(answer) > 1e-2


@pytest.mark.parametrize(
    ("kind", "fields", "alike"),
    [
        ("Qwen3", GQA | {"attention_bias": True}, False),
        (
            "Llama",
            GQA | rope("yarn", attention_factor=1.5) | {"attention_bias": True, "mlp_bias": True},
            True,
        ),
        ("Mistral", GQA | WINDOW, True),
        ("Qwen2", SLIDING, True),
    ],
    ids=["biases of qwen3", "yarn, biases", "window", "windows of qwen2"],
)
def test_plain_heads_are_read_or_refused(kind, fields, alike, tmp_path, vllm):
    """It leaves out the bias of Qwen3's output, without an error: `--for vllm` refuses what this test writes."""
    gguf_models.write(tmp_path / "model", kind, fields | {"hidden_size": 128, "head_dim": 32})
    source, out = str(tmp_path / "model"), str(tmp_path / "out")
    assert main(["export", source, out]) == 0
    assert (main(["export", source, f"{out}-for", "--for", "vllm"]) == 0) == alike
    written = Written(rehead.load(tmp_path / "model").double())
    apart = written.apart(vllm(tmp_path / "out", PROMPTS))
    assert apart < 1e-4 if alike else apart > 1e-2
