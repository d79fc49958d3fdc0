"""Studies of models that are there, beside trained ones: what is compared, refused, made again and shown."""

import json
import shlex
import shutil
import weakref
from pathlib import Path

import pytest
import torch

import rehead
from rehead.cli import main
from rehead.config import ModelOptions, flags
from rehead.errors import ConfigError, InvalidInput
from rehead.model import build
from rehead.study import Preset, costs, jobs, kv_dtype
from rehead.tokenizer import train

TEXT = "O God, O God! How weary, stale, flat and unprofitable\n" * 40
RUN = {
    "data": {"path": "input.txt", "block_size": 16},
    "trainer": {"max_iters": 1, "batch_size": 2, "eval_batches": 1, "sample_every": 0},
    "model": {"n_layer": 1, "n_query_head": 2, "n_embd": 8, "shape": "llama"},
}
SEEN = {"about": "x", "run": RUN, "new_tokens": 3}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text(TEXT)


def saved(name, kind="char", n_embd=8):
    """A Llama of one layer that reads 16 tokens."""
    tokenizer = train(kind, TEXT)
    options = ModelOptions(n_layer=1, n_query_head=2, n_embd=n_embd, shape="llama")
    model = build(options.resolve(tokenizer.vocab_size, 16))
    rehead.save(model, name, files={"tokenizer.json": tokenizer.to_json()})


def run(table, *words, status=0):
    """The results of a study of this table, YAML being JSON, too."""
    Path("study.yaml").write_text(json.dumps({**SEEN, **table}))
    assert main(["study", "--preset", "study.yaml", "system.work_dir=study", *words]) == status
    return json.loads(Path("study/results.json").read_text()) if status == 0 else None


def planned(table, *words):
    return {job.variant: job for job in jobs(Preset.of("p", {**SEEN, **table}), list(words))}


def test_a_given_model_beside_one_trained_from_it():
    """All panels, since nothing was asked."""
    saved("small")
    found = run({"variants": {"Source": {"source": "small"}, "More": {"from": "Source"}}})
    assert [one["kind"] for one in found["variants"]] == ["given", "trained"]
    assert Path("study/1-frontier.png").exists()


@pytest.mark.filterwarnings("ignore:the prompt 'The capital of France is' has:UserWarning")
def test_the_preset_of_a_published_model_runs_on_another():
    """As `make demo-checkpoint` types it, with its texts beside the folder."""
    saved("small")
    Path("small-fit.txt").write_text(TEXT * 3)
    Path("small-test.txt").write_text(TEXT[::-1] * 3)
    words = ["model.folder=small", "data.path=small-fit.txt", "data.block_size=16", "system.work_dir=study"]
    assert main(["study", "--preset", "checkpoint", *words]) == 0
    found = json.loads(Path("study/results.json").read_text())
    assert [one["kind"] for one in found["variants"]] == ["given", "converted", "converted"]
    assert [one["variant"] for one in found["variants"]] == ["SmolLM2-135M", "MLA, half", "MLA, a quarter"]
    assert Path("study/report.html").is_file()


def test_a_variant_may_be_renamed():
    table = {"variants": {"Two heads": {}, "One head": {"model": {"n_kv_head": 1}}}}
    before = run(table)
    table["variants"] = {"two heads": {}, "one head": {"model": {"n_kv_head": 1}}}
    after = run(table)
    assert [one["variant"] for one in after["variants"]] == ["two heads", "one head"]
    assert [one["val_loss"] for one in after["variants"]] == [one["val_loss"] for one in before["variants"]]


@pytest.mark.parametrize("flag", ["model.pretrained_folder", "trainer.teacher"])
def test_another_model_to_start_or_learn_from_is_another_study(flag, capsys):
    saved("one"), saved("two")
    rates = {"variants": {"a": {"trainer": {"learning_rate": [0.1, 0.2]}}}}
    run(rates, f"{flag}=one")
    run(rates, f"{flag}=one")
    run(rates, f"{flag}=two", status=3)
    assert (
        f"was made with {flag}={Path('one').resolve()} (now {Path('two').resolve()})"
        in capsys.readouterr().err
    )


