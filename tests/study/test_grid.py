"""From a preset and flags to jobs: lists, seeds, variants made from variants, and what is refused."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tokenizers as hf
from tokenizers.processors import TemplateProcessing

import rehead
from rehead.cli import main
from rehead.config import ModelOptions, flags
from rehead.errors import ConfigError, InvalidInput
from rehead.model import build
from rehead.study import Preset, jobs
from rehead.study.grid import overridden
from rehead.tokenizer import train

TABLE = {"about": "x", "run": {"trainer": {"max_iters": 60, "warmup_iters": 5}}}


def preset(**more):
    return Preset.of("p", {**TABLE, **more})


def names(found):
    return [job.variant for job in found]


def test_a_list_is_a_variant_each_and_seeds_repeat_them():
    found = jobs(preset(), ["model.n_kv_head=[1,2,3]", "model.rope=[true,false]", "system.seed=[7,8]"])
    assert names(found[:6]) == names(found[6:])
    assert names(found[:2]) == ["n_kv_head=1, rope=true", "n_kv_head=1, rope=false"]
    assert [job.seed for job in found] == [7] * 6 + [8] * 6
    assert found[3].options.model.n_kv_head == 2
    assert found[3].options.model.rope is False
    assert len({job.folder for job in found}) == 12
    assert found[0].folder == Path("runs/p/n_kv_head=1-rope=true/seed-7")


def test_lists_may_hold_names_and_lists():
    found = jobs(preset(), ["model.score=[scaled_dot, additive]"])
    assert [job.options.model.score for job in found] == ["scaled_dot", "additive"]
    found = jobs(preset(), ["model.layers=[[{window: 4}, {}], [{window: 8}]]", "model.n_layer=2"])
    assert [job.options.model.layers for job in found] == [[{"window": 4}, {}], [{"window": 8}]]
    one = {"a": {"model": {"layers": [{"window": 4}, {}]}}, "b": {"model": {"n_kv_head": [1, 2]}}}
    assert names(jobs(preset(variants=one), [])) == ["a", "b, n_kv_head=1", "b, n_kv_head=2"]


STAGES = {
    "Base": {"model": {"n_kv_head": 2}, "trainer": {"learning_rate": [0.1, 0.2]}},
    "Longer": {"from": "Base", "data": {"block_size": 256}, "trainer": {"max_iters": 20}},
    "Latent": {"from": "Base", "convert": {"to": "mla", "kv_fraction": 0.25, "method": "svd"}},
    "Healed": {"from": "Latent", "heal": True, "trainer": {"max_iters": 10}},
    "Further": {"from": "Healed", "trainer": {"max_iters": 6}},
}


def test_variants_follow_from_variants():
    found = {job.variant: job for job in jobs(preset(variants=STAGES), ["trainer.batch_size=3"])}
    assert len(found) == 10
    base, longer, latent, healed, further = (found[f"{name}, learning_rate=0.2"] for name in STAGES)
    assert [one.parent for one in (base, longer, latent, healed, further)] == [
        None,
        base,
        base,
        latent,
        healed,
    ]
    assert longer.options.model.pretrained_folder == str(base.folder)
    assert (longer.options.model.n_kv_head, longer.options.trainer.learning_rate) == (2, 0.2)
    assert (longer.options.data.block_size, longer.options.trainer.max_iters) == (256, 20)
    assert latent.model == latent.folder / "model"
    assert healed.options.model.folder == str(latent.model)
    assert healed.options.trainer.teacher == str(base.model)
    assert (healed.options.trainer.schedule, healed.options.trainer.learning_rate) == ("cosine", 1e-4)
    assert further.options.model.folder == str(healed.folder)
    assert further.options.trainer.teacher is None
    assert [one.steps_before for one in (base, longer, latent, healed, further)] == [0, 60, 60, 60, 70]
    assert [one.kind for one in (base, latent, healed)] == ["trained", "converted", "healed"]
    assert {job.options.trainer.batch_size for job in found.values()} == {3}


def test_the_users_flags_go_before_a_variants_own():
    with pytest.warns(UserWarning, match="max_iters=8 takes the place of what Longer"):
        found = jobs(preset(variants=STAGES), ["trainer.max_iters=8", "trainer.learning_rate=0.3"])
    assert names(found) == list(STAGES)
    assert {job.options.trainer.max_iters for job in found} == {8}
    assert {job.options.trainer.learning_rate for job in found} == {0.3}


def test_a_fraction_shortens_every_training():
    found = {job.variant: job for job in jobs(preset(variants=STAGES), ["trainer.learning_rate=1e-3"], 0.25)}
    steps = {name: job.options.trainer.max_iters for name, job in found.items() if job.convert is None}
    assert steps == {"Base": 15, "Longer": 5, "Healed": 3, "Further": 2}
    assert found["Base"].options.trainer.warmup_iters == 2
    assert found["Further"].steps_before == 15 + 3


def test_commands_say_all_of_a_job():
    found = {job.variant: job for job in jobs(preset(variants=STAGES), ["trainer.learning_rate=1e-3"])}
    for name in ("Base", "Longer"):
        words = shlex.split(found[name].command())
        told = flags.read(words[2:])
        assert words[:2] == ["rehead", "train"]
        assert told == found[name].options
    assert shlex.split(found["Latent"].command()) == [
        "rehead", "convert", "runs/p/base/seed-3407", "runs/p/latent/seed-3407/model", "--allow-loss",
        "--to=mla", "--kv-fraction=0.25", "--method=svd", "--seed=3407",
    ]  # fmt: skip
    assert shlex.split(found["Healed"].command()) == [
        "rehead", "heal", "runs/p/latent/seed-3407/model", "--teacher=runs/p/base/seed-3407",
        "system.work_dir=runs/p/healed/seed-3407", "data.block_size=128", "trainer.max_iters=10",
        "trainer.batch_size=64", "trainer.learning_rate=0.001",
    ]  # fmt: skip


BAD = [
    ({"variants": {"a": {"model": {"n_kv_head": 4}}}}, ConfigError, ["a:", "n_kv_head=4", "[1, 2, 3, 6]"]),
    ({"variants": {"a": {"modle": {}}}}, InvalidInput, ["'modle'", "'model'"]),
    ({"variants": {"a": {}, "b": {"from": "c"}}}, InvalidInput, ["'c'", "above", "Known: a"]),
    ({"variants": {"a": {}, "b": {"convert": {"to": "mla"}}}}, InvalidInput, ["from:"]),
    ({"variants": {"a": {}, "b": {"from": "a", "convert": {"too": "mla"}}}}, InvalidInput, ["'too'", "'to'"]),
    (
        {"variants": {"a": {}, "b": {"from": "a", "convert": {"to": "mlaa"}}}},
        ConfigError,
        ["b:", "mlaa", "mla"],
    ),
    ({"variants": {"a": {}, "b": {"from": "a", "convert": {"to": "gqa"}}}}, ConfigError, ["--n-kv-head"]),
    (
        {"variants": {"a": {}, "b": {"from": "a", "convert": {"to": "mla", "method": "best"}}}},
        ConfigError,
        ["'best'", "whitened"],
    ),
    ({"variants": {"a": {}, "b": {"from": "a", "heal": True}}}, ConfigError, ["b:", "conversion"]),
    (
        {
            "variants": {"a": {}, "b": {"from": "a", "convert": {}, "trainer": {}}},
            "run": {"data": {"val_fraction": 0}},
        },
        ConfigError,
        ["val_fraction"],
    ),
    (
        {"variants": {"a": {}, "b": {"from": "a", "heal": True, "convert": {}}}},
        InvalidInput,
        ["a variant for each"],
    ),
    ({"variants": {"a b": {}, "a-b": {}}}, ConfigError, ["a-b", "rename one of them"]),
    (
        {"variants": {"a": {"model": {"ropee": True}}}},
        InvalidInput,
        ["p: a: model:", "'ropee'", "'rope'", "Known"],
    ),
    (
        {"run": {"trainer": {"max_itres": 5}}},
        InvalidInput,
        ["p: run: trainer:", "'max_itres'", "'max_iters'"],
    ),
    ({"variants": {"a": {}}, "run": {"model": {"n_layer": "six"}}}, ConfigError, ["p: ", "n_layer", "six"]),
    ({"questions": [{"ask": "x", "show": ["losses"]}]}, InvalidInput, ["show: unknown 'losses'", "'loss'"]),
    (
        {"variants": {"a": {}}, "questions": [{"ask": "x", "of": ["b"]}]},
        InvalidInput,
        ["p: questions: of: unknown 'b'. Known: a."],
    ),
    (
        {"questions": [{"ask": "x", "of": ["NOPE"]}]},
        InvalidInput,
        ["p: ", "'NOPE'", "has no variants", "Leave of"],
    ),
    ({"variants": {"a": {}}, "questions": [{"of": ["a"]}]}, InvalidInput, ["ask is missing"]),
    ({"run": {"modle": {}}}, InvalidInput, ["modle"]),
    ({"run": {"model": 5}}, InvalidInput, ["model=5", "dict"]),
    ({"prompt": 5}, InvalidInput, ["prompt=5", "str"]),
    ({"variants": {"a": [1]}}, InvalidInput, ["a:", "table"]),
    ({}, ConfigError, ["at least two variants", "n_kv_head=[1,2,3]"]),
    ({"variants": {}}, InvalidInput, ["variants is empty"]),
    ({"run": {"system": {"seed": []}}}, InvalidInput, ["p: run: system: seed: the list is empty"]),
    (
        {"variants": {"a": {"model": {"n_kv_head": []}}, "b": {}}},
        InvalidInput,
        ["a: model: n_kv_head: the list is"],
    ),
    (
        {"variants": {"a": {}, "b": {"from": "a", "convert": {"to": "mla", "calibration": [2024]}}}},
        InvalidInput,
        ["b: convert: calibration: 2024", "in quotes"],
    ),
    ({"variants": {"a": {}}, "new_tokens": -1}, InvalidInput, ["p: new_tokens=-1. Use 0 to 10,000,000."]),
    ({"variants": {"a": {}}, "new_tokens": True}, InvalidInput, ["p: new_tokens=True"]),
    ({"variants": {"a": {}}, "temperature": -1}, InvalidInput, ["p: temperature=-1"]),
    (
        {"variants": {"a": {}, "b": {"from": "a", "export": {}}}, "questions": [{"ask": "x", "of": ["b"]}]},
        InvalidInput,
        ["of: unknown 'b'. Known: a."],
    ),
]


@pytest.mark.parametrize(("table", "kind", "named"), BAD, ids=[" ".join(row[2]) for row in BAD])
def test_what_is_wrong_is_said_before_anything_is_trained(table, kind, named):
    with pytest.raises(kind) as error:
        jobs(preset(**table), [])
    assert all(word in str(error.value) for word in named), error.value


@pytest.mark.parametrize("name", ["demo", "variants", "homework", "frontier"])
def test_shipped_presets(name):
    found = Preset.read(name)
    assert len(jobs(found, [])) >= len(found.variants)
    assert all(question.of for question in found.questions)


def test_homework_asks_what_the_homework_asks():
    found = {job.variant: job.options for job in jobs(Preset.read("homework"), ["system.seed=1"])}
    steps = {name: (options.data.block_size, options.trainer.max_iters) for name, options in found.items()}
    assert steps["Absolute"] == steps["Rotary"] == (128, 600)
    for name in ("Absolute", "Rotary"):
        assert (steps[f"{name} at 128"], steps[f"{name} to 256"]) == ((128, 400), (256, 200))
    heads = {options.model.n_kv_head for options in found.values()}
    assert heads == {None, 1, 2, 3}
    assert found["Rotary, 3 KV heads"].model.rope
    assert {options.trainer.batch_size for options in found.values()} == {64}


def test_a_flag_in_place_of_what_variants_set_is_told():
    given = ["system.seed=1", "data.block_size=32"]
    replaced = "data.block_size=32 takes the place of what Absolute to 256 (256), Rotary to 256 (256) set"
    with pytest.warns(UserWarning, match=re.escape(f"{replaced}: the study compares other variants")):
        found = jobs(Preset.read("homework"), given)
    assert overridden(Preset.read("homework"), found) == replaced
    assert overridden(Preset.read("homework"), jobs(Preset.read("homework"), ["data.block_size=256"])) == ""


@pytest.mark.parametrize(
    ("flag", "equal"),
    [
        ("model.n_kv_head=2", "'Absolute' and '3 KV heads'"),
        ("trainer.max_iters=9", "'Absolute' and 'Absolute at 128'"),
    ],
)
def test_a_flag_that_makes_variants_equal_is_refused(flag, equal):
    with pytest.raises(ConfigError) as caught:
        jobs(Preset.read("homework"), ["system.seed=[0,1]", flag])
    said = str(caught.value)
    assert said.startswith(f"{flag} takes the place of what ")
    assert f"which makes {equal} equal. Leave it out. --fraction trains" in said


def test_heads_are_those_of_the_variants_that_have_any():
    """The preset's RNN stands once beside the others, of which there is one for each number."""
    for flag, many in (("model.n_query_head=[2,4]", 2), ("model.n_query_head=4", 1)):
        planned = jobs(Preset.read("variants"), [flag])
        names = [job.variant for job in planned]
        assert names.count("Elman RNN") == 1
        assert len(names) == 1 + many * (len(Preset.read("variants").variants) - 1)
    with pytest.raises(ConfigError, match=r"n_query_head=4: no variant of .* is made from flags"):
        jobs(preset(variants={name: {"model": {"type": "rnn", "n_hidden": n}} for name, n in (("a", 4), ("b", 5))}),
             ["model.n_query_head=4"])  # fmt: skip


