"""A study from its command to its files: resumed, killed, in parallel, and what its numbers are."""

import csv
import fcntl
import html
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
import torch

from rehead import checkpoint
from rehead.checkpoint import find
from rehead.cli import main
from rehead.config import ModelOptions, flags
from rehead.data import Split
from rehead.data.hold import hold
from rehead.errors import InvalidInput
from rehead.measure import forward_flops
from rehead.model import build
from rehead.study import Preset, jobs, maps, work
from rehead.study.claims import compare
from rehead.study.costs import known_costs
from rehead.study.metrics import MOST_POINTS, downsample, read_metrics
from rehead.study.prompt import prompt_note
from rehead.tokenizer import Tokenizer, train
from typed_lines import typed

TINY = ["study", "--preset", "tiny.yaml"]


def results(folder):
    return json.loads((folder / "results.json").read_text())


def losses(folder):
    """All that may not depend on how often a study was stopped."""
    return [
        [one["variant"], run["seed"], run["val_loss"], run["train_loss"], run["curve"], run["sample"]]
        for one in results(folder)["variants"]
        for run in one["runs"]
    ]


@pytest.fixture(scope="module")
def whole(place):
    """A study that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        torch.set_default_dtype(torch.float32)
        assert main([*TINY, "system.work_dir=whole"]) == 0
    return place / "whole"


def test_a_study_leaves_everything_in_its_folder(whole):
    held = {entry.name for entry in whole.iterdir() if entry.is_file()}
    assert held == {
        ".lock", "results.json", "runs.csv", "curves.csv", "costs.json", "report.html",
        "1-loss.png", "1-memory.png", "1-speed.png", "2-frontier.png",
    }  # fmt: skip
    found = results(whole)
    assert [one["variant"] for one in found["variants"]] == [
        "Two heads",
        "One head",
        "Longer",
        "Latent",
        "Healed",
    ]
    assert [[run["seed"] for run in one["runs"]] for one in found["variants"]] == [[3, 4]] * 5
    assert found["command"] == "rehead study --preset tiny.yaml system.work_dir=whole"


def test_numbers_are_those_of_the_models(whole, here):
    for one in results(whole)["variants"]:
        costs = one["costs"]
        assert costs["parameters"] == costs["parameters_counted"]
        assert costs["cache_bytes"] == costs["cache_bytes_held"]
        assert costs["input_lengths"] == {"cached": [1] * 8, "uncached": [1, 2, 3, 4, 5, 6, 7, 8]}
        low, middle, high = (costs["tokens_per_second_cached"][index] for index in (1, 0, 2))
        assert 0 < low <= middle <= high
        assert ("seconds_per_step" in costs) == (one["kind"] != "converted") == (costs["memory"] is not None)
        for run in one["runs"]:
            assert run["sample"].startswith("O God")
            assert len(run["sample"]) == 10
            line = (
                (Path(run["folder"]) / "metrics.jsonl").read_text().splitlines()[-1] if run["steps"] else None
            )
            if line:
                assert run["val_loss"] == json.loads(line)["val_loss"]
    two, one_head, longer, latent, healed = results(whole)["variants"]
    assert one_head["costs"]["kv_bytes_per_token"] * 2 == two["costs"]["kv_bytes_per_token"]
    assert (longer["costs"]["context"], longer["steps_before"]) == (24, 4)
    assert [point[0] for point in longer["runs"][0]["curve"]] == [4, 6, 7]
    assert (longer["steps"], longer["length"], longer["length_before"]) == (7, 24, 16)
    assert [sorted(run["val_loss_at"]) for run in longer["runs"]] == [["16", "24"]] * 2
    assert longer["runs"][0]["val_loss_at"]["24"] == longer["runs"][0]["val_loss"]
    assert longer["runs"][0]["val_loss_at"]["16"] != longer["runs"][0]["val_loss"]
    for one in (two, one_head):
        assert 0 < one["costs"]["memory"]["attention"] < one["costs"]["memory"]["activations"]
        assert one["costs"]["seconds_of_attention_scores_kept"][0] > 0
    assert latent["runs"][0]["certificate"]["kl"] > 0
    assert latent["costs"]["kv_bytes_per_token"] * 4 == two["costs"]["kv_bytes_per_token"]
    assert (healed["from"], healed["kind"], latent["kind"]) == ("Latent", "healed", "converted")
    sizes = [one["costs"]["parameters"] for one in (healed, two)]
    assert healed["costs"]["memory"]["weights"] == 4 * sum(sizes), "a step asks the teacher"
    asked = two["costs"]["training_flops_per_token"] // 3
    own = checkpoint.read_at(here / healed["runs"][0]["folder"], checkpoint.read_config)
    assert healed["costs"]["training_flops_per_token"] == 3 * forward_flops(own, 16) + asked


def test_what_is_converted_is_measured_as_what_is_trained(whole, here):
    """The loss of a conversion is evaluated on the blocks of its source's trainings."""
    job = next(
        job for job in jobs(Preset.read("tiny.yaml"), ["system.work_dir=whole"]) if job.variant == "Two heads"
    )
    trained = work.measured(job)
    model, (texts, tokenizer) = work.load(job), work.texts_of(job)
    found = work._losses(job, model, texts, job.length, tokenizer.bos)
    assert found == (trained["train_loss"], trained["val_loss"])


