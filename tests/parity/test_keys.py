"""Which keys of a config.json may be ignored: asked of transformers' own source."""

import importlib
import inspect
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import rehead
from rehead.checkpoint import families
from rehead.checkpoint.huggingface.base import SHARED, UNREAD, Fields
from rehead.checkpoint.huggingface.mla import LatentLike
from rehead.errors import InvalidInput
from rehead.tokenizer import train
from typed_lines import typed

OF_CLASSES = r"(?<![\w.])(?:self\.)?config\.(\w+)"
BY_NAME = r'(?:getattr|hasattr)\((?:self\.)?config, "(\w+)"'
METHODS = {"get_text_config", "_attn_implementation"}
BLIND = {
    "gemma3_text": {"image_token_id", "mm_tokens_per_image", "text_config", "vision_config"},  # with images
    "gpt2": {"num_labels", "summary_last_dropout", "max_position_embeddings", "hidden_size"}
    | {
        "hidden_dropout",
        "num_attention_heads",
        "num_hidden_layers",
    },  # classifiers, and names for the older keys
    "gpt_neox": {"num_labels"},
    "minicpm3": {"logits_scaling"},  # computed from keys that are read
}
"""Keys read for another task than language modelling."""
MORE = {"deepseek_v2": {"num_experts_per_tok": 6}}
"""Keys whose default the class itself cannot build a model from."""
MODULES = ("masking_utils", "cache_utils", "modeling_rope_utils")
NO_KEYS = METHODS | {"_rope_type_labels", "default_theta", "json", "standardize_rope_params", "validate_rope"}
NO_KEYS |= {"cumulative_length", "kv_sharing_modes"}


class Recorded(Fields):
    """Which keys were asked for."""

    def __init__(self, table, where):
        super().__init__(table, where)
        self.asked = set()

    def look(self, name, *rest, **more):
        self.asked.add(name)
        return super().look(name, *rest, **more)

    def expect(self, name, *allowed):
        self.asked.add(name)
        return super().expect(name, *allowed)


def asked_by(kind):
    """The keys a family takes, of the class's own defaults."""
    fields = Recorded(
        CONFIG_MAPPING[kind]().to_dict() | MORE.get(kind, {}) | {"model_type": kind}, "config.json"
    )
    families[kind].read(fields)
    return fields.asked


@pytest.mark.parametrize("kind", list(families))
def test_a_missing_key_is_their_default(kind):
    """What the class's own config has where a key is not given is what rehead takes."""
    heads = {"num_attention_heads": 64}  # few defaults follow from that
    if isinstance(families[kind], LatentLike):
        heads["num_key_value_heads"] = 64
    theirs = CONFIG_MAPPING[kind](**heads)
    table = theirs.to_dict() | MORE.get(kind, {}) | {"model_type": kind}
    ours, found = families[kind].read(Fields(table, "config.json")), {}
    other = getattr(families[kind], "sizes", {}).keys() & {"num_attention_heads"}  # whose default is not 64
    for key in sorted((asked_by(kind) & table.keys()) - other):
        with suppress(InvalidInput):  # a key that a file must have
            rest = {name: value for name, value in table.items() if name != key}
            found[key] = families[kind].read(Fields(rest, "config.json")) == ours
    assert len(found) > 5
    assert {key for key, same in found.items() if not same} == set()


def read_in(source):
    """The keys that some source reads of a config."""
    return set(re.findall(OF_CLASSES, source)) | set(re.findall(BY_NAME, source))


@pytest.mark.parametrize("kind", list(families))
@pytest.mark.filterwarnings("error")  # a default that is ignored
def test_a_family_takes_every_key_its_class_reads(kind):
    config = CONFIG_MAPPING[kind]
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    read = read_in(inspect.getsource(sys.modules[model.__module__]))
    assert len(read) > 10
    assert read - asked_by(kind) - UNREAD - METHODS - BLIND.get(kind, set()) == set()


