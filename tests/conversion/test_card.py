"""The cards of exports, read by huggingface_hub: origin, licence, and what was measured on which text."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard

import rehead
from rehead.checkpoint.companions import chat_template
from rehead.cli import main
from rehead.conversion.certificate import Certificate, Text
from rehead.conversion.export.card import _share, metrics
from rehead.conversion.origin import Origin, front
from rehead.tokenizer import open_model, train
from typed_lines import typed

pytestmark = pytest.mark.heavy

TEXT = "Seem to me all the uses of this world — ü! Fie on't, ah fie\n" * 30
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    Path("test.txt").write_text(TEXT, encoding="utf-8")
    Path("fit.txt").write_text("O God, O God! How weary, stale, flat\n" * 60, encoding="utf-8")


def llama(folder, card=None, **changes):
    """A tiny Llama that transformers wrote, reading bytes, with a card."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{"vocab_size": 256, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
        | sizes
        | changes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (Path(folder) / "tokenizer.json").write_text(train("byte", TEXT).to_json())
    if card is not None:
        (Path(folder) / "README.md").write_text(card, encoding="utf-8")
    return folder


def run(*words):
    assert main(list(words)) == 0


def read(folder):
    """The card as the Hub's own library reads it: strictly, with its results."""
    return ModelCard.load(Path(folder) / "README.md")


def test_the_card_of_a_converted_model_says_what_eval_measures(capfd):
    card = f"---\nlicense: apache-2.0\nbase_model: org/base\nbase_model_commit: {COMMIT}\n---\n# Its card\n"
    llama("llama", card)
    texts = ["--calibration", "fit.txt", "--test", "test.txt", "--length", "32"]
    run("convert", "llama", "mqa", "--to", "mqa", "--allow-loss", *texts)
    run("export", "mqa", "stock", "--format", "deepseek_v3")
    shown = read("stock")
    facts = shown.data.to_dict()
    assert facts["library_name"] == "transformers"
    assert facts["license"] == "apache-2.0"
    assert facts["base_model"] == "org/base"
    assert facts["base_model_relation"] == "finetune"
    assert facts["base_model_commit"] == COMMIT
    assert facts["tags"] == ["rehead", "mla"]
    capfd.readouterr()
    run("eval", "mqa", "--data", "test.txt", "--length", "32", "--json")
    measured = json.loads(capfd.readouterr().out)
    results = {result.metric_type: result for result in shown.data.eval_results}
    assert set(results) == {"loss", "perplexity", "bits_per_byte"}
    for name, result in results.items():
        assert math.isclose(result.metric_value, measured[name], rel_tol=1e-6), name
        assert result.dataset_name == "test.txt"
        assert result.dataset_args["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
        assert result.dataset_args["bytes"] == len(TEXT.encode())
        assert result.dataset_args["window"] == 32
    for words in (
        f"[org/base](https://huggingface.co/org/base) at commit `{COMMIT}`",
        "Licence, as its source names it: apache-2.0.",
        "## Conversion\n\nFrom **gqa, 2 KV heads of 16, rope** to **mqa",
        "## Export\n\nFrom **mqa, 1 KV head of 16, rope** to **mla",
    ):
        assert words in shown.text
    assert json.loads(Path("stock/conversion.json").read_text())["exact"]


def test_an_export_as_it_is_carries_the_certificate_of_its_source(capfd):
    llama("llama")
    run("convert", "llama", "mqa", "--to", "mqa", "--allow-loss", "--test", "test.txt", "--length", "16")
    run("export", "mqa", "stock")
    assert Path("stock/conversion.json").read_bytes() == Path("mqa/conversion.json").read_bytes()
    assert read("stock").data.tags == ["rehead", "mqa"]
    assert read("stock").data.eval_results[0].metric_value == Certificate.read(Path("mqa")).loss[1]
    run("export", "llama", "same")
    assert read("same").data.eval_results is None
    assert read("same").data.tags == ["rehead", "gqa"]
    assert not Path("same/conversion.json").exists()


def test_every_card_says_how_an_identity_norm_computes(capfd):
    """Also that of an export that was made of one before; not that of a latent whose norm is one."""
    advice = "should compute in bfloat16 or float32"
    llama("llama", num_key_value_heads=1)
    run("export", "llama", "stock", "--format", "deepseek_v3")
    run("export", "stock", "again", "--for", "vllm")
    assert advice in read("stock").text
    assert advice in read("again").text
    assert read("again").text.count("\n## ") == 2
    sizes = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, v_head_dim=16, first_k_dense_replace=2, **sizes,
    )  # fmt: skip
    transformers.DeepseekV3ForCausalLM(config).save_pretrained("own")
    Path("own/tokenizer.json").write_text(Path("llama/tokenizer.json").read_text())
    run("export", "own", "same")
    run("export", "llama", "plain")
    assert advice not in read("same").text
    assert advice not in read("plain").text