def test_commands_make_the_same_models(whole, here):
    """The command shown for each, run by itself in an empty folder."""
    shown = {one["variant"]: one["runs"][0]["command"] for one in results(whole)["variants"]}
    Path("again").mkdir()
    for name in ("Two heads", "Longer", "Latent", "Healed"):
        assert main(shlex.split(shown[name].replace("whole/", "again/"))[1:]) == 0, shown[name]
    for name in ("longer/seed-3", "healed/seed-3", "latent/seed-3/model"):
        one, other = (checkpoint.load(Path(place) / name).state_dict() for place in ("whole", "again"))
        assert all(torch.equal(weight, other[key]) for key, weight in one.items())
    shutil.rmtree("again")


def stamps(folder):
    """When anything below was last written."""
    files = [*folder.rglob("measured.json"), *folder.rglob("metrics.jsonl"), folder / "costs.json"]
    return {file: file.stat().st_mtime_ns for file in files}


def test_what_is_done_is_not_done_again(whole, here, monkeypatch):
    before = stamps(whole)
    monkeypatch.setattr("rehead.study.work.train", lambda options: 1 / 0)
    monkeypatch.setattr("rehead.study.costs.costs", lambda jobs: 1 / 0)
    assert main([*TINY, "system.work_dir=whole"]) == 0
    assert stamps(whole) == before


def test_costs_of_another_format_are_measured_again(whole, here):
    """Older ones left out the teacher, and what `trainer.recompute` saves."""
    planned, file = jobs(Preset.read("tiny.yaml"), ["system.work_dir=whole"]), whole / "costs.json"
    before = file.read_text()
    known = known_costs(planned)
    assert known is not None
    try:
        file.write_text(json.dumps({key: value for key, value in known.items() if key != "format"}))
        assert known_costs(planned) is None
    finally:
        file.write_text(before)


def test_the_text_of_a_run_stays_the_one_it_was_trained_on(whole, here):
    """Whether its file was changed since, or is gone."""
    shutil.copytree(whole, "kept")
    tokens = {file: file.read_bytes() for file in Path("kept").rglob("tokens.bin")}
    text, words = Path("input.txt").read_text(), [*TINY, "system.work_dir=kept"]
    assert main(words) == 0
    page = Path("kept/report.html").read_text()
    try:
        Path("input.txt").write_text("weary God, flat and stale. O\n" * 60)
        assert main(words) == 0
        Path("input.txt").unlink()
        assert main(words) == 0
    finally:
        Path("input.txt").write_text(text)
    assert len(tokens) > 5
    assert {file: file.read_bytes() for file in tokens} == tokens
    assert Path("kept/report.html").read_text() == page


