"""A study on a cluster, whose Slurm is that of standin.py: submitted, killed, left alone, and gone on with."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from rehead.cli import main

pytest.importorskip("submitit")

TINY = ["study", "--preset", "tiny.yaml", "system.seed=3"]
SLURM = ["--launcher", "slurm", "--slurm", "partition=gpu", "--slurm", "time=4:00:00"]
NAMES = ["two-heads/seed-3", "one-head/seed-3", "longer/seed-3", "latent/seed-3", "healed/seed-3", "report"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder of the jobs of a cluster, whose commands are on the PATH."""
    for name in ("sbatch", "srun", "squeue", "scancel"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!{sys.executable} -SE\n{Path(__file__).with_name('standin.py').read_text()}")
        command.chmod(0o755)
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN", str(tmp_path / "jobs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path / "jobs"
    for file in (tmp_path / "jobs").iterdir():
        if file.name.isdigit():
            subprocess.run(["scancel", "--signal=KILL", file.name], check=True)


def printed(capsys, *more):
    assert main([*TINY, *SLURM, "--dry-run", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["scripts"]


def ids(place):
    return {name: job["id"] for name, job in json.loads((place / "slurm/jobs.json").read_text()).items()}


def jobs(cluster):
    """Every job that was submitted, and its state."""
    return {int(file.name): file.read_text() for file in cluster.iterdir() if file.name.isdigit()}


def document(place):
    """The results without times and folders."""

    def timeless(value):
        if isinstance(value, dict):
            return {key: timeless(one) for key, one in value.items() if "second" not in key}
        return [timeless(one) for one in value] if isinstance(value, list) else value

    return timeless(json.loads((place / "results.json").read_text().replace(place.name, "PLACE")))


def test_a_dry_run_prints_every_script_and_writes_nothing(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # also where Slurm is not
    scripts = printed(capsys, "system.work_dir=dry")
    assert list(scripts) == NAMES
    assert not Path("dry").exists()
    for name, script in scripts.items():
        lines = script.splitlines()
        assert lines[0] == "#!/bin/bash"
        assert {"#SBATCH --partition=gpu", "#SBATCH --time=4:00:00", "#SBATCH --nodes=1"} <= set(lines)
        assert f"#SBATCH --job-name={name}" in lines
        assert f"#SBATCH --output={Path('dry/slurm').resolve()}/%j_0_log.out" in lines
        (command,) = [line for line in lines if line.startswith("srun ")]
        assert f"{sys.executable} -m rehead study --preset tiny.yaml system.seed=3" in command
        assert command.endswith("" if name == "report" else f" --only {name}")
    assert {name: "#SBATCH --dependency=" in script for name, script in scripts.items()} == {
        name: name not in NAMES[:2] for name in NAMES
    }
    assert "--dependency=afterok:latent/seed-3\n" in scripts["healed/seed-3"]
    assert f"--dependency=afterok:{':'.join(NAMES[:-1])}\n" in scripts["report"]
    assert main([*TINY, *SLURM, "--dry-run", "system.work_dir=dry"]) == 0
    assert capsys.readouterr().out == "\n".join(scripts.values()) + "\n"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--slurm", "partitoin=gpu"], 2, "partitoin=gpu: unknown, or set by rehead. Did you mean 'partition'?"),
        (["--slurm", "nodes=2"], 2, "--slurm nodes=2: unknown, or set by rehead."),
        (["--slurm", "mem"], 2, "--slurm mem: expected a value, as in mem=VALUE."),
        (["--jobs", "2"], 2, "--jobs is for --launcher local"),
        (["--only", "one-head/seed-3"], 2, "--only is for --launcher local"),
        (["data.path=gone.txt"], 3, "no text at 'gone.txt'"),
        ([], 5, "there is no sbatch here"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(here, capsys, monkeypatch, words, status, said):
    if status == 3:
        monkeypatch.setattr(shutil, "which", lambda name: name)
    else:
        monkeypatch.setenv("PATH", "")
    assert main([*TINY, *SLURM, "system.work_dir=refused", *words]) == status
    assert said in capsys.readouterr().err
    assert not Path("refused").exists()


@pytest.mark.parametrize("option", ["--slurm=time=5", "--dry-run"])
def test_batch_jobs_need_slurm(here, capsys, option):
    assert main([*TINY, option]) == 2
    assert f"{option[:7]}" in (said := capsys.readouterr().err)
    assert "describes batch jobs: add --launcher slurm." in said


def test_without_submitit_the_way_to_it_is_said(here, capsys, monkeypatch):
    monkeypatch.setattr(
        "rehead.cli.training.find_spec", lambda name: None if name == "submitit" else find_spec(name)
    )
    assert main([*TINY, *SLURM]) == 2
    assert (
        capsys.readouterr().err == 'rehead: --launcher slurm needs submitit: pip install "rehead[slurm]".\n'
    )


@pytest.mark.process
def test_a_printed_script_makes_its_run(here, cluster, capsys):
    scripts = printed(capsys, "system.work_dir=printed")
    Path("printed/slurm").mkdir(parents=True)
    Path("one.sh").write_text(scripts["two-heads/seed-3"])
    said = subprocess.run(["sbatch", "one.sh"], check=True, capture_output=True, text=True).stdout
    assert said == "Submitted batch job 101\n"
    while jobs(cluster)[101] in ("PENDING", "RUNNING"):
        time.sleep(0.1)
    assert jobs(cluster) == {101: "COMPLETED"}, Path("printed/slurm/101_0_log.err").read_text()
    assert Path("printed/slurm/101_0_log.out").read_text() == "done: printed/two-heads/seed-3\n"
    found = json.loads(Path("printed/two-heads/seed-3/measured.json").read_text())
    assert main([*TINY, "system.work_dir=by-itself", "--only", "two-heads/seed-3", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert [found[key] for key in ("val_loss", "curve")] == [alone[key] for key in ("val_loss", "curve")]
    assert sorted(entry.name for entry in Path("by-itself").iterdir()) == ["two-heads"]
    assert main([*TINY, "system.work_dir=by-itself", "--only", "healed/seed-3"]) == 2
    assert "starts from latent/seed-3, which is not finished" in capsys.readouterr().err
    assert main([*TINY, "system.work_dir=by-itself", "--only", "healed/seed-4"]) == 2
    assert "Did you mean 'healed/seed-3'?" in capsys.readouterr().err
    shutil.rmtree("printed")
    shutil.rmtree("by-itself")


def test_a_run_in_the_queue_is_not_submitted_again(here, cluster, capsys, monkeypatch):
    """Ctrl-C leaves the jobs; only those that ended without a result are submitted again, and those after them."""
    monkeypatch.setenv("STANDIN_HELD", "1")
    monkeypatch.setenv("STANDIN_INTERRUPT", "3")
    words = [*TINY, *SLURM, "system.work_dir=queued"]
    assert main(words) == 130
    said = capsys.readouterr().err
    assert (
        "and 6 jobs go on: repeat the command to wait for them again, or end them with scancel 101 102"
        in said
    )
    assert ids(Path("queued")) == dict(zip(NAMES, map(str, range(101, 107)), strict=True))
    assert set(jobs(cluster).values()) == {"PENDING"}
    monkeypatch.setenv("STANDIN_INTERRUPT", "5")
    assert main(words) == 130
    assert len(jobs(cluster)) == 6
    (cluster / ids(Path("queued"))["latent/seed-3"]).write_text("FAILED")
    monkeypatch.setenv("STANDIN_INTERRUPT", "7")
    assert main(words) == 130
    states = jobs(cluster)
    again = {"latent/seed-3": 107, "healed/seed-3": 108, "report": 109}
    assert {name: int(number) for name, number in ids(Path("queued")).items()} == {
        **dict(zip(NAMES, range(101, 107), strict=True)),
        **again,
    }
    assert [states[number] for number in range(101, 110)] == [
        "PENDING", "PENDING", "PENDING", "FAILED", "CANCELLED", "CANCELLED", "PENDING", "PENDING", "PENDING",
    ]  # fmt: skip
    monkeypatch.setenv("STANDIN_INTERRUPT", "9")
    assert main([*words, "trainer.batch_size=5"]) == 130  # another study, of which nothing has begun
    assert sorted(number for number, now in jobs(cluster).items() if now == "PENDING") == [*range(110, 116)]
    shutil.rmtree("queued")


def test_a_squeue_that_fails_once_is_asked_again(here, cluster, capsys, monkeypatch):
    monkeypatch.setenv("STANDIN_HELD", "1")
    monkeypatch.setenv("STANDIN_INTERRUPT", "3")
    monkeypatch.setenv("STANDIN_DEAF", "2")
    assert main([*TINY, *SLURM, "system.work_dir=deaf"]) == 130
    assert "--format=%A: Socket timed out; asking again" in (said := capsys.readouterr().err)
    assert "and 6 jobs go on" in said
    shutil.rmtree("deaf")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_on_a_cluster_is_that_of_one_machine(here, cluster, capsys, monkeypatch):
    """One job killed, then the waiting interrupted: each call makes what is missing, and nothing twice."""
    assert main([*TINY, "system.work_dir=mine"]) == 0
    words = [sys.executable, "-m", "rehead", *TINY, *SLURM, "system.work_dir=theirs"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as waiting:
        while jobs(cluster).get(104) != "RUNNING":
            assert waiting.poll() is None, waiting.communicate()[1]
            time.sleep(0.02)
        subprocess.run(["scancel", "--signal=KILL", "104"], check=True)
        said = waiting.communicate()[1]
    assert waiting.returncode == 5, said
    assert "2 of 6 jobs ended without a result, first latent/seed-3 (job 104)" in said.splitlines()[-1]
    done = ["COMPLETED"] * 3 + ["CANCELLED"] * 3
    assert jobs(cluster) == dict(zip(range(101, 107), done, strict=True))
    before = {file: file.stat().st_mtime_ns for file in Path("theirs").rglob("measured.json")}
    assert len(before) == 3
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as waiting:
        while jobs(cluster).get(107) != "RUNNING":
            assert waiting.poll() is None, waiting.communicate()[1]
            time.sleep(0.02)
        waiting.send_signal(signal.SIGINT)
        said = waiting.communicate()[1]
    assert waiting.returncode == 130, said
    assert "and 3 jobs go on: repeat the command to wait for them again" in said.splitlines()[-1]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert list(jobs(cluster).values()).count("COMPLETED") == 6
    assert len(jobs(cluster)) == 9
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert document(Path("theirs")) == document(Path("mine"))
    files, others = ({entry.name for entry in Path(place).iterdir()} for place in ("mine", "theirs"))
    assert others == files | {"slurm"}
    capsys.readouterr()
    monkeypatch.setenv("STANDIN_HELD", "1")  # nothing is left to submit
    assert main([*TINY, *SLURM, "system.work_dir=theirs"]) == 0
    assert len(jobs(cluster)) == 9
    shutil.rmtree("theirs")
    shutil.rmtree("mine")