@pytest.mark.parametrize(("kind", "to"), [("llama", "bf16"), ("deepseek_v3", "bf16"), ("llama", "fp32")])
def test_an_export_can_have_another_format(kind, to, capfd):
    """A healed model has weights in float32, and engines serve what config.json says."""
    llama("llama", num_key_value_heads=1)
    source = transformers.LlamaForCausalLM.from_pretrained("llama")
    if to == "fp32":
        source.bfloat16().save_pretrained("llama")
    capfd.readouterr()
    run("export", "llama", "stock", "--format", kind, "--dtype", to)
    narrow = "the weights are rounded to bfloat16: `rehead check llama` measures what that changes."
    assert (narrow in capfd.readouterr().err) == (to == "bf16")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[to]
    made = transformers.AutoModelForCausalLM.from_pretrained("stock", dtype="auto")
    assert {weight.dtype for weight in made.parameters()} == {dtype}
    for name, weight in made.named_parameters() if kind == "llama" else ():
        assert torch.equal(weight, source.get_parameter(name).bfloat16().to(dtype)), name
    assert main(["export", "llama", "no", "--dtype", "q8_0"]) == 2


def test_it_is_the_weights_that_are_rounded_whatever_config_json_says(capfd):
    llama("llama")
    config = json.loads(Path("llama/config.json").read_text())
    Path("llama/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    run("export", "llama", "stock", "--dtype", "bf16")
    assert "the weights are rounded to bfloat16" in capfd.readouterr().err


def test_what_config_json_refuses_is_refused_before_the_weights_are_read(capfd, monkeypatch):
    monkeypatch.setattr(
        "rehead.conversion.export.folder.open_model", lambda *given, **named: pytest.fail("read")
    )
    llama("llama", num_key_value_heads=1)
    assert main(["export", "llama", "out", "--format", "gpt2"]) == 2
    assert "Use --format llama" in capfd.readouterr().err
    transformers.LlamaForCausalLM.from_pretrained("llama").half().save_pretrained("llama")
    assert main(["export", "llama", "out", "--format", "deepseek_v3"]) == 2
    assert "float16 cannot hold" in (said := capfd.readouterr().err)
    assert "--dtype bf16 or fp32" in said
    assert not Path("out").exists()


def test_a_card_says_that_weights_were_rounded_after_the_measurement(capfd):
    """And gives no results, which would be of other weights."""
    llama("llama")
    run("convert", "llama", "mqa", "--to", "mqa", "--allow-loss", "--test", "test.txt", "--length", "16")
    run("export", "mqa", "same")
    run("export", "mqa", "narrow", "--dtype", "bf16")
    rounded = "measured with weights in float32; those of this folder are in bfloat16."
    assert (rounded in read("same").text, rounded in read("narrow").text) == (False, True)
    assert read("same").data.eval_results
    assert read("narrow").data.eval_results is None


CHAT = [
    {"role": "user", "content": "Who's there?"},
    {"role": "assistant", "content": "Nay, answer me: stand."},
]
TEMPLATE = "{% for one in messages %}<{{ one['role'] }}> {{ one['content'] }}\n{% endfor %}"


SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
LIMITS = {"max_length": 4096, "stop_strings": ["</end>"], "no_repeat_ngram_size": 3}
MARKS = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 3}


def chatted(folder):
    """A chat as text, by transformers' tokenizer of a folder."""
    return transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, tokenize=False)