def test_keys_read_for_any_class_are_refused_unless_taken():
    source = "".join(inspect.getsource(importlib.import_module(f"transformers.{name}")) for name in MODULES)
    everywhere = set.intersection(*map(asked_by, families)) | asked_by("llama")
    assert read_in(source) - NO_KEYS - everywhere - UNREAD <= SHARED


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 11}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "found")
    (tmp_path / "found" / "tokenizer.json").write_text(train("char", "abcdefghij ").to_json())
    return tmp_path / "found"


def say(folder: Path, **more):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


FOUND = {
    "use_cache_quantization": True,
    "_flash_attn_2_enabled": True,
    "_model_name_or_path": "someone/something",
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "clip_qkv": 8.0,
}


def test_keys_the_class_does_not_read_are_named_once_and_change_nothing(folder):
    """As typed; the logits are those of transformers, which ignores the same keys."""
    say(folder, **FOUND)
    [(code, _, said)] = typed(["generate", folder, "--prompt", "abc", "--max-new-tokens", "2"])
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if "ignored" in line]
    assert all(name in line for name in FOUND)
    assert line.endswith(
        "which transformers' class for model_type llama does not read. auto_map names code in the "
        "folder, which is not run."
    )
    tokens = torch.arange(11)[None]
    with pytest.warns(UserWarning, match="ignored"):
        ours = rehead.load(folder)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        torch.testing.assert_close(ours(tokens), theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(SHARED - {"quantization_config"}))
def test_keys_read_for_any_class_are_refused(folder, name):
    say(folder, **{name: 4})
    with pytest.raises(InvalidInput, match=f"{name}=4: rehead does not know this key"):
        rehead.load(folder)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4"])
def test_quantised_folders_are_refused_by_name(folder, method):
    say(folder, quantization_config={"quant_method": method, "bits": 4}, auto_map=FOUND["auto_map"])
    with pytest.raises(InvalidInput, match=rf"quant_method '{method}'.*from before its quantisation"):
        rehead.load(folder)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
UNREAD_OF_ROPE = {
    "default": ({"rope_type": "default", "factor": 1.0, "rope_theta": 1e4}, "factor"),
    "linear": (
        {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0, "rope_theta": 1e4},
        "low_freq_factor",
    ),
    "yarn": (YARN | {"finetuned": True, "truncate": True}, "finetuned"),
    "yarn, null": (
        YARN | {"beta_fast": None, "mscale": 1.0, "mscale_all_dim": 0, "attention_factor": None},
        None,
    ),
    "yarn, zero": (YARN | {"beta_fast": 0, "beta_slow": 0, "mscale": 0}, None),
}


@pytest.mark.parametrize("rope", UNREAD_OF_ROPE)
def test_keys_of_rope_that_its_formula_does_not_read(rope, folder, recwarn):
    """Named, and they change nothing, as in transformers."""
    table, unread = UNREAD_OF_ROPE[rope]
    say(folder, rope_parameters=table)
    ours, tokens = rehead.load(folder), torch.arange(11).repeat(4)[None]
    said = [f"{one.message}" for one in recwarn if "ignored" in f"{one.message}"]
    assert [line.partition("ignored ")[2] for line in said] == [
        f"{unread} in rope_parameters, which transformers does not read for rope_type {table['rope_type']}."
    ] * (unread is not None)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        torch.testing.assert_close(ours(tokens), theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"truncate": False}, "truncate=False in rope_parameters: rehead knows True here"),
        ({"truncate": None}, "truncate=None in rope_parameters: rehead knows True here"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 in rope_parameters: this class rotates all"),
        ({"factor": None}, "factor"),
    ],
)  # fmt: skip
def test_keys_of_rope_that_its_formula_reads_are_refused(more, why, folder):
    say(folder, rope_parameters=YARN | more)
    with pytest.raises(InvalidInput, match=why):
        rehead.load(folder)