FEW = """
about: A model that is there.
run: {data: {block_size: 16}, trainer: {batch_size: 3, eval_batches: 1}}
new_tokens: 2
variants:
  Source: {source: whole/two-heads/seed-3}
  Mean: {from: Source, convert: {to: mqa, method: mean}}
"""


def test_texts_are_not_mixed(whole, here, capsys):
    """Another file, or the same one edited, is refused if anything is still to be made or measured."""
    Path("texts.yaml").write_text(FEW)
    Path("a.txt").write_text(text := Path("input.txt").read_text())
    Path("same.txt").write_text(text)
    Path("b.txt").write_text("weary God, flat and stale. O\n" * 60)
    words = ["study", "--preset", "texts.yaml", "system.work_dir=texts-kept"]
    assert main([*words, "data.path=a.txt"]) == 0
    before = stamps(here / "texts-kept")
    assert main([*words, "data.path=b.txt"]) == 3
    said = capsys.readouterr().err
    assert "texts-kept/source/seed-3407 was made with another text than b.txt is now." in said
    assert "choose another system.work_dir" in said
    Path("a.txt").write_text("weary God, flat and stale. O\n" * 60)
    assert main([*words, "data.path=a.txt"]) == 0  # nothing is left to do
    Path("texts.yaml").write_text(FEW + "  Sum: {from: Source, convert: {to: mqa, method: first}}\n")
    for more in ([], ["--only", "sum/seed-3407"]):
        assert main([*words, "data.path=a.txt", *more]) == 3
        assert "made with another text than a.txt is now" in capsys.readouterr().err
    assert stamps(here / "texts-kept") == before
    Path("a.txt").unlink()  # the name does not count
    assert main([*words, "data.path=same.txt"]) == 0


def test_flags_shared_by_variants_that_do_not_use_them_are_in_no_command(here):
    """`rehead train` would refuse them."""
    for preset, flag in (
        ("variants", "model.resid_pdrop=0.2"),
        ("frontier", "trainer.schedule=constant"),
        ("demo", "trainer.distillation=0.5"),
    ):
        for found in jobs(Preset.read(preset), [flag, "data.path=input.txt"]):
            program, command, *words = shlex.split(found.command())
            assert program == "rehead"
            if command == "train":
                flags.read(words).refuse_unused()


def test_texts_of_different_letters_give_a_page(here):
    """Attention is shown of the models whose vocabulary has the text."""
    Path("one.txt").write_text("O God, é! how weary\n" * 80)
    Path("two.txt").write_text("O God! how weary\n" * 80)
    small = Path("tiny.yaml").read_text().partition("variants:")[0].replace("path: input.txt, ", "")
    Path("texts.yaml").write_text(
        small + "variants: {A: {data: {path: one.txt}}, B: {data: {path: two.txt}}}\n"
    )
    found = jobs(Preset.read("texts.yaml"), ["system.work_dir=texts", "system.seed=1", "trainer.max_iters=1"])
    assert (
        main(
            [
                "study",
                "--preset",
                "texts.yaml",
                "system.work_dir=texts",
                "system.seed=1",
                "trainer.max_iters=1",
            ]
        )
        == 0
    )
    assert Path("texts/report.html").exists()
    shown = maps(found)
    assert list(shown) == ["A"]
    assert "é" in "".join(shown["A"].tokens)


def test_attention_is_shown_with_the_token_before_every_text(whole, here, monkeypatch):
    given = jobs(Preset.read("tiny.yaml"), ["system.work_dir=whole"])
    plain = maps(given)["Two heads"].tokens
    inner = hf.Tokenizer.from_file(str(checkpoint.resolve(Path("whole/two-heads/seed-3")) / "tokenizer.json"))
    inner.post_processor = hf.processors.TemplateProcessing(
        single="O $A", special_tokens=[("O", inner.token_to_id("O"))]
    )
    begins = Tokenizer.from_json(inner.to_str())
    monkeypatch.setattr("rehead.study.attention_maps.load_tokenizer", lambda place: begins)
    assert maps(given)["Two heads"].tokens == ["O", *plain][:16]


