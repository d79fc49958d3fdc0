"""Ctrl-C and SIGTERM while a command is starting, as a user sends them: to a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
]  # each begins processes, on a machine that may be busy
SCRIPT = [str(Path(sys.executable).parent / "rehead")]
MODULE = ["-m", "rehead"]
BACKGROUND = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
"""How a shell script starts a job with &: it ignores SIGINT."""


def stopped(program, words, instant, number=signal.SIGINT, before=()):
    """Exit status, stdout and stderr of a command that got a signal when the import of `instant` had ended."""
    command = [*before, sys.executable, "-X", "importtime", *program, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe, said = subprocess.PIPE, []
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        for line in process.stderr:
            if not line.startswith("import time:"):
                said.append(line)
            elif line.rpartition("|")[2].strip() == instant:
                process.send_signal(number)
        out = process.stdout.read()
    return process.returncode, out, "".join(said)


@pytest.mark.parametrize("instant", ["cyclopts.token", "numpy._core._multiarray_umath", "torch.nn.modules"])
def test_ctrl_c_while_a_command_starts_is_one_word(instant, tmp_path):
    words = ["eval", str(tmp_path), "--data", str(tmp_path)]
    assert stopped(SCRIPT, words, instant) == (130, "", "interrupted\n")


def test_sigterm_too_and_as_a_module_and_in_the_background(tmp_path):
    words = ["train", f"system.work_dir={tmp_path}/run"]
    assert stopped(MODULE, words, "numpy", signal.SIGTERM) == (143, "", "terminated\n")
    assert stopped(SCRIPT, words, "torch.nn.modules", before=BACKGROUND) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())


CLEANING = """
import time
from rehead.cli.interrupt import answer_signals

answer_signals()
try:
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    time.sleep(2.5)
    print("cleaned up")
"""


def test_a_command_that_has_answered_takes_its_time_to_clean_up():
    """1.5 s are for a call of C++ that keeps the handler from running."""
    command = [sys.executable, "-c", CLEANING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("cleaned up\n", "")


BLOCKED = """
import _thread, hashlib, os, sys
from rehead.cli.interrupt import answer_signals

answer_signals()
sys.setswitchinterval(1000)  # "begun" is written once the call has let go of the interpreter, not before
_thread.start_new_thread(os.write, (1, b"begun\\n"))
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)
"""


def test_ctrl_c_ends_a_command_whose_stderr_nobody_reads():
    """Also in a call of C, which keeps the handler from running."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
            os.close(writer)
