"""What is said of compiled C++ as typed: on stderr, above the text, and only to those who read it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rehead.cli import main
from rehead.native.build import COMPILERS

REHEAD = Path(sys.executable).with_name("rehead")
PROMPT = "O God"
MISSING = "rehead: no C++ compiler (c++, g++, clang++): PyTorch computes instead, slower. Install g++."
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("native")
    torch.set_default_dtype(torch.float32)
    (place / "text.txt").write_text("O God, O God! How weary, stale, flat\n" * 20)
    flags = ["model.n_layer=1", "model.n_embd=12", "trainer.max_iters=0", "data.block_size=16"]
    assert main(["train", f"data.path={place / 'text.txt'}", f"system.work_dir={place / 'run'}", *flags]) == 0
    return place


def typed(folder, *options, path=None, **variables):
    """`rehead generate` in a home where nothing was built; its stderr and stdout go to one place, in order."""
    home = str(folder / f"home{len(list(folder.iterdir()))}")
    environment = os.environ | {"HOME": home, "XDG_CACHE_HOME": ""} | variables
    Path(environment["HOME"]).mkdir()
    if path is not None:
        environment["PATH"] = path
    words = [
        REHEAD,
        "generate",
        "run",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "20",
        "--temperature",
        "0",
        *options,
    ]
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout, Path(environment["HOME"])


@needs_compiler
@pytest.mark.process
def test_what_is_said_of_compiled_code_stands_above_the_text(folder):
    silent, home = typed(folder, REHEAD_NATIVE="0")
    assert silent.startswith(PROMPT)  # and PyTorch wrote it: nothing was built
    assert not list(home.rglob("*.so"))

    built, home = typed(folder)
    first, second, text = built.split("\n", 2)
    assert first == "rehead: building sequence.cpp for this machine, once ..."
    assert second == "rehead: building decode.cpp for this machine, once ..."
    assert text == silent
    assert len(list(home.rglob("*.so"))) == 2

    slower, home = typed(folder, path=str(folder))
    assert slower == f"{MISSING}\n{silent}"

    document, home = typed(folder, "--json", path=str(folder))
    assert json.loads(document)["results"][0]["completion"] == silent.removeprefix(PROMPT)[:-1]


@needs_compiler
@pytest.mark.process
def test_a_home_that_holds_nothing_says_so(folder):
    environment = os.environ | {"HOME": str(folder / "text.txt"), "XDG_CACHE_HOME": ""}
    words = [REHEAD, "generate", "run", "--prompt", PROMPT, "--max-new-tokens", "1"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "Not a directory" in line
    assert line.endswith("your own and writable, or set XDG_CACHE_HOME.")


def test_the_switch_knows_three_values(monkeypatch, capfd):
    monkeypatch.setenv("REHEAD_NATIVE", "off")
    assert main(["env"]) == 2
    said = capfd.readouterr().err
    assert said == (
        "rehead: REHEAD_NATIVE=off is unknown: it chooses the kernels that run. Use 0 for PyTorch alone; "
        "1 for PyTorch and the C++ kernels on a CPU; "
        "gpu for these and the GPU kernels, never run on a GPU yet: CUDA graphs, flash windows, MLA in Triton.\n"
    )


@pytest.mark.process
def test_the_library_is_silent_and_can_do_without():
    program = (
        "import torch, rehead, rehead.native as native\n"
        "from rehead.attention import GroupedConfig\n"
        "native.disable()\n"
        "assert native.mode() == '0' and 'switched off' in str(native.library('decode'))\n"
        "GroupedConfig(n_query_head=2, n_kv_head=2, head_dim=8).build(16)(torch.randn(1, 8, 16))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    loud = program.replace("native.disable()", "native.build.COMPILERS = ()").split("assert")[0]
    loud += "native.library('decode')"
    done = subprocess.run([sys.executable, "-c", loud], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
