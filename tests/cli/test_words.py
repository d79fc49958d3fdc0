"""What the command line says when something is wrong: value, rule, and the true way out."""

import json
from pathlib import Path

import pytest
import torch

from rehead.cli import main
from rehead.report import lines

TINY = [
    "model.n_layer=1",
    "model.n_embd=24",
    "trainer.max_iters=2",
    "trainer.batch_size=2",
    "trainer.eval_batches=1",
]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """README's first model, small, in out/gqa."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text("O God, O God! How weary, stale, flat and unprofitable\n" * 40)
    flags = ["data.path=input.txt", "data.block_size=16", "system.work_dir=out/gqa"]
    assert main(["train", *flags, "model.n_kv_head=3", "model.rope=True", *TINY]) == 0
    capfd.readouterr()
    return "out/gqa"


def refused(capfd, *words):
    status = main(list(words))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1, printed.err
    assert status in (2, 3, 5)
    return printed.err


def test_the_option_that_was_typed_is_named(run, capfd):
    for words, option in (
        (["eval", run, "--data", "nowhere.txt"], "--data"),
        (["convert", run, "new", "--to", "mha", "--calibration", "nowhere.txt"], "--calibration"),
        (["convert", run, "new", "--to", "mha", "--test", "nowhere.txt"], "--test"),
        (["train", "data.path=nowhere.txt", "system.work_dir=new"], "data.path"),
    ):
        said = refused(capfd, *words)
        assert "no text at 'nowhere.txt' (No such file or directory)" in said
        assert f"give {option} a file or folder that exists" in said
        assert not Path("new").exists() or words[0] == "train"
    Path("empty").mkdir()
    assert "name a file with --data." in refused(capfd, "eval", run, "--data", "empty")


def test_a_place_under_a_file(run, capfd):
    said = refused(capfd, "convert", run, "input.txt/new", "--to", "mha")
    assert "input.txt/new cannot be created: input.txt is a file. Choose a path in a folder." in said
    said = refused(capfd, "inspect", run, "--text", "God", "--html", "input.txt/page.html")
    assert "input.txt is a file" in said
    Path("latest").symlink_to("removed")
    said = refused(capfd, "convert", run, "latest/new", "--to", "mha")
    assert "latest/new cannot be created: latest is a link to nothing. Choose a path in a folder." in said


def test_export_says_what_can_be_done(run, capfd):
    """Conversions change the attention only; the first model of README needs another norm and MLP."""
    said = refused(capfd, "export", run, "out/stock")
    assert said.endswith(
        "no format can represent this model as it is. DeepseekV3ForCausalLM cannot represent norm=layernorm, mlp=gelu, "
        "mlp_bias=True, which no conversion changes. Convert it with --to mha for --format "
        "gpt_neox.\n"
    )
    said = refused(capfd, "export", run, "out/stock", "--format", "llama")
    assert "LlamaForCausalLM cannot represent this model's norm, mlp." in said
    assert said.endswith(" Convert it with --to mha for --format gpt_neox.\n")
    assert main(["convert", run, "out/heads", "--to", "mha"]) == 0
    assert main(["export", "out/heads", "out/neox", "--format", "gpt_neox"]) == 0
    capfd.readouterr()
    train = ["train", "data.path=input.txt", "data.block_size=16", *TINY]
    assert main([*train, "system.work_dir=out/llama", "model.n_kv_head=3", "model.shape=llama"]) == 0
    assert main(["export", "out/llama", "out/stock"]) == 0  # the way out leads out
    assert main([*train, "system.work_dir=out/learned", "model.n_kv_head=3"]) == 0
    capfd.readouterr()
    assert "Convert it with --to mha for --format gpt2." in refused(
        capfd, "export", "out/learned", "out/gpt2"
    )
    assert main(["convert", "out/learned", "out/mha", "--to", "mha"]) == 0
    assert main(["export", "out/mha", "out/gpt2", "--format", "gpt2"]) == 0


def test_a_long_message_keeps_its_rule_and_its_list(run, capfd):
    """Only words of more than 100 characters are shortened, in their middle."""
    folder = "/".join(["a" * 60] * 4)
    said = refused(capfd, "generate", folder, "--prompt", "O")
    assert f"{folder[:50]}...{folder[-50:]}" in said
    assert len(said) < 300
    said = refused(capfd, "train", f"model.layers=[{'{window: 3}, ' * 40}")
    assert "expected a list of tables" in said
    assert len(said) < 400
    said = refused(capfd, "inspekt", run)
    assert "bench, check, convert, env, eval, export, generate, heal, " in said
    said = refused(capfd, "convert", run, "new", "--to", "mla", "--kv-rank", "3", "--method", "mean")
    assert " ... " not in said


@pytest.mark.filterwarnings("default:--max-loss 0.01 holds:UserWarning")
def test_max_loss_is_consent(run, capfd, monkeypatch):
    """It accepts the loss it names, and says where the test text loses more."""
    for name in ("SOON", "EVERY"):  # however slow the machine is, it does not say how far it is
        monkeypatch.setattr(lines, name, float("inf"))
    assert main(["convert", run, "a", "--to", "mla", "--max-loss", "5", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["exact"] is False
    assert printed.err == ""
    learned = ["trainer.max_iters=100", "trainer.learning_rate=0.01", "trainer.batch_size=8"]
    flags = ["data.path=input.txt", "data.block_size=16", "system.work_dir=learned"]
    assert main(["train", *flags, "model.n_kv_head=3", "model.rope=True", *TINY[:2], *learned]) == 0
    capfd.readouterr()
    Path("other.txt").write_text("ttt ,,, !!! www\n" * 30)
    words = ["--to", "mla", "--max-loss", "0.01", "--calibration", "other.txt", "--test", "input.txt"]
    assert main(["convert", "learned", "b", *words, "--json"]) == 0
    printed = capfd.readouterr()
    before, after = json.loads(printed.out)["loss"]
    assert after - before > 0.1
    warned = f"--max-loss 0.01 holds on the calibration text; on the test text the loss rises by {after - before:.4f}"
    assert warned in printed.err


def test_heal_gives_the_renewed_certificate(run, capfd):
    assert main(["convert", run, "mla", "--to", "mla", "--kv-fraction", "0.5", "--allow-loss"]) == 0
    capfd.readouterr()
    small = ["trainer.max_iters=2", "trainer.batch_size=2", "trainer.eval_batches=1", "trainer.device=cpu"]
    assert main(["heal", "mla", "--teacher", run, *small, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["step"] == 2
    healing = document["certificate"]["healing"]
    assert [entry["steps"] for entry in healing] == [2]
    found = json.loads(Path("mla-healed/checkpoints/step-000002/conversion.json").read_text())
    assert found["loss"] == document["certificate"]["loss"]
    assert main(["heal", "mla", "--teacher", run, *small, "trainer.resume=True"]) == 0
    shown = capfd.readouterr().out  # one loss, of the whole held-out text: not that of some blocks beside it
    assert shown.startswith("done: 2 steps\n")
    assert shown.count("nats per token") == 1


def test_one_process_teaches(run, capfd):
    assert main(["convert", run, "mqa", "--to", "mqa", "--allow-loss"]) == 0
    capfd.readouterr()
    said = refused(capfd, "heal", "mqa", "--teacher", run, "--teach", "1", "trainer.parallel=ddp")
    assert "--teach with trainer.parallel=ddp: one process teaches. Run it without torchrun" in said


def test_samples_are_what_their_seeds_give_one_at_a_time(run, capfd):
    words = ["generate", run, "--max-new-tokens", "6"]
    prompts = ["--prompt", "O God", "--prompt", "How"]
    assert main([*words, *prompts, "--samples", "2", "--seed", "5"]) == 0
    texts = capfd.readouterr().out.removesuffix("\n").split("\n---\n")
    alone = []
    for prompt in ("O God", "How"):
        for seed in ("5", "6"):
            assert main([*words, "--prompt", prompt, "--seed", seed, "--json"]) == 0
            (one,) = json.loads(capfd.readouterr().out)["results"]
            alone.append(prompt + one["completion"])
    assert texts == alone
    assert len(set(texts)) == 4


UNDER_A_FILE = "cannot be created: input.txt is a file. Choose a path in a folder."
WRONG_PLACES = (
    ("train data.path=input.txt system.work_dir=input.txt/x", "input.txt/x", UNDER_A_FILE),
    ("train data.path=input.txt system.work_dir=input.txt", f"rehead: input.txt {UNDER_A_FILE}"),
    (
        "study --preset grid model.n_kv_head=[1,2] data.path=input.txt system.work_dir=input.txt/x",
        UNDER_A_FILE,
    ),
    ("plan input.txt", "is a file: expected a model or run folder, a config.json, or a YAML of options."),
    ("plan a.gguf", "Make a folder of it first: rehead import a.gguf FOLDER"),
    ("study --preset broken.yaml", "is not YAML", "in line 1. docs/study.md has the form of a preset."),
    ("inspect out/gqa --text God --html out", "cannot write out (Is a directory): give --html a file in a"),
    (
        "heal out/gqa --teacher out/../out/gqa",
        "--teacher out/../out/gqa is the model that is healed",
        "give the model it was converted from.",
    ),
)


def test_wrong_places_and_files_are_named_by_what_they_are(run, capfd):
    Path("broken.yaml").write_text("a: [1")
    Path("a.gguf").write_text("GGUF")
    for line, *said in WRONG_PLACES:
        error = refused(capfd, *line.split())
        assert all(part in error for part in said), error
        assert not [part for part in ("Errno", ".part", "unicode string") if part in error]
    assert not list(Path().glob("*.part"))


def test_numbers_are_refused_before_any_work(run, capfd, monkeypatch):
    error = refused(
        capfd, "generate", run, "--prompt", "God", "--max-new-tokens", "9000000", "--samples", "2"
    )
    assert error.endswith(
        "--max-new-tokens 9000000 after each of 2 prompts makes 18,000,000 tokens. Use 10,000,000 or fewer in total.\n"
    )
    monkeypatch.setattr("rehead.conversion.folder.read_at", lambda *given: pytest.fail("the model was read"))
    for value in ("-1.0", "nan"):
        error = refused(capfd, "convert", run, "new", "--to", "mla", "--max-loss", value)
        assert f"--max-loss {value}: nats per token above the source's loss. Use 0 or more." in error


def test_memory_that_is_not_there_is_said_in_our_words(run, capfd, monkeypatch):
    def greedy(*given, **named):
        return torch.empty(2**60)

    monkeypatch.setattr("rehead.generation.stream", greedy)
    assert refused(capfd, "generate", run, "--prompt", "God") == (
        "rehead: out of memory (4611686018427387904 bytes more were needed): use a smaller model or batch, or fewer "
        "tokens.\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--to mla --kv-fraction 2",
            "--kv-fraction 2: a share of the source's cache. Use a number above 0 up to 1.",
        ),
        (
            "--to mla --kv-fraction 0",
            "--kv-fraction 0: a share of the source's cache. Use a number above 0 up to 1.",
        ),
        (
            "--to mla --kv-fraction nan",
            "--kv-fraction nan: a share of the source's cache. Use a number above",
        ),
        ("--to mla --kv-fraction 2 --measured-ranks", "--kv-fraction 2: a share of the source's cache."),
        (
            "--to mla --measured-ranks",
            "ranks are measured for --to mla with either --kv-fraction or --max-loss.",
        ),
        (
            "--to gqa --n-kv-head 2 --max-loss 0.1",
            "ranks are measured for --to mla with either --kv-fraction or",
        ),
        (
            "--to mla --kv-rank 3 --max-loss 0.1",
            "ranks are measured for --to mla with either --kv-fraction or",
        ),
        (
            "--to mla --kv-fraction 0.5 --max-loss 0.1",
            "ranks are measured for --to mla with either --kv-fraction or",
        ),
    ],
)
def test_measured_ranks_are_refused_before_the_model_is_read(words, said, capfd, monkeypatch):
    monkeypatch.setattr("rehead.conversion.folder.read_at", lambda *given: pytest.fail("the model was read"))
    assert refused(capfd, "convert", "run", "new", *words.split()).startswith(f"rehead: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --data text.txt", "unknown option '--data'. Did you mean data.path? See"),
        ("heal run --teacher run --data text.txt", "unknown option '--data'. Did you mean data.path? See"),
        ("train --batch-size 3", "unknown option '--batch-size'. Did you mean trainer.batch_size? See"),
        ("train --jsn", "unknown option '--jsn'. Did you mean '--json'?"),
    ],
)
def test_an_option_of_a_run_is_named_for_its_flag(words, said, capfd):
    assert refused(capfd, *words.split()).startswith(f"rehead: {said}")


def test_a_name_is_shown_as_it_was_typed(capfd):
    """Two blanks are two blanks: another folder may have one."""
    assert "two  blanks does not exist" in refused(capfd, "generate", "two  blanks", "--prompt", "x")


def test_a_window_of_one_token_is_refused(run, capfd):
    words = ["convert", run, "new", "--to", "mla", "--kv-fraction", "0.5", "--length", "1"]
    assert "no token of such a window has another before it. Use 2 or more." in refused(capfd, *words)


@pytest.mark.parametrize("option", ["--length", "--stride", "--batch-size"])
def test_eval_refuses_a_number_before_it_reads_a_model(option, run, capfd, monkeypatch):
    monkeypatch.setattr(
        "rehead.tokenizer.open_model", lambda *given, **more: pytest.fail("the model was read")
    )
    Path("some.txt").write_text("some")
    said = refused(capfd, "eval", run, "--data", "some.txt", option, "0")
    assert said == f"rehead: {option} 0. Use 1 or more.\n"


def test_a_conversion_that_changes_nothing_says_so(run, capfd):
    said = f"rehead: warning: {run} already is what is asked for: same is a copy in rehead's format.\n"
    assert main(["convert", run, "same", "--to", "gqa"]) == 0
    assert said in capfd.readouterr().err
    assert "Nothing had to change." in Path("same/CONVERSION.md").read_text()
    assert main(["convert", run, "other", "--to", "gqa", "--head-map", "modular"]) == 0
    assert "already is" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("rank", "said"), [("0", "rehead: nowhere does"), ("1", "rehead: rank 1: nowhere does")]
)
def test_a_process_of_torchrun_says_which_it_is(rank, said, capfd, monkeypatch):
    place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert refused(capfd, "plan", "nowhere").startswith(said)


def test_norms_under_autocast_say_nothing(run, capfd):
    """PyTorch warns of their float32 weights, which nobody can change."""
    norms = ["model.shape=llama", "model.qk_norm_eps=1e-6", "trainer.dtype=bfloat16", "data.block_size=16"]
    assert main(["train", "data.path=input.txt", "system.work_dir=low", *norms, *TINY]) == 0
    assert "Mismatch" not in capfd.readouterr().err
