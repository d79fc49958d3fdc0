"""Engines as a user runs them: each in a process of its own, and in an environment of its own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

HERE = Path(__file__).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
START = 600
"""Seconds that an engine may take to start."""


@pytest.fixture(autouse=True)
def _as_users_have_it():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def engines_python():
    """The Python of the engine's environment, which is made if `make serving-env` has not."""
    made = subprocess.run([sys.executable, HERE / "environment.py"], stdout=PIPE, text=True, check=True)
    return made.stdout.strip()


@pytest.fixture(scope="session")
def vllm(engines_python, tmp_path_factory):
    """What vLLM generates after lists of ids from a folder: `vllm(folder, prompts, ...)` gives its answer."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [engines_python, HERE / "vllm_engine.py"]
    # it would compile the counting of log-probabilities, for which a machine needs a C++ compiler
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    with running(command, log, talks=True, **here) as engine:

        def ask(
            folder,
            prompts,
            max_tokens=24,
            dtype="float32",
            implementation="vllm",
            custom_ops=("-rotary_embedding",),
        ):
            job = {"folder": str(folder), "prompts": prompts, "max_tokens": max_tokens, "dtype": dtype}
            job |= {"implementation": implementation, "custom_ops": list(custom_ops)}
            print(json.dumps(job), file=engine.stdin, flush=True)
            answer = engine.stdout.readline()
            assert answer, f"vLLM died of {folder}:\n{log.read_text()[-3000:]}"
            return json.loads(answer)

        yield ask


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory):
    """What llama.cpp makes of a GGUF file: `llama_cpp(file, prompts=..., texts=...)` gives its answer.

    Each file is loaded by a process of its own; None if that died, or said nothing for `patience` seconds.
    """
    command = [sys.executable, HERE / "environment.py", "llama-cpp"]
    python = subprocess.run(command, stdout=PIPE, text=True, check=True).stdout.strip()

    def ask(file, patience=100, **job):
        log = tmp_path_factory.mktemp("llama.cpp") / "log"
        with open(log, "w") as errors, suppress(subprocess.SubprocessError):
            command = [python, HERE / "llama_cpp_engine.py"]
            text = json.dumps({"file": str(file), **job})
            done = subprocess.run(
                command, input=text, stdout=PIPE, stderr=errors, text=True, timeout=patience, check=True
            )
            return json.loads(done.stdout)
        return None

    return ask


@pytest.fixture(scope="session")
def mlx_python():
    """The Python of mlx-lm's environment, which is made if `make mlx-env` has not."""
    command = [sys.executable, HERE / "environment.py", "mlx"]
    return Path(subprocess.run(command, stdout=PIPE, text=True, check=True).stdout.strip())


@pytest.fixture(scope="session")
def mlx(mlx_python, tmp_path_factory):
    """What mlx-lm makes of a folder: `mlx(folder, prompts, ...)` gives its answer, {"error"} if that fails."""
    log = tmp_path_factory.mktemp("mlx") / "log"
    with running([mlx_python, HERE / "mlx_engine.py"], log, talks=True) as engine:

        def ask(folder, prompts, **job):
            print(
                json.dumps({"folder": str(folder), "prompts": prompts, **job}), file=engine.stdin, flush=True
            )
            answer = engine.stdout.readline()
            assert answer, f"mlx-lm died of {folder}:\n{log.read_text()[-3000:]}"
            return json.loads(answer)

        yield ask


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """A server on a free port of this machine: `with serve(command) as url`, ready to answer."""

    @contextmanager
    def server(*command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = tmp_path_factory.mktemp("server") / "log"
        address = f"http://127.0.0.1:{port}"
        with running([*command, "--host", "127.0.0.1", "--port", str(port)], log) as process:
            end = time.monotonic() + START
            while not answers(f"{address}/health"):
                late = process.poll() is not None or time.monotonic() > end
                assert not late, f"{command} did not start:\n{log.read_text()[-3000:]}"
                time.sleep(0.5)
            yield f"{address}/v1"

    return server


@contextmanager
def running(command, log, talks=False, **environment):
    """A process that may talk by lines, offline, and ends with the block; what it logs is in a file."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ours |= OFFLINE | ON_A_CPU | environment
    with (
        open(log, "w") as file,
        subprocess.Popen(
            list(map(str, command)),
            stdin=PIPE,
            stdout=PIPE if talks else file,
            stderr=file,
            text=True,
            env=ours,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(address):
    """Whether a server is ready."""
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False