def test_variants_made_equal_are_refused_in_either_order():
    variants = {"One": {"model": {"n_kv_head": 1}}, "All": {}}
    with pytest.raises(ConfigError, match="which makes 'One' and 'All' equal"):
        jobs(preset(variants=variants), ["model.n_kv_head=2", "model.n_query_head=4"])


def test_mistakes_on_the_command_line(here, capsys):
    for words, status, named in (
        (["--preset", "hommework"], 3, ["hommework", "'homework'"]),
        (["--preset", "input.txt"], 3, ["input.txt: ", "table"]),
        (["--preset", "grid"], 2, ["n_kv_head=[1,2,3]"]),
        (["--preset", "grid", "model.n_kv_head=[1,2"], 2, ["model.n_kv_head=[1,2"]),
        (["--preset", "grid", "model.n_kv_head=[]"], 2, ["empty"]),
        (["--preset", "grid", "model.nkv_head=[1,2]"], 2, ["model.nkv_head=1", "n_kv_head"]),
        (["--fraction", "0"], 2, ["--fraction 0 is not a share", "above 0"]),
        (["--jobs", "0"], 2, ["--jobs 0"]),
    ):
        assert main(["study", *words]) == status, words
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert all(word in said for word in named), said


TWO = "about: x\nvariants: {a: {}, b: {model: {n_kv_head: 1}}}\n"


