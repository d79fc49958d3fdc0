"""The homework's flags, verbatim; everything else is read strictly or refused."""

import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rehead.attention import variants
from rehead.config.flags import OPTIONS, read, values, write
from rehead.errors import ConfigError, InvalidInput, ReheadError

HOMEWORK = {  # seeds B17, Table 1
    "data.block_size=128": 128,
    "system.work_dir=out/new_chargpt": "out/new_chargpt",
    "model.n_query_head=6": 6,
    "model.n_kv_head=3": 3,
    "model.pretrained_folder=out/chargpt3": "out/chargpt3",
    "model.rope=True": True,
    "trainer.max_iters=200": 200,
    "trainer.device=cpu": "cpu",
}


def get(options, flag):
    group, _, name = flag.partition("=")[0].removeprefix("--").partition(".")
    return getattr(getattr(options, group), name)


@pytest.mark.parametrize("dashes", ["", "--"])
@pytest.mark.parametrize(("flag", "value"), HOMEWORK.items())
def test_b17_flags_verbatim(flag, value, dashes):
    assert get(read([dashes + flag]), flag) == value


def test_b17_all_flags_together_with_mixed_dashes():
    options = read([("--" if i % 2 else "") + flag for i, flag in enumerate(HOMEWORK)])
    assert {flag: get(options, flag) for flag in HOMEWORK} == HOMEWORK


