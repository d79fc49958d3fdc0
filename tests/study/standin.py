"""sbatch, srun, squeue and scancel for tests: batch jobs are processes of this machine, in the folder $STANDIN.

Linked under each of the four names. A job is a file of its state, named by its id. With $STANDIN_HELD, jobs stay
in the queue. With $STANDIN_INTERRUPT=N, the Nth squeue sends SIGINT to the process that asks; with $STANDIN_DEAF=N
it fails.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PLACE = Path(os.environ["STANDIN"])
QUEUED = ("PENDING", "RUNNING")


def state(number, new=None):
    file = PLACE / str(number)
    if new is not None:
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(new)
        aside.replace(file)
    return file.read_text()


def options(script):
    """Return what the script asks for; a line that sbatch would not read ends them."""
    found = {}
    for line in script.read_text().splitlines()[1:]:
        if match := re.fullmatch(r"#SBATCH --([a-z-]+)=(.*)", line):
            found[match[1]] = match[2].strip("'")
        elif line and not line.startswith("#"):
            break
    return found


def sbatch(arguments):
    script = Path(arguments[-1])
    asked = options(script)
    number = 101
    while True:
        try:
            (PLACE / str(number)).open("x").close()
            break
        except FileExistsError:
            number += 1
    state(number, "PENDING")
    copy = PLACE / f"{number}.sh"  # as Slurm does: the file may change later
    copy.write_bytes(script.read_bytes())
    if os.fork() == 0:
        os.setsid()
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        run(number, copy, asked)
        os._exit(0)
    print(number if "--parsable" in arguments else f"Submitted batch job {number}")


def run(number, script, asked):
    before = re.sub("^afterok:", "", asked.get("dependency", "")).split(":")
    before = [name for name in before if name]
    while os.environ.get("STANDIN_HELD") or any(state(name) in QUEUED for name in before):
        if state(number) != "PENDING":
            return
        time.sleep(0.05)
    if any(state(name) != "COMPLETED" for name in before):
        assert asked["kill-on-invalid-dep"] == "yes", "it would wait for ever"
        state(number, "CANCELLED")
        return
    state(number, "RUNNING")
    with (
        open(asked["output"].replace("%j", str(number)), "ab") as out,
        open(asked["error"].replace("%j", str(number)), "ab") as err,
    ):
        job = subprocess.Popen(
            ["bash", script], stdout=out, stderr=err, env=os.environ | {"SLURM_JOB_ID": str(number)}
        )
        (PLACE / f"{number}.pid").write_text(str(job.pid))
        status = job.wait()
    if state(number) == "RUNNING":
        state(number, "FAILED" if status else "COMPLETED")


def srun(arguments):
    words, streams = list(arguments), {}
    while words[0].startswith("--"):
        word = words.pop(0)
        if word in ("--output", "--error"):
            streams[word] = words.pop(0).replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
    for name, number in (("--output", 1), ("--error", 2)):
        os.dup2(os.open(streams[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.execvp(words[0], words)


def squeue(arguments):
    assert arguments == ["--me", "--noheader", "--format=%A"]
    calls = PLACE / "calls"
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size == int(os.environ.get("STANDIN_DEAF", 0)):
        sys.exit("Socket timed out")
    if calls.stat().st_size == int(os.environ.get("STANDIN_INTERRUPT", 0)):
        os.kill(os.getppid(), signal.SIGINT)
    for file in PLACE.iterdir():
        if file.name.isdigit() and state(file.name) in QUEUED:
            print(file.name)


def scancel(arguments):
    number = arguments[-1]
    if state(number) not in QUEUED:
        return
    state(number, "CANCELLED")
    if (PLACE / f"{number}.pid").exists():
        group = os.getpgid(int((PLACE / f"{number}.pid").read_text()))
        os.killpg(group, signal.SIGKILL if "--signal=KILL" in arguments else signal.SIGTERM)


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](sys.argv[1:])
