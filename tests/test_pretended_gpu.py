"""test_on_gpu.py on a GPU that is not there, in a process of its own: PyTorch looks for a GPU once."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pretended_gpu

HERE = Path(__file__).parent
AT_LEAST = 55


@pytest.mark.process
@pytest.mark.first
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler for the library that pretends")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has a runtime for GPUs of its own")
def test_every_case(tmp_path):
    environment = {
        **os.environ,
        "PRETENDED_GPU": str(pretended_gpu.build(tmp_path)),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    options = "-p pretended_gpu -p no:cacheprovider -n 0 -o addopts= -q --timeout=300"
    cases = [str(HERE / "test_on_gpu.py")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), *cases],
        env=environment, cwd=HERE.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > AT_LEAST
    assert "skipped" not in run.stdout