def test_a_seed_more_trains_only_that_one(whole, here):
    shutil.copytree(whole, "more")
    before = stamps(here / "more")
    flags = ["system.work_dir=more", "system.seed=[3,4,5]"]
    assert main([*TINY, *flags]) == 0
    after = stamps(here / "more")
    assert {file: after[file] for file in before if file.name != "costs.json"} == {
        file: stamp for file, stamp in before.items() if file.name != "costs.json"
    }
    assert sum("seed-5" in str(file) for file in after) == 5 + 4
    shutil.rmtree("more")


def test_a_model_that_was_removed_is_made_again(whole, here):
    """Its results alone would be shown, with a folder that is not there."""
    shutil.copytree(whole, "lacking")
    shutil.rmtree("lacking/latent/seed-3/model")
    words = [*TINY, "system.work_dir=lacking"]
    assert main(words) == 0
    assert losses(here / "lacking") == losses(whole)
    assert Path("lacking/latent/seed-3/model/model.safetensors").exists()
    shutil.rmtree("lacking")


CHANGED = [
    ("trainer.max_iters=9", "other/two-heads/seed-3 was made with trainer.max_iters=4 (now 9)"),
    ("trainer.max_iters=3", "other/two-heads/seed-3 was made with trainer.max_iters=4 (now 3)"),
    ("trainer.learning_rate=1e-3", "trainer.learning_rate=0.0005 (now 0.001)"),
    ("data.block_size=12", "data.block_size=16 (now 12)"),
]


@pytest.mark.filterwarnings("ignore:.*takes the place of what")
def test_a_changed_option_is_refused_before_anything_is_trained(whole, here, capsys):
    """Otherwise the first variant would be trained on, the next refused, and the study as it was lost."""
    shutil.copytree(whole, "other")
    Path("other/two-heads/seed-3/measured.json").unlink()  # and a part of it is not done
    before = stamps(here / "other")
    for flag, said in CHANGED:
        assert main([*TINY, "system.work_dir=other", flag]) == 3
        error = capsys.readouterr().err
        assert said in error
        assert "choose another system.work_dir" in error
        assert stamps(here / "other") == before
    config = Path("other/two-heads/seed-3/config.yaml")  # of a run that was continued by hand
    text = config.read_text()
    for was, now, said in (
        ("learning_rate: 0.0005", "learning_rate: 0.0001", "trainer.learning_rate=0.0001 (now 0.0005)"),
        ("max_iters: 4", "max_iters: 8", "trainer.max_iters=8 (now 4)"),
    ):
        assert was in text
        config.write_text(text.replace(was, now))
        assert main([*TINY, "system.work_dir=other"]) == 3
        assert f"other/two-heads/seed-3 was made with {said}. Nothing" in capsys.readouterr().err
    config.write_text(text)
    assert main([*TINY, "system.work_dir=other"]) == 0
    assert losses(here / "other") == losses(whole)
    shutil.rmtree("other/two-heads/seed-3")
    shutil.copytree("other/two-heads/seed-4", "other/two-heads/seed-3")
    assert main([*TINY, "system.work_dir=other"]) == 3
    assert "system.seed=4 (now 3)" in capsys.readouterr().err
    shutil.rmtree("other")


@pytest.mark.filterwarnings("ignore:.*takes the place of what")
def test_a_study_does_not_go_into_somebodys_run(whole, here, capsys):
    shutil.copytree(whole / "one-head/seed-3", "mine")
    Path("mine/job.json").unlink()
    assert main([*TINY, "system.work_dir=mine"]) == 3
    assert "mine is a run of rehead train" in capsys.readouterr().err
    Path("there/one-head").mkdir(parents=True)
    Path("mine").rename("there/one-head/seed-3")  # trained by hand, with the command the report shows
    assert main([*TINY, "system.work_dir=there", "trainer.max_iters=8"]) == 3
    assert "there/one-head/seed-3 was made with trainer.max_iters=4 (now 8)" in capsys.readouterr().err
    assert not Path("there/two-heads").exists()
    shutil.rmtree("there")