@pytest.mark.filterwarnings("always:.*of its chat templates only the default")
@pytest.mark.parametrize("place", ["file", "config", "one of several"])
def test_chat_template_and_sampling_go_along(place, capfd):
    """To every model that is made from another, taught, healed and exported."""
    llama("llama")
    others = {"cache_implementation": "hybrid", "transformers_version": "4.0.0", "min_new_tokens": None}
    Path("llama/generation_config.json").write_text(json.dumps(SAMPLING | LIMITS | MARKS | others), "utf-8")
    if place == "file":
        Path("llama/chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    kinds = {"config": {"chat_template": TEMPLATE}, "one of several": {"chat_template": several}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | kinds.get(place, {})
    Path("llama/tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = chatted("llama")
    assert expected.startswith("<user> Who's there?\n<assistant> Nay")
    run("convert", "llama", "mqa", "--to", "mqa", "--allow-loss", "--test", "test.txt")
    flags = [
        "data.path=fit.txt",
        "trainer.batch_size=2",
        "trainer.eval_batches=1",
        "trainer.device=cpu",
        "--length",
        "16",
    ]
    run("heal", "mqa", "--teacher", "llama", "--teach", "1", *flags, "trainer.max_iters=1")
    run(
        "heal",
        "mqa",
        "--teacher",
        "llama",
        "--teach",
        "1",
        *flags,
        "trainer.max_iters=2",
        "trainer.resume=True",
    )
    for model in ("llama", "mqa", "mqa-taught", "mqa-healed"):
        run("export", model, f"{model}-stock")
        assert chatted(f"{model}-stock") == expected, model
        stock = transformers.GenerationConfig.from_pretrained(f"{model}-stock")
        told = SAMPLING | LIMITS | MARKS
        assert {key: getattr(stock, key) for key in told} == told, model
        assert stock.cache_implementation is None
        assert open_model(f"{model}").ends == {2, 7}, model
    assert not Path("mqa/tokenizer_config.json").exists()


@pytest.mark.parametrize("said", [{}, {"do_sample": True, "temperature": 0.5, "top_k": 9}])
def test_a_source_without_a_generation_config_samples_as_before(said):
    """transformers then reads config.json, and is greedy if that says nothing."""
    llama("llama", eos_token_id=7)
    Path("llama/generation_config.json").unlink()
    table = json.loads(Path("llama/config.json").read_text())
    Path("llama/config.json").write_text(json.dumps(table | said))
    run("convert", "llama", "mqa", "--to", "mqa", "--allow-loss")

    def sampling(read):
        return bool(read.do_sample), read.temperature, read.top_k, read.eos_token_id

    expected = sampling(transformers.AutoModelForCausalLM.from_pretrained("llama").generation_config)
    assert expected == (bool(said), said.get("temperature"), said.get("top_k"), 7)
    run("export", "llama", "llama-stock")
    run("export", "mqa", "mqa-stock")
    for folder in ("llama-stock", "mqa", "mqa-stock"):
        assert sampling(transformers.GenerationConfig.from_pretrained(folder)) == expected, folder


def test_templates_that_are_not_passed_on_are_named(capfd):
    """Of several only the default has a place in chat_template.jinja."""
    llama("llama")
    several = [{"name": name, "template": name} for name in ("tool_use", "default", "rag")]
    Path("llama/tokenizer_config.json").write_text(json.dumps({"chat_template": several}), encoding="utf-8")
    capfd.readouterr()
    [(code, _, said)] = typed("export llama stock")
    assert code == 0, said
    assert [line for line in said.splitlines() if "warning" in line] == [
        "rehead: warning: llama: of its chat templates only the default is passed on, not tool_use, rag: copy "
        "chat_template in tokenizer_config.json to use them"
    ]
    assert Path("stock/chat_template.jinja").read_text() == "default"
    with pytest.warns(UserWarning, match="not tool_use, rag: copy"):
        assert chat_template(Path("llama")) == {"chat_template.jinja": "default"}
    Path("llama/tokenizer_config.json").write_text(
        json.dumps({"chat_template": several[:1]}), encoding="utf-8"
    )
    with pytest.warns(UserWarning, match="not tool_use: copy"):
        assert chat_template(Path("llama")) == {}


def test_templates_in_files_of_their_own_are_named(capfd):
    """As transformers writes several today."""
    llama("llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained("llama")
    tokenizer.chat_template = {name: name for name in ("tool_use", "default", "rag")}
    tokenizer.save_pretrained("several")
    copied = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"]
    assert all(Path("several", name).exists() for name in copied)
    with pytest.warns(UserWarning, match="not rag, tool_use: copy additional_chat_templates to use them"):
        assert chat_template(Path("several")) == {"chat_template.jinja": "default"}


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"{" * (2**24 + 1)], ids=["not UTF-8", "too long"])
def test_a_damaged_chat_template_is_refused(content, capfd):
    llama("llama")
    Path("llama/chat_template.jinja").write_bytes(content)
    assert main(["convert", "llama", "mqa", "--to", "mqa", "--allow-loss"]) == 3
    assert "chat_template.jinja" in capfd.readouterr().err
    assert not Path("mqa").exists()


@pytest.mark.parametrize("first", [[], ["--teach", "1"]], ids=["", "taught first"])
def test_healing_and_training_on_carry_the_origin(first, capfd):
    llama("llama", "---\nlicense: mit\nbase_model: org/base\n---\n")
    run("convert", "llama", "mqa", "--to", "mqa", "--allow-loss", "--test", "test.txt")
    flags = ["data.path=fit.txt", "trainer.batch_size=2", "trainer.eval_batches=1", "trainer.device=cpu"]
    run("heal", "mqa", "--teacher", "llama", *first, *flags, "trainer.max_iters=2", "--length", "16")
    if first:
        taught = Certificate.read(Path("mqa-taught")).test
        assert taught.tokens == taught.bytes > 100
    flags += ["trainer.resume=True", "trainer.max_iters=3"]
    run("heal", "mqa", "--teacher", str(Path("llama").absolute()), *flags, "--length", "16")
    run("export", "mqa-healed", "stock")
    card = read("stock").data
    assert (card["license"], card["base_model"]) == ("mit", "org/base")
    healed = Certificate.read(Path("stock"))
    assert [one.teacher for one in healed.healing] == ["llama"]  # not where it is on this machine
    results = {result.metric_type: result.metric_value for result in card.eval_results}
    n_token, n_byte = healed.test.tokens, healed.test.bytes
    assert n_token == n_byte > 100
    expected = healed.loss[1] * (n_token - 1) / n_byte / math.log(2)
    assert math.isclose(results["bits_per_byte"], expected, rel_tol=1e-12)


def test_an_unknown_licence_is_said(capfd):
    run("export", llama("llama"), "stock")
    card = read("stock")
    assert card.data.license == "unknown"
    assert "base_model" not in card.data.to_dict()
    assert "**Its licence is unknown**" in card.text
    run("convert", "llama", "mqa", "--to", "mqa", "--allow-loss")
    run("export", "mqa", "again")
    assert read("again").data.license == "unknown"


@pytest.mark.parametrize("source", [f"org/name@{COMMIT}", f"cache/models--org--name/snapshots/{COMMIT}"])
def test_a_model_of_the_hub_is_its_own_base(source):
    folder = Path(source) if "cache" in source else Path("elsewhere")
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: own\nbase_model: org/older\n---\n")
    keys = Origin.read(Path(source), folder).keys()
    assert keys == {
        "license": "other",
        "license_name": "own",
        "base_model": "org/name",
        "base_model_relation": "finetune",
        "base_model_commit": COMMIT,
    }


def test_the_name_of_an_unknown_licence_is_not_carried():
    Path("README.md").write_text("---\nlicense: unknown\nlicense_name: own\n---\n")
    assert Origin.read(Path(), Path()).keys() == {"license": "unknown"}


HOSTILE = [
    'mit"\n---\nevil: true',
    "--- &a [x]: {y} # no",
    "{{ x }} %7 @a !tag",
    "no",
    "1.0",
    "a\x1b[31mb",
    "x" * 5000,
    "<script>alert(1)</script> [link](http://x) `code`",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_strings_of_files_stay_strings(value, capfd):
    llama("llama", front({"license": value, "base_model": ["org/base", value], "base_model_commit": value}))
    run("export", "llama", "stock")
    card = read("stock")
    facts = card.data.to_dict()
    kept = " ".join(value.split()) if value.isprintable() or "\n" in value else ""
    kept = kept if len(kept) <= 200 else ""
    assert facts["license"] == (kept or "unknown")
    assert facts["base_model"] == (["org/base", kept] if kept else "org/base")
    assert set(facts) <= {
        "library_name", "pipeline_tag", "license", "base_model", "base_model_relation", "tags",
    }  # fmt: skip
    assert not any(word in card.text for word in ("<script>", "](http://x)", "`code`", "\x1b"))


def test_a_text_without_bytes_or_with_an_odd_name_is_described():
    _, certificate = rehead.convert(rehead.load(llama("llama")), to="mqa")
    assert metrics(certificate) == []
    text = Text(name='a"\n---\nb: [', tokens=11, sha256="0" * 64, read=11)
    (result,) = metrics(replace(certificate, test=text, loss=[3.0, 2.0]))
    assert [metric["type"] for metric in result["metrics"]] == ["loss", "perplexity"]
    assert result["metrics"][1]["value"] == math.exp(2.0)
    assert "bytes" not in result["dataset"]["args"]
    card = ModelCard(front({"model-index": [{"name": "x", "results": [result]}]}))
    assert card.data.eval_results[0].dataset_name == 'a" --- b: ['
    sampled = replace(text, name="self")
    assert sampled.decoded(np.array([1, 2]), train("byte", TEXT)) == sampled


def test_a_share_of_rows_is_never_none_of_some():
    assert [_share(share) for share in (0.0, 1 / 1024, 0.01, 0.424)] == ["0%", "< 1%", "1%", "42%"]