def test_yaml_lies_over_the_defaults_and_under_the_flags(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("model: {n_query_head: 8, n_kv_head: 4, n_embd: 64}\ntrainer: {max_iters: 7}\n")
    second.write_text("model: {n_kv_head: 2}\n")
    options = read(["--model.n_query_head=4"], (first, second))
    assert (options.model.n_query_head, options.model.n_kv_head, options.model.n_embd) == (4, 2, 64)
    assert (options.trainer.max_iters, options.trainer.batch_size) == (7, 64)


@pytest.mark.parametrize(
    ("key", "nested"),
    [
        ("model.rope", "model: {rope: ...}"),
        ("model.rope_scaling.factor", "model: {rope_scaling: {factor: ...}}"),
    ],
)
def test_a_dot_in_a_file_is_told_how_it_is_written(key, nested, tmp_path):
    """And not to mean itself."""
    file = tmp_path / "run.yaml"
    file.write_text(f"{key}: 2\n")
    with pytest.raises(ConfigError) as caught:
        read([], (file,))
    assert str(caught.value).endswith(f"run.yaml: in a file, write {nested}, not {key}.")


def test_a_table_lies_under_the_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {max_iters: 7}")
    options = read([], (file,), ({"trainer": {"max_iters": 5, "batch_size": 3}},))
    assert (options.trainer.max_iters, options.trainer.batch_size) == (7, 3)


READ = [
    ("trainer.learning_rate=5E-4", 5e-4),
    ("trainer.learning_rate=1e-3", 1e-3),
    ("trainer.learning_rate=.5", 0.5),
    ("trainer.learning_rate=1", 1.0),
    ("trainer.max_iters=0", 0),
    ("trainer.max_iters=+12", 12),
    ("trainer.max_iters=600 ", 600),
    ("model.rope=false", False),
    ("model.rope=null", None),
    ("data.name=null", None),
    ("system.work_dir=out/x=y", "out/x=y"),
    ("system.work_dir=out/with a space", "out/with a space"),
    ("system.work_dir=0010", "0010"),  # a text is itself, whatever YAML would make of it
    ("system.work_dir=1.10", "1.10"),
    ("system.work_dir=no", "no"),
    ("system.work_dir=2024-01-01", "2024-01-01"),
    ("data.path=1e3", "1e3"),
    ("data.path=a: b # c", "a: b # c"),
    ("data.path=１_０", "１_０"),
    ("trainer.device=cuda:1", "cuda:1"),
    ("model.layers=[{window: 3}, {}]", [{"window": 3}, {}]),
    ("trainer.report_to=wandb", ["wandb"]),
    ("trainer.report_to=[wandb, trackio]", ["wandb", "trackio"]),
    ("trainer.report_to=none", None),
]


@pytest.mark.parametrize(("flag", "value"), READ)
def test_values(flag, value):
    read_value = get(read([flag]), flag)
    assert (read_value, type(read_value)) == (value, type(value))


REFUSED = [  # flags, what the message must name, the remedy it must offer
    (["model.n_kvhead=3"], "n_kvhead", "n_kv_head"),
    (["modle.n_kv_head=3"], "modle", "model"),
    (["n_kv_head=3"], "n_kv_head", "model.n_kv_head"),
    (["--max_iters=7"], "max_iters", "trainer.max_iters"),
    (["trainer.max_iter=3"], "max_iter", "max_iters"),
    (["model.rope.theta=3"], "model.rope.theta=3", "expected True or False, or null"),
    (["trainer=3"], "trainer=3", "like trainer.max_iters=600"),
    (["model.n_kv_head=three"], "three", "a whole number, or null for its default. Write model.n_kv_head=3"),
    (["model.n_kv_head=3.0"], "3.0", "expected a whole number"),
    (["model.n_kv_head=true"], "true", "expected a whole number"),
    (["trainer.batch_size=null"], "batch_size=null", "expected a whole number. Write trainer.batch_size=64"),
    (["trainer.batch_size=[64]"], "[64]", "expected a whole number"),
    (["trainer.learning_rate=fast"], "fast", "expected a number. Write trainer.learning_rate=0.0005"),
    (["model.rope=maybe"], "maybe", "Write model.rope=True"),
    (
        ["model.layers={window: 3}"],
        "model.layers={window: 3}",
        "a list of tables, or null for its default. Write model.layers='[{window",
    ),
    (["model.layers=[3]"], "model.layers=[3]", "a list of tables"),
    (["model.attention=mhaa"], "mhaa", f"Known: {', '.join(variants)}."),
    (["trainer.dtype=float16"], "float16", "Use one of float32, bfloat16."),
    (["model.shape=gtp"], "gtp", "Use one of gpt, llama."),
    (["trainer.max_iters=1e3"], "1e3", "expected a whole number"),
    (["trainer.max_iters=１２"], "１２", "plain digits"),
    (["trainer.max_iters=1_000"], "1_000", "plain digits"),
    (["trainer.max_iters=010"], "010", "plain digits"),  # 8 in YAML
    (["trainer.max_iters=0x10"], "0x10", "plain digits"),
    (["model.layers=[{window: 010}]"], "010", "plain digits"),
    (["trainer.max_iters=0b11"], "0b11", "plain digits"),
    (["trainer.max_iters=1:30"], "1:30", "plain digits"),  # 90 in YAML
    (["trainer.learning_rate=1_0e-3"], "1_0e-3", "plain digits"),
    (["trainer.learning_rate=１e-3"], "１e-3", "plain digits"),
    (["model.n_kv_head"], "model.n_kv_head has no value", "write model.n_kv_head=3"),
    (["--data.path", "my text"], "--data.path has no value", "write data.path=my text, with a ="),
    (["model.n_kv_head", "model.rope=True"], "model.n_kv_head has no value", "write model.n_kv_head=3"),
    (["n_kv_head"], "n_kv_head", "group.key=value"),
    (["model.block_size=64"], "'model.block_size'", "Did you mean data.block_size?"),
    (["model.seed=1"], "'model.seed'", "Did you mean system.seed?"),
    (["vocab_size=300"], "'vocab_size'", "Did you mean data.vocab_size?"),
    (["model.n_heads=4"], "'model.n_heads'", "Did you mean model.n_kv_head or model.n_query_head?"),
    (["trainer.max_iter=4"], "'trainer.max_iter'", "Did you mean trainer.max_iters? `"),
    (["trainer.block_sise=4"], "'trainer.block_sise'", "Did you mean data.block_size? `"),
    (["model.xyzzy=1"], "'model.xyzzy'", "`rehead train --help` lists all"),
    (["trainer.sample_every=[1, 2]"], "[1, 2]", "expected a whole number"),
    (
        ["model.rope_scaling=3"],
        "=3",
        "expected a table, or null for its default. Write model.rope_scaling='{rope_type",
    ),
    (["-model.n_kv_head=3"], "-model.n_kv_head=3", "group.key=value"),
    (["=3"], "=3", "group.key=value"),
    (["model.rope=True", "--model.rope=True"], "model.rope", "twice"),
    (["trainer.max_iters="], "trainer.max_iters=", "write trainer.max_iters=600, for example."),
    (["system.work_dir="], "system.work_dir=", "write system.work_dir=out/run, for example."),
    (["model.n_kv_head="], "model.n_kv_head=", "write null for none."),
    (["data.path= "], "data.path=", "null"),
    (["system.work_dir=${oc.env:HOME}"], "${oc.env:HOME}", "Write the value itself"),
    (["model.n_kv_head=???"], "???", "Write the value itself"),
    (["system.seed=-1"], "system.seed=-1", "0 up to 4294967295"),
    (["system.seed=9223372036854775808"], "9223372036854775808", "more than 64 bits"),
    (["trainer.max_iters=18446744073709551616"], "18446744073709551616", "more than 64 bits"),
    (
        ["trainer.max_iters=[1"],
        "trainer.max_iters=[1",
        "expected a whole number. Write trainer.max_iters=600",
    ),
    (["trainer.report_to=wand"], "trainer.report_to=wand", "several as [tensorboard, trackio], or none."),
    (["trainer.report_to"], "trainer.report_to has no value", "write trainer.report_to=tensorboard"),
]


@pytest.mark.parametrize(("flags", "named", "remedy"), REFUSED)
def test_refused(flags, named, remedy):
    with pytest.raises(ConfigError) as caught:
        read(flags)
    message = str(caught.value)
    assert named in message
    assert remedy in message
    assert "\n" not in message


FILES = [  # bytes of a YAML file, error, what the message must name
    (b"model: {n_kvhead: 3}", ConfigError, "n_kv_head"),
    (b"model: {n_kv_head: three}", ConfigError, "three"),
    (b"model: {n_kv_head: '???'}", ConfigError, "???"),
    (b"system: {work_dir: '${oc.env:HOME}'}", ConfigError, "${oc.env:HOME}"),
    (b"model: [1, 2]", ConfigError, "run.yaml"),
    (b"- model", InvalidInput, "system, data, model, trainer"),
    (b"", InvalidInput, "system, data, model, trainer"),
    (b"model: 3\ntrainer: {max_iters: 7", InvalidInput, "in line 2"),
    (b"model: \xff", InvalidInput, "run.yaml is not YAML"),
    (b"model: {n_layer: 0x" + b"f" * 9000 + b"}", InvalidInput, "a whole number of 36,000 bits in line 1"),
    (b"model: {n_layer: -0b1" + b"0" * 10000 + b"}", InvalidInput, "a whole number of 10,001 bits in line 1"),
    (b"model: {n_layer: " + b"9" * 2000 + b"}", ConfigError, "more than 64 bits"),
    (
        b"trainer: {max_iters: 010}",
        InvalidInput,
        "010; write the number in plain digits in line 1",
    ),  # 8 in YAML
    (
        b"trainer:\n  warmup_iters: 1:30",
        InvalidInput,
        "1:30; write the number in plain digits in line 2",
    ),  # 90
    (b"trainer: {eval_every: 1_000}", InvalidInput, "plain digits"),
    (b"trainer: {learning_rate: 1:30.5}", InvalidInput, "plain digits"),
    (b"model: {n_layer: 0x10}", InvalidInput, "plain digits"),
    (
        b"model: {n_layer: !!int ''}",
        InvalidInput,
        "a tag (tag:yaml.org,2002:int); write the value itself in line 1",
    ),
    (b"model: {n_layer: ! 3}", InvalidInput, "a tag (!)"),
    (b"model: !!python/object/apply:os.getcwd []", InvalidInput, "run.yaml is not YAML"),
    (
        b"model: &here {n_kv_head: 3}\ndata: *here",
        InvalidInput,
        "a reference; write the value itself in line 2",
    ),
    (b"data: {}\nmodel: {n_kv_head: 3,\n  n_kv_head: 2}", InvalidInput, "a key appears twice in line 2"),
    (b"model: {}\ndata: {path: 2024-13-45}", InvalidInput, "month must be in 1..12"),
    (b"model: " + b"[" * 5000, InvalidInput, "recursion"),
]


@pytest.mark.parametrize(("content", "error", "named"), FILES)
def test_refused_files(content, error, named, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(error) as caught:
        read([], (file,))
    assert "run.yaml" in str(caught.value)
    assert named in str(caught.value)


def test_refused_missing_file(tmp_path):
    with pytest.raises(InvalidInput, match=r"none\.yaml: No such file or directory"):
        read([], (tmp_path / "none.yaml",))


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(
    lambda s: s.strip() and "${" not in s and s != "???" and s != "null"
)
drawn = st.fixed_dictionaries(
    {},
    optional={
        "system.work_dir": texts,
        "system.seed": st.integers(0, 2**32 - 1),
        "data.path": texts,
        "data.block_size": st.integers(1, 10**6),
        "trainer.max_iters": st.integers(0, 10**9),
        "trainer.learning_rate": st.floats(1e-12, 1e3),
        "trainer.weight_decay": st.floats(0, 1e3),
        "trainer.resume": st.booleans(),
        "model.rope": st.none() | st.booleans(),
        "model.window": st.none() | st.integers(1, 99),
        "model.attention": st.none() | st.sampled_from(["mha", "gqa", "mqa", "mla"]),
        "model.score": texts,
        "model.layers": st.lists(st.sampled_from(["{}", "{window: 3}"]), min_size=1).map(
            lambda entries: f"[{', '.join(entries)}]"
        ),
    },
)


@settings(max_examples=10)
@given(drawn)
def test_what_is_written_is_read_back(tmp_path_factory, values):
    flags = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    options = read(flags)
    for key, value in values.items():
        if key != "model.layers":
            assert get(options, key) == value
    file = tmp_path_factory.mktemp("run", numbered=True) / "config.yaml"
    file.write_text(write(options), encoding="utf-8")
    assert read([], (file,)) == options


def test_written_defaults_are_the_defaults(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(write(read([])))
    assert asdict(read([], (file,))) == asdict(read([]))


@settings(max_examples=30)
@given(
    st.lists(
        st.text(max_size=20) | st.sampled_from([*HOMEWORK, *(flags[0] for flags, *_ in REFUSED)]), max_size=3
    )
)
def test_no_argument_does_anything_but_a_clean_error(flags):
    with suppress(ReheadError):
        read(flags)


FOREIGN = re.compile(
    r"Config|Node|Dict|Cannot|Type|Error|\b(class|object|argument|int|str|bool|float|NoneType)\b"
)
"""Words of libraries, which say nothing to a user."""
VALUES = [
    "three",
    "[1, 2]",
    "[x]",
    "{a: 1}",
    "null",
    "1.5",
    "True",
    "-1",
    "0",
    "7",
    "1e30",
    ".inf",
    "2024-01-01",
]


@pytest.mark.parametrize("key", [f"{group}.{name}" for group in OPTIONS for name in OPTIONS[group]])
def test_every_wrong_value_is_refused_in_plain_words(key, tmp_path):
    """As a flag and from a file. What is read gives a model, or is refused as plainly."""
    group, name = key.split(".")
    refused = []
    for value in VALUES:
        file = tmp_path / "run.yaml"
        file.write_text(f"{group}: {{{name}: {value}}}")
        for flags, files in (([f"{key}={value}"], ()), ([], (file,))):
            try:
                read(flags, files).model.resolve(65, 8)
            except ReheadError as error:
                refused.append(str(error).replace(str(file), "run.yaml"))
    assert refused or OPTIONS[group][name].type is bool
    assert all(name in message and not FOREIGN.search(message) for message in refused), refused


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("model.layers=[{window: x}]", "window='x': expected a whole number."),
        ("model.layers=[{rope: 3}]", "rope=3: expected True or False."),
        ("model.rope_scaling={rope_type: linear, factor: x}", "factor='x': expected a number."),
        ("model.rope_scaling={rope_type: linear}", "factor is missing."),
    ],
)
def test_wrong_values_inside_tables(flag, rule):
    with pytest.raises(ConfigError) as caught:
        read([flag, "model.rope=True"]).model.resolve(65, 8)
    assert rule in str(caught.value)


def test_values_of_a_list_are_read_for_any_key():
    """A study gives several values of an option, one per run."""
    assert values(["model.n_kv_head=[1, 2]", "data.path=[a, 7]", "--trainer.max_iters=7"]) == {
        "model.n_kv_head": [1, 2],
        "data.path": ["a", 7],
        "trainer.max_iters": 7,
    }


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("model.n_kv_head=[1, 2", "model.n_kv_head=[1, 2: expected"),
        ("model.n_kv_head=[]", "model.n_kv_head=[]: the list is empty. Give one value or more."),
        ("model.n_kv_head", "model.n_kv_head has no value"),
    ],
)
def test_refused_lists_of_values(flag, named):
    with pytest.raises(ConfigError) as caught:
        values([flag])
    assert named in str(caught.value)


def test_entries_of_a_table_come_one_by_one(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {rope_scaling: {rope_type: linear, factor: 2}}\ndata:\n")
    assert read(["model.rope_scaling.factor=4"], (file,)).model.rope_scaling == {
        "rope_type": "linear",
        "factor": 4,
    }


def test_a_config_is_a_regular_file_of_some_kib(tmp_path):
    with pytest.raises(InvalidInput, match="/dev/zero is not a regular file"):
        read([], (Path("/dev/zero"),))
    (tmp_path / "large.yaml").write_bytes(b"#" * (2**16 + 1))
    with pytest.raises(InvalidInput, match="more than 65,536 bytes"):
        read([], (tmp_path / "large.yaml",))