def test_a_conversion_of_a_conversion_is_fitted_and_measured():
    chain = {
        "MHA": {},
        "GQA": {"from": "MHA", "convert": {"to": "gqa", "n_kv_head": 2}},
        "MLA": {"from": "GQA", "convert": {"to": "mla", "kv_fraction": 0.5}},
    }
    found = planned({"variants": chain, "run": RUN | {"model": RUN["model"] | {"n_query_head": 4}}})
    assert "calibration" not in found["GQA"].reading  # a run brings its own text
    assert found["MLA"].reading["calibration"] == [found["MLA"].options.data.path]


def test_a_study_measures_ranks_and_teaches_as_its_command_does():
    saved("small", n_embd=16)
    Path("fit.txt").write_text(TEXT)
    quarter = {"to": "mla", "target": "uneven", "kv_fraction": 0.5, "calibration": "fit.txt", "length": 5}
    table = {
        "variants": {
            "Source": {"source": "small"},
            "Half": {"from": "Source", "convert": {**quarter, "measured_ranks": True, "teach": 2}},
            "Usual": {"from": "Source", "convert": {**quarter, "measured_ranks": False}},
        }
    }
    run(table)
    half = json.loads(Path("study/half/seed-3407/model/conversion.json").read_text())
    usual = json.loads(Path("study/usual/seed-3407/model/conversion.json").read_text())
    assert (half["teach"], usual["teach"]) == (2, 0)
    assert (half["length"], usual["length"]) == (5, 5)
    assert "--length=5" in planned(table)["Half"].command()
    assert (
        half["result"]["attention"][0]["qk_rope_head_dim"]
        != usual["result"]["attention"][0]["qk_rope_head_dim"]
    )
    words = shlex.split(planned(table)["Half"].command())
    assert {"--measured-ranks", "--teach=2"} < set(words)
    assert main([*words[1:3], "alone", *words[4:]]) == 0
    weights = "model.safetensors"
    made = Path("study/half/seed-3407/model", weights).read_bytes()
    assert Path("alone", weights).read_bytes() == made


def test_costs_hold_one_model_at_a_time(monkeypatch):
    alive, made = weakref.WeakSet(), []
    begin = costs._Subject.__init__

    def noting(subject, *given):
        assert not alive
        begin(subject, *given)
        alive.add(subject.model)
        made.append(subject)

    monkeypatch.setattr(
        costs._Subject, "__init__", lambda subject, *given: (noting(subject, *given), made.clear())[1]
    )
    run({"variants": {"a": {}, "b": {"model": {"n_kv_head": 1}}}})


def test_losses_over_two_tokenizers_are_not_compared():
    saved("letters"), saved("bytes", "byte")
    ask = [{"ask": "Which?", "show": ["loss"]}]
    both = {"Letters": {"source": "letters"}, "Bytes": {"source": "bytes"}}
    found = run({"variants": both, "questions": ask}, "system.seed=[0,1]")
    assert found["questions"][0]["claims"][0]["unlike"] == ["another text or tokenizer"]


def test_an_export_of_a_trained_variant_is_shown(capsys):
    table = {
        "variants": {
            "MHA": {},
            "GQA": {"model": {"n_kv_head": 1}},
            "Stock": {"from": "GQA", "export": {"format": "llama"}},
        }
    }
    found = run(table)
    assert found["exports"][0]["max_error"] < 1e-4
    assert "Stock: LlamaForCausalLM, read back by " in capsys.readouterr().out
    assert "read back by" in Path("study/report.html").read_text()


def test_healing_with_another_seed_is_measured_on_the_same_text():
    saved("small")
    stages = {
        "Source": {"source": "small"},
        "Half": {"from": "Source", "convert": {"to": "mla", "kv_fraction": 0.5}},
        "Healed": {"from": "Half", "heal": True, "system": {"seed": 1}},
    }
    found = planned({"variants": stages})
    every = list(found.values())
    assert found["Healed"].seed == 1
    for job in every:
        assert kv_dtype._first_conversion(every, kv_dtype._seed(job)) is found["Half"]