@pytest.mark.parametrize(
    ("more", "words", "said"),
    [
        (
            "",
            "system.work_dir=[ahead,z]",
            'system.work_dir=["ahead", "z"]: a study has one folder, with',
        ),
        (
            "",
            "system.work_dir=null",
            "system.work_dir=null: a study has one folder, with a subfolder",
        ),
        (
            "run: {system: {work_dir: [ahead, z]}}",
            "",
            'system.work_dir=["ahead", "z"]: a study has one folder',
        ),
        (
            "",
            "data.path=[input.txt,nowhere.txt]",
            "no text at 'nowhere.txt' (No such file or directory): give data.p",
        ),
        ('prompt: ""', "", "ahead.yaml: prompt is empty: give a text, or leave it out."),
        ("prompt: O God, O God!", "", "ahead.yaml: prompt has 13 tokens, a reads 8: give a shorter prompt."),
        (
            "prompt: ÄÄÄÄÄ",
            "data.tokenizer=byte",
            "ahead.yaml: prompt has 10 tokens, a reads 8: give a shorter prompt.",
        ),
    ],
)
def test_texts_and_places_are_looked_at_before_anything_is_trained(here, capfd, more, words, said):
    Path("ahead.yaml").write_text(f"{TWO}{more}\n")
    size = "data.block_size=8 model.n_layer=1 model.n_query_head=2 model.n_embd=8 trainer.max_iters=1"
    place = "" if "work_dir" in more + words else "system.work_dir=ahead"
    path = "" if "data.path" in words else "data.path=input.txt"
    before = set(Path().iterdir())
    assert main(["study", "--preset", "ahead.yaml", *f"{size} {place} {path} {words}".split()]) in (2, 3)
    printed = capfd.readouterr()
    assert printed.err.startswith(f"rehead: {said}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert set(Path().iterdir()) == before


def test_a_token_that_begins_every_text_counts_in_a_prompt(here, capfd):
    """ "O God" are 5 tokens, and the model reads 5: with <s> before them, one too few."""
    inner = hf.Tokenizer.from_str(train("char", Path("input.txt").read_text()).to_json())
    inner.add_special_tokens(["<s>"])
    inner.post_processor = TemplateProcessing("<s> $A", None, [("<s>", inner.token_to_id("<s>"))])
    model = build(ModelOptions(n_layer=1, n_query_head=2, n_embd=8).resolve(inner.get_vocab_size(), 5))
    rehead.save(model, "begins", files={"tokenizer.json": inner.to_str()})
    run = "run: {data: {path: input.txt, block_size: 5}}\nprompt: O God\n"
    variants = "variants:\n  a: {source: begins}\n  b: {from: a, convert: {to: mqa}}\n"
    Path("begins.yaml").write_text(f"about: x\n{run}{variants}")
    assert main(["study", "--preset", "begins.yaml", "system.work_dir=never"]) == 2
    assert "begins.yaml: prompt has 6 tokens, a reads 5: give a shorter prompt" in capfd.readouterr().err
    assert not Path("never").exists()


def test_a_variant_has_no_place_of_its_own():
    with pytest.raises(
        ConfigError, match=r"a: system\.work_dir=z: a variant is written to a subfolder of the study"
    ):
        jobs(preset(variants={"a": {"system": {"work_dir": "z"}}}), [])


def test_a_long_list_of_layers_has_a_folder():
    """Its title has all of them; a file's name has 255 bytes."""
    layers = [{"window": 1024, "n_kv_head": 2}, {"n_kv_head": 3}] * 8
    several = json.dumps([layers, [{}, *layers[1:]]])
    found = jobs(preset(), ["model.n_layer=16", "data.path=text.txt", f"model.layers={several}"])
    folders = [job.folder.parent.name for job in found]
    assert len(set(folders)) == len(folders) == 2
    assert set(map(len, folders)) == {109}
    (other,) = jobs(preset(variants={"模型" * 60: {}}), ["data.path=text.txt"])
    assert 50 < len(other.folder.parent.name.encode()) < 150
    (usual,) = jobs(preset(variants={"a" * 200: {}}), ["data.path=text.txt"])
    assert usual.folder.parent.name == "a" * 200
