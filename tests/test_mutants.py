"""Faults put into a copy of the source, one at a time: the test named beside each fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rehead

SOURCE = Path(rehead.__file__).parent
ROOT = Path(__file__).parents[1]
CONTRACT, GENERATION, ATTACKS = (
    "contract/test_attention.py",
    "contract/test_generation.py",
    "checkpoint/test_attacks.py",
)
MUTANTS = {  # file, source, fault, test file, and which of its tests
    "a window of one key more": (
        "attention/mask.py", "key > query - window", "key >= query - window", CONTRACT, "window",
    ),
    "the next token is seen": ("attention/mask.py", "key <= query", "key <= query + 1", CONTRACT, "future"),
    "a chunk's mask from the top left": (
        "attention/mask.py", "self.n_key - self.n_query if self.causal else 0", "0", CONTRACT, "uneven_chunks",
    ),
    "padding is seen": (
        "attention/mask.py", " & (key_positions >= 0)[:, None, :]", "", CONTRACT, "padding",
    ),
    "no scale": ("attention/kernels/definition.py", "query, key) * scale", "query, key)", CONTRACT, "any_kernel"),
    "a row without keys is not 0": (
        "attention/kernels/definition.py", ".masked_fill(~sees, 0.0)", "", CONTRACT, "biases",
    ),
    "heads in the order of repeat": (
        "attention/kernels/definition.py", "query.unflatten(2, (key.shape[2], -1))",
        "query.unflatten(2, (-1, key.shape[2])).transpose(2, 3)", "attention/test_grouped.py", "",
    ),
    "dropout in eval mode": (
        "attention/base.py", "self.config.attn_pdrop if self.training else 0.0", "self.config.attn_pdrop",
        CONTRACT, "dropout",
    ),
    "a cached token in the next row": (
        "attention/cache.py", "NextRow((self.length - 1) % self._n_rows", "NextRow(self.length % self._n_rows",
        "contract/test_steps.py", "program_is_forward",
    ),
    "a position too early after padding": (
        "attention/cache.py", "torch.arange(1, n_token + 1", "torch.arange(0, n_token", CONTRACT, "ragged",
    ),
    "a rotation that mirrors": (
        "attention/rope.py", "torch.cat([-sin, sin], dim=-1)", "torch.cat([sin, sin], dim=-1)",
        "attention/test_rope.py", "",
    ),
    "absorbed where it was not asked for": (
        "attention/latent.py", 'return "half absorbed" if self.config.rebuilds_keys else "absorbed"',
        'return "absorbed"', CONTRACT, "cached_is_uncached",
    ),
    "llama.cpp's order of rotated pairs is kept": (
        "checkpoint/gguf/names.py", "rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(rows.shape)",
        "rows", "checkpoint/test_gguf.py", "",
    ),
    "rotated pairs are written in our order": (
        "checkpoint/gguf/architectures.py",
        "rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(rows.shape)", "rows",
        "checkpoint/test_gguf_export.py", "every_tensor",
    ),
    "a full context begins late": (
        "generation.py", "-(-(length - self.limit) // stride) * stride", "(length - self.limit) // stride * stride",
        GENERATION, "context",
    ),
    "a row is drawn from its padding": ("generation.py", "sizes - 1)", "-1)", GENERATION, "ragged"),
    "32 bits of a seed": ("generation.py", "if seed < TORCH_SEEDS:", "if True:", GENERATION, "seeds"),
    "one token too many in top_p": ("sampling.py", "before >= least", "before > 1", "test_sampling.py", "top_p"),
    "logits that are not finite are drawn": (
        "sampling.py", "if not math.isfinite(logits.sum(dtype=torch.float64)):", "if False:",
        "test_sampling.py", "finite",
    ),
    "targets are inputs": (
        "data/batches.py", "inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()",
        "inputs, targets = windows[:, :-1].contiguous(), windows[:, :-1].contiguous()", "test_data.py", "",
    ),
    "accumulated batches are summed": (
        "training/loop.py", " / options.grad_accumulation", "", "training/test_run.py", "accumulated",
    ),
    "a step that is not finite is taken": (
        "training/loop.py", "if not (math.isfinite(loss) and math.isfinite(norm)):", "if False:",
        "training/test_run.py", "finite",
    ),
    "random states are not restored": (
        "training/state.py", 'torch.set_rng_state(states["rng.torch"])', "pass",
        "training/test_run.py", "uninterrupted",
    ),
    "later records are kept on resume": (
        "training/folder.py", '(step is None or record["step"] <= step)', "True",
        "training/test_run.py", "after_a_crash",
    ),
    "files are not flushed": (
        "checkpoint/files/publish.py", "        sync(path)\n        if", "        if",
        ATTACKS, "power or flush",
    ),
    "the folder is not flushed": (
        "checkpoint/files/publish.py", "    sync(manifest)\n    sync(aside)\n", "    sync(manifest)\n",
        ATTACKS, "power",
    ),
    "the rename is not flushed": (
        "checkpoint/files/publish.py", "                sync(folder.parent)\n", "                pass\n",
        "checkpoint/test_publish.py", "flushed",
    ),
    "sizes are checked and bytes are not": (
        "checkpoint/files/publish.py", " or sha256(path) != digest", "", ATTACKS, "flipped",
    ),
    "two writers in one run": (
        "data/hold.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", ATTACKS, "two_starts",
    ),
    "tags in YAML": ("config/strict_yaml.py", "if event.tag is not None:", "if False:",
        "config/test_flags.py", "refused_files"),
    "escapes reach the terminal": (
        "report/text.py", "letter in SHOWN or letter.isprintable()", "True",
        "cli/test_loading.py", "commands_the_terminal",
    ),
    "all ranks read the first one's rows": (
        "training/distributed.py", "part[self.rank :: self.world]", "part[0 :: self.world]",
        "training/test_distributed.py", "train_as_one_and_resume",
    ),
    "a tokens file that is cut is read": (
        "data/tokens.py", "file.size() < len(file)", "False", "training/test_run.py", "cut_while",
    ),
}  # fmt: skip


def status_of(source, test, which):
    """Exit status of the tests, with this source."""
    words = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", f"tests/{test}"]
    words += ["--jaxtyping-packages=", "-m", "not slow", *(["-k", which] if which else [])]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_caught(name, tmp_path):
    file, sound, fault, test, which = MUTANTS[name]
    copy = tmp_path / "rehead"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / file).read_text()
    assert text.count(sound) == 1
    (copy / file).write_text(text.replace(sound, fault))
    status, said = status_of(tmp_path, test, which)
    assert status == 1, said  # 1: tests failed; others: none ran, or not even that


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("test", "which"), sorted({row[-2:] for row in MUTANTS.values()}))
def test_without_a_fault_they_pass(test, which, tmp_path):
    """In the same kind of copy: so it is the fault that they see."""
    shutil.copytree(SOURCE, tmp_path / "rehead", ignore=shutil.ignore_patterns("__pycache__"))
    status, said = status_of(tmp_path, test, which)
    assert status == 0, said


def test_every_fault_is_one():
    """Its place is in the source as it is now."""
    for name, (file, sound, fault, test, _) in MUTANTS.items():
        assert (SOURCE / file).read_text().count(sound) == 1, name
        assert sound != fault
        assert (ROOT / "tests" / test).is_file(), name
    assert len(MUTANTS) >= 25