def test_the_command_of_a_healing_names_the_text_that_the_study_reads():
    options = [f"{group}.{key}={value}" for group, keys in RUN.items() for key, value in keys.items()]
    assert main(["train", *options, "system.work_dir=run"]) == 0
    stages = {
        "Source": {"source": "run"},
        "Half": {"from": "Source", "convert": {"to": "mla", "kv_fraction": 0.5}},
        "Healed": {"from": "Half", "heal": True},
    }
    usual = {"data": {"block_size": 16}}
    assert "data.name=python-docs" in shlex.split(
        planned({"variants": stages, "run": usual})["Healed"].command()
    )


MQA = {"from": "a", "convert": {"to": "mqa"}}
REFUSED = {
    "flags of a given model": (
        {"a": {"source": "small"}}, ["model.n_kv_head=[1,2]"], "model.n_kv_head=[1, 2]: no variant of p is made from",
    ),
    "one folder for two": (
        {"a": {"source": "small"}, "b": {"source": "small"}}, ["model.folder=small"], "would replace each of a, b",
    ),
    "a flag that no variant uses": (
        {"a": {}, "b": MQA}, ["trainer.distillation=0.3"], "trainer.distillation=0.3 has no effect without a teacher",
    ),
    "several processes": (
        {"a": {}, "b": MQA}, ["trainer.parallel=ddp"], "trainer.parallel=ddp: a study trains each model in one process",
    ),
    "a seed twice": (
        {"a": {}, "b": MQA}, ["system.seed=[0,0]"], "'a' with seed 0 is there twice: a list names the same value again",
    ),
    "a schedule that has no end": (
        {"a": {}}, ["trainer.min_learning_rate=[1e-4,1e-5]"], "min_learning_rate=[0.0001, 1e-05] has no effect with",
    ),
    "longer than it reads": (
        {"a": {"source": "small"}}, ["data.block_size=17"], "block_size=17: the model in small reads at most 16",
    ),
    "a longer one from it": (
        {"a": {"source": "small"}, "b": {"from": "a", "data": {"block_size": 17}}}, [],
        "b: data.block_size=17: the model in small reads at most 16",
    ),
    "a longer healing": (
        {"a": {}, "b": MQA, "c": {"from": "b", "heal": True, "data": {"block_size": 17}}},
        [], "c: data.block_size=17: the model in runs/p/a/seed-3407 reads at most 16",
    ),
    "a shorter one": (
        {"a": {}, "b": {"from": "a", "data": {"block_size": 15}}}, [], "b: data.block_size=15 is below the 16 of a,",
    ),
    "another model from its weights": (
        {"a": {}, "b": {"from": "a", "model": {"n_kv_head": [1, 2]}}}, [],
        "b, n_kv_head=1: model.n_kv_head=1: not the model of a, whose weights it starts from.",
    ),
    "a model for a healing": (
        {"a": {}, "b": MQA, "c": {"from": "b", "heal": True, "model": {"n_kv_head": [1, 2]}}},
        [], "c, n_kv_head=1: model.n_kv_head=[1, 2] has no effect: the model is that of b. Leave it out",
    ),
    "a model for one that is given": (
        {"a": {"source": "small"}, "b": {"from": "a", "model": {"attn_pdrop": 0.2}}},
        [], "b: model.attn_pdrop=0.2 has no effect: the model is that of a",
    ),
    "training of a given model": (
        {"a": {"source": "small"}, "b": MQA}, ["trainer.learning_rate=[0.1,0.2]"],
        "trainer.learning_rate=[0.1, 0.2]: small is given, not trained",
    ),
    "a shape beside a folder": (
        {"a": {"model": {"n_embd": 12}}}, ["model.folder=small"], "has no effect with model.folder=small",
    ),
    "ranks that leave nothing to measure": (
        {"a": {"source": "small"}, "b": {"from": "a", "convert": {"to": "mla", "kv_rank": 4, "measured_ranks": True}}},
        [], "b: ranks are measured for --to mla with either --kv-fraction",
    ),
    "nothing to learn": (
        {"a": {"source": "small"}, "b": {"from": "a", "convert": {"to": "mla", "teach": 1}}},
        [], "b: teach=1: this conversion is exact, so there is nothing to learn",
    ),
    "no text to learn from": (
        {
            "a": {"source": "small"},
            "b": {"from": "a", "convert": {"to": "mla", "kv_rank": 4, "teach": 1, "test": "input.txt"}},
        },
        [], "b: teach=1 without a text to learn from",
    ),
    "fewer passes than none": (
        {"a": {"source": "small"}, "b": {"from": "a", "convert": {"to": "mla", "kv_rank": 4, "teach": -1}}},
        [], "b: teach=-1. Give the number of passes",
    ),
    "an export that cannot be": (
        {"a": {"model": {"shape": "gpt"}}, "b": {"from": "a", "export": {"format": "llama"}}}, [], "b: Llama",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("variants", "words", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_trained(variants, words, said):
    saved("small")
    with pytest.raises(ConfigError) as error:
        planned({"variants": variants}, *words)
    assert said in str(error.value)


def test_what_a_variant_may_change_in_what_it_starts_from():
    saved("small")
    variants = {
        "a": {},
        "b": {"from": "a", "data": {"block_size": 20}, "model": {"resid_pdrop": 0.2}},
        "c": {"source": "small"},
        "d": {"from": "c", "data": {"block_size": 8}, "trainer": {"learning_rate": [0.1, 0.2]}},
    }
    assert list(planned({"variants": variants})) == [
        "a",
        "b",
        "c",
        "d, learning_rate=0.1",
        "d, learning_rate=0.2",
    ]
    assert len(planned({"variants": variants}, "trainer.batch_size=[2,3]")) == 10


def test_flags_with_several_values_train_a_model_that_is_there(capsys):
    """As `rehead train model.folder=small` does; what starts from one of them starts from its weights."""
    saved("small")
    common = {"data": RUN["data"], "trainer": RUN["trainer"]}
    table = {"run": common, "variants": {"a": {}, "b": {"from": "a"}}}
    words = ["model.folder=small", "trainer.learning_rate=[1e-3,1e-4]"]
    found = planned(table, *words)
    assert list(found) == [f"{name}, learning_rate={rate}" for name in "ab" for rate in ("0.001", "0.0001")]
    first, *_ = found.values()
    assert "model.folder=small" in shlex.split(first.command())
    further = found["b, learning_rate=0.001"].options.model
    assert (further.folder, further.pretrained_folder) == (str(first.folder), None)
    made = run(table, *words)
    assert [one["kind"] for one in made["variants"]] == ["trained"] * 4
    run(table, *words)


def test_texts_about_a_given_model_may_be_edited(capsys):
    saved("small")
    table = {"variants": {"a": {"source": "small"}, "b": {"from": "a", "convert": {"to": "mqa"}}}}
    run(table)
    before = Path("study/b/seed-3407/measured.json").stat().st_mtime_ns
    Path("small/README.md").write_text("---\nlicense: mit\n---\n")
    Path("small/.README.md.swp").write_text("")
    run(table)
    assert Path("study/b/seed-3407/measured.json").stat().st_mtime_ns == before
    noted = Path("study/a/seed-3407/job.json")
    older = json.loads(noted.read_text())
    older["source"]["files"]["README.md"] = [1, 2]
    noted.write_text(json.dumps(older))
    run(table)
    older["source"]["files"]["config.json"] = [1, 2]
    noted.write_text(json.dumps(older))
    run(table, status=3)
    assert "written again since" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["model.folder", "model.pretrained_folder", "trainer.teacher"])
def test_a_model_that_runs_start_from_is_the_same_for_all(option, capsys):
    """Else their losses, over seeds or side by side, would be of two models."""
    saved("small")
    common = {"data": RUN["data"], "trainer": RUN["trainer"]}
    table = {"run": common | ({} if option == "model.folder" else {"model": RUN["model"]})}
    words = [f"{option}=small", "trainer.learning_rate=[1e-3,1e-4]"]
    run(table | {"variants": {"a": {}}}, *words)
    noted = Path("study/a-learning_rate=0.001/seed-3407/job.json")
    begun = json.loads(noted.read_text())
    noted.write_text(json.dumps({key: value for key, value in begun.items() if key != "stamps"}))
    run(table | {"variants": {"a": {}}}, *words)  # one that noted nothing
    noted.write_text(json.dumps(begun))
    shutil.rmtree("small")
    saved("small")
    run(table | {"variants": {"a": {}, "b": {}}}, *words, status=3)
    assert f"was made with another model in {option}, written again since" in capsys.readouterr().err


@pytest.mark.filterwarnings("always:the installed transformers cannot read")
def test_an_export_that_transformers_cannot_read_is_read_by_rehead(monkeypatch, capsys):
    """Such as one of a class that the installed version does not have."""
    transformers = pytest.importorskip("transformers")

    def refuse(*place, **more):
        raise ValueError(
            "The checkpoint has model type `llama` but Transformers does not recognize this architecture"
        )

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    variants = {"MHA": {}, "GQA": {"model": {"n_kv_head": 1}}, "Stock": {"from": "GQA", "export": {}}}
    found = run({"variants": variants})
    said = "the installed transformers cannot read study/stock/seed-3407/model ('The checkpoint has model type `llama`"
    assert said in capsys.readouterr().err
    assert found["exports"][0]["reader"] == "rehead"
    assert found["exports"][0]["max_error"] < 1e-4


def test_an_emoji_escaped_as_in_json_is_one_character():
    about = "\U0001f642 smaller caches"
    found = run({"about": about, "variants": {"\U0001f680 fast": {}, "b": {}}, "prompt": "O"})
    assert (found["about"], found["variants"][0]["variant"]) == (about, "\U0001f680 fast")
    assert about in Path("study/report.html").read_text()
    Path("half.yaml").write_text(json.dumps(SEEN | {"about": "\ud83d smaller"}))
    with pytest.raises(
        InvalidInput, match=r"half a pair of surrogates.* write the character itself in line 1"
    ):
        Preset.read("half.yaml")
    Path("bytes.yaml").write_text(json.dumps(SEEN | {"about": "caf\udce9"}))  # a byte of a path, to Python
    assert Preset.read("bytes.yaml").about == "caf\udce9"
    Path("twice.yaml").write_text('{"about": "x", "variants": {"\\ud83d\\ude80": {}, "\U0001f680": {}}}')
    with pytest.raises(InvalidInput, match="a key appears twice"):
        Preset.read("twice.yaml")


def test_an_option_that_takes_a_list_makes_one_variant():
    assert list(planned({"variants": {"a": {}}}, "trainer.report_to=[tensorboard,wandb]")) == ["a"]


def test_home_is_home_in_paths_only(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = {"system": {"work_dir": "~/studies"}}
    found = planned({"variants": {"a": {}}, "run": RUN | place})["a"]
    assert found.place == tmp_path / "studies"
    Path("options.yaml").write_text('{"data": {"path": "~/input.txt"}, "trainer": {"sample_prompt": "~"}}')
    options = flags.read(["trainer.teacher=~/x"], (Path("options.yaml"),))
    assert (options.data.path, options.trainer.teacher) == (str(tmp_path / "input.txt"), str(tmp_path / "x"))
    assert options.trainer.sample_prompt == "~"
    assert planned({"variants": {"a": {}}}, "system.work_dir=~/other")["a"].place == tmp_path / "other"
    calibrated = {"a": {}, "b": {"from": "a", "convert": {"to": "mla", "calibration": "~/input.txt"}}}
    assert planned({"variants": calibrated})["b"].reading["calibration"] == [str(tmp_path / "input.txt")]


def test_a_study_of_other_runs_is_not_replaced(capsys):
    """Its report would be; more variants and seeds of the same study are added."""
    one = {"variants": {"a": {}, "b": {"model": {"n_kv_head": 1}}}}
    run(one)
    before = Path("study/results.json").read_bytes()
    run({"variants": {"c": {"model": {"n_layer": 2}}}}, status=3)
    said = capsys.readouterr().err
    assert "study has a study of other runs (a/seed-" in said
    assert "Nothing was changed" in said
    run({"variants": {"a": {}}}, status=3)  # less of it
    assert Path("study/results.json").read_bytes() == before
    assert not Path("study/c").exists()
    more = run(one | {"variants": one["variants"] | {"c": {"model": {"n_layer": 2}}}})
    assert len(more["variants"]) == 3