def killed_when(file, lines, words):
    """Run `words` in a process of its own, SIGKILL it once `file` has that many lines; whether it was."""
    child = os.fork()
    if not child:
        os.closerange(1, 3)
        try:
            os._exit(main(words))
        finally:  # never back into pytest
            os._exit(70)
    try:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if file.exists() and len(file.read_bytes().splitlines()) >= lines:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return True
            time.sleep(0.002)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    return False


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_anywhere_it_finishes_the_rest_and_repeats_nothing(whole, here):
    words = [*TINY, "system.work_dir=killed"]
    places = [
        ("two-heads/seed-3/metrics.jsonl", 3),
        ("one-head/seed-3/metrics.jsonl", 1),
        ("longer/seed-3/job.json", 1),
        ("latent/seed-3/job.json", 1),
        ("healed/seed-3/metrics.jsonl", 2),
        ("longer/seed-4/metrics.jsonl", 4),
        ("costs.json", 1),
    ]
    done = {}
    for name, lines in places:
        assert killed_when(Path("killed") / name, lines, words), f"{name} was not seen"
        now = {file: file.stat().st_mtime_ns for file in Path("killed").rglob("measured.json")}
        assert {file: now[file] for file in done} == done
        done = now
    assert main(words) == 0
    assert losses(Path("killed")) == losses(whole)
    for file in Path("killed").rglob("metrics.jsonl"):
        steps = [json.loads(line).get("step") for line in file.read_text().splitlines() if '"loss"' in line]
        assert steps == list(range(1, len(steps) + 1)), file
    shutil.rmtree("killed")


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_fifty_times_at_any_moment_it_loses_nothing(whole, here):
    words, draw, ended = [*TINY, "system.work_dir=killed"], random.Random(1), 0
    for _ in range(50):
        child = os.fork()
        if not child:
            os.closerange(1, 3)
            try:
                os._exit(main(words))
            finally:  # never back into pytest
                os._exit(70)
        time.sleep(draw.uniform(0.05, 1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for checkpoints in Path("killed").rglob("checkpoints"):
            if find.steps(checkpoints.parent):
                with warnings.catch_warnings(action="error"):
                    assert checkpoint.newest_step(checkpoints.parent) is not None
        if Path("killed/report.html").exists():
            ended += 1
            assert losses(Path("killed")) == losses(whole)
            shutil.rmtree("killed")
    assert main(words) == 0
    assert losses(Path("killed")) == losses(whole)
    assert not list(Path("killed").rglob(".tmp-*"))
    shutil.rmtree("killed")
    assert ended < 25, "hardly a kill came inside"


@contextmanager
def group(command):
    """A command and all processes it begins, of which none outlives the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def held(lock):
    """Whether a process still trains in the folder of this lock."""
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


MASK = """
import multiprocessing, signal
from rehead.system.workers import interrupt_held

def tell(place):
    with open(place, "w") as file:
        file.write(str(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=tell, args=("held",))
    with interrupt_held():
        process.start()
    process.join()
"""


@pytest.mark.process
def test_the_first_of_several_never_sees_an_interrupt_either(tmp_path):
    (tmp_path / "mask.py").write_text(MASK)
    subprocess.run([sys.executable, "mask.py"], cwd=tmp_path, check=True)
    assert (tmp_path / "held").read_text() == "True"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_at_once_and_killed(whole, here):
    """SIGKILL of the parent takes its processes along; the rest is done by the next; SIGINT saves."""
    command = [sys.executable, "-m", "rehead", *TINY, "--jobs", "2", "system.work_dir=both"]
    with group(command) as running:
        while not list(Path("both").rglob("metrics.jsonl")):
            assert running.poll() is None
            time.sleep(0.05)
        running.kill()
        running.wait()
        while any(held(lock) for lock in Path("both").rglob(".lock")):
            time.sleep(0.05)
    before = set(Path("both").rglob("measured.json"))
    with group(command) as running:
        while set(Path("both").rglob("measured.json")) == before:
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the processes that just start, too
        said = running.communicate()[1]
    assert running.returncode == 130, said
    assert "repeat the command to resume" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert losses(Path("both")) == losses(whole)
    shutil.rmtree("both")


def test_a_folder_is_one_study_s_at_a_time(here, capsys):
    """The second one does nothing, not even look at its text."""
    with hold(Path("taken"), lambda: False, "system.work_dir"):
        assert main([*TINY, "system.work_dir=taken", "data.path=nowhere.txt"]) == 6
        assert [file.name for file in Path("taken").iterdir()] == [".lock"]
    assert f"taken is being written by pid {os.getpid()} on" in capsys.readouterr().err
    assert not Path("taken").exists()


def test_a_folder_that_cannot_be_made_says_why(here, capsys, monkeypatch):
    Path("ro").mkdir()
    made = Path.mkdir

    def mkdir(path, *given, **more):
        if path.parent.name == "ro":
            raise PermissionError(13, "Permission denied", str(path))
        made(path, *given, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert main([*TINY, "system.work_dir=ro/there"]) == 5
    said = capsys.readouterr().err
    assert said.startswith("rehead: cannot write in ro/there ([Errno 13] Permission denied: ")
    assert said.endswith("choose another system.work_dir.\n")
    assert not list(Path("ro").iterdir())


@pytest.mark.parametrize("bos", [None, 7])
def test_a_context_shorter_than_the_beginning_of_a_text_is_sampled_from(bos):
    """Without a prompt, 8 tokens are continued: as many as the model reads, with the one before them."""
    model = build(ModelOptions(n_layer=1, n_query_head=2, n_embd=8).resolve(26, 4))
    tokenizer, ids = train("char", "".join(map(chr, range(97, 123)))), np.arange(20)
    preset = Preset.of("p", {"about": "x", "variants": {"a": {}}, "new_tokens": 1})
    text = work._sample(model, tokenizer, preset, Split(ids, ids), bos)
    assert text[:-1] == ("abcd" if bos is None else "abc")


@pytest.mark.parametrize("steps", [0, 1])
def test_no_step_and_one_step_give_a_report(here, steps):
    common = Path("tiny.yaml").read_text().partition("variants:")[0]
    Path("few.yaml").write_text(common + "variants: {Two heads: {}, One head: {model: {n_kv_head: 1}}}")
    flags = ["system.seed=1", f"trainer.max_iters={steps}", f"system.work_dir=few{steps}"]
    assert main(["study", "--preset", "few.yaml", *flags]) == 0
    curve = results(Path(f"few{steps}"))["variants"][0]["runs"][0]["curve"]
    assert [point[0] for point in curve] == list(range(steps + 1))
    assert "<h1>" in Path(f"few{steps}/report.html").read_text()


def test_a_torn_line_is_left_out_and_counted(tmp_path):
    lines = [
        {"event": "start", "step": 0},
        {"step": 0, "train_loss": 3.5, "val_loss": 3.0},
        {"step": 1, "loss": 2.5, "seconds": 0.5},
        {"step": 2, "loss": 2.5, "seconds": 0.7},
        {"step": 2, "train_loss": 2.5, "val_loss": 2.0},
        {"event": "end", "step": 2, "train_loss": 2.5, "val_loss": 2.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    found = read_metrics(file)
    assert (found.losses, found.torn) == ([(0, 3.5, 3.0), (2, 2.5, 2.0)], 1)
    assert found.seconds_per_step == pytest.approx(0.6)
    assert read_metrics(tmp_path / "nowhere").losses == []
    file.write_text('{"step": 1, "seconds": "long"}\n')
    with pytest.raises(InvalidInput, match=r"metrics\.jsonl: line 1 "):
        read_metrics(file)


@pytest.mark.slow
def test_a_million_steps_are_thinned(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as out:
        out.writelines(
            f'{{"step": {step}, "train_loss": 1.0, "val_loss": {step}}}\n' for step in range(1_000_001)
        )
    found = read_metrics(file).losses
    steps = [step for step, _, _ in found]
    assert (len(steps), steps[0], steps[-1]) == (MOST_POINTS, 0, 1_000_000)
    assert max(later - step for step, later in pairwise(steps)) <= 1002
    assert downsample([1, 2, 3], 3) == [1, 2, 3]
    assert downsample([1, 2, 3, 4], 2) == [1, 4]


@pytest.mark.parametrize(
    ("base", "other", "apart"),
    [
        ([1.0, 1.1], [1.5, 1.6], True),
        ([1.5, 1.6], [1.0, 1.1], True),
        ([1.0, 1.1], [1.2, 1.3], False),  # equal ones do not overlap once in three times
        ([1.0, 1.1, 1.05], [1.2, 1.3, 1.25], True),
        ([1.0, 1.2], [1.1, 1.3], False),
        ([1.0, 1.3], [1.1, 1.2], False),
        ([1.0], [2.0], False),
        ([1.0, 1.1], [2.0], False),
        ([1.0, 1.1], [1.1, 1.2], False),
    ],
)
def test_a_difference_is_claimed_that_seeds_rarely_make(base, other, apart):
    assert compare(base, other, min(len(base), len(other)))["told_apart"] is apart


@pytest.mark.process
def test_a_prompt_of_other_letters_is_the_texts_beginning_and_said_so(here):
    """As typed: not an error after an hour of training, but one line on stderr and on the page, with the letters."""
    variants = "variants: {A: {}, B: {}}\nprompt: O 漢字 漢\nnew_tokens: 5\n"
    Path("other.yaml").write_text(Path("tiny.yaml").read_text().partition("variants:")[0] + variants)
    words = ["study", "--preset", "other.yaml", "system.seed=1", "trainer.max_iters=1", "system.work_dir=o"]
    note = (
        "the prompt 'O 漢字 漢' has '漢', '字', which the vocabulary lacks: samples continue the validation text"
        " instead"
    )
    text = Path("input.txt").read_text()
    begin = text[int(0.9 * len(text)) :][:8]
    [(code, out, err)] = typed([*words, "--json"])
    assert code == 0
    assert err.splitlines().count(f"rehead: warning: {note}") == 1, err
    document = json.loads(out)
    assert document["prompt_note"] == note
    assert all(one["runs"][0]["sample"].startswith(begin) for one in document["variants"])
    page = Path("o/report.html").read_text()
    assert html.unescape(page).count(note) == 1
    assert "Each continues the prompt or, as noted below, its validation text" in page


@pytest.mark.parametrize(
    ("unknown", "named"),
    [
        ({"A": [], "B": []}, None),
        ({"A": ["ä"], "B": []}, "'ä', which the vocabulary lacks: samples of A continue"),
        ({"A": ["ä", "ö"], "B": ["ö", "ü"]}, "'ä', 'ö', 'ü', which the vocabulary lacks: samples continue"),
        ({"A": [chr(n) for n in range(12 * 16, 12 * 16 + 12)]}, "'É' and 2 more characters, which"),
    ],
)
def test_a_note_names_letters_and_variants(unknown, named):
    note = prompt_note("O", unknown)
    assert note is None if named is None else named in note


def test_csv_has_a_row_per_run_and_per_evaluation(whole):
    rows = list(csv.DictReader((whole / "runs.csv").read_text().splitlines()))
    assert len(rows) == 10
    found = results(whole)["variants"]
    assert float(rows[0]["val_loss"]) == found[0]["runs"][0]["val_loss"]
    assert {row["peak"] for row in rows if row["variant"] == "Latent"} == {""}
    curves = list(csv.DictReader((whole / "curves.csv").read_text().splitlines()))
    assert len(curves) == sum(len(run["curve"]) for one in found for run in one["runs"])


@pytest.mark.parametrize(
    ("windows", "n_token"), [([None], 24), ([], 24), ([8], 24), ([32, None], 48), ([32, 4000], 96)]
)
def test_maps_are_longer_than_a_window(windows, n_token):
    from rehead.study.attention_maps import n_token as shown

    assert shown(windows) == n_token
