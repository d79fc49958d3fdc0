"""Random faults in every file that rehead reads and did not write: each is read, or refused in one clean line.

`python fuzz.py 1 config=5000 argv=500` reads 5,000 damaged configs and 500 command lines, from seed 1, and prints as
JSON what was wrong. An input is wrong if reading it ends with another status than those of `CLEAN`, more than one line,
more than `SECONDS` of computing or more than `KIB` of memory. A signal ends the process; the input is in `input` then.
Each good file is read first, and must be.
"""

import contextlib
import io
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from corpus import TEXT, folder_of, native_folder, sharded_folder, stock_folder  # beside this file
from damage import command_line, damaged_json, damaged_lines, damaged_weights, damaged_yaml
from families_corpus import GOOD as KINDS

import rehead
from rehead.checkpoint.files.publish import _write_manifest
from rehead.cli import main
from rehead.conversion.certificate import Certificate
from rehead.conversion.page import page
from rehead.errors import ReheadError
from rehead.training.metrics import records

CLEAN = (0, 3, 4)
"""Exit statuses of a damaged file."""
CLEAN_OF = {"argv": (0, 2, 3, 4, 5, 7), "yaml": (0, 2, 3, 4), "state": (0, 2, 3, 4)}
"""Of what a user types, and of the text's hash, which another text does not have."""
SECONDS, KIB = 2.0, 300 * 1024
Damage = Callable[[bytes, random.Random], bytes]
Read = Callable[[Path], int | None]


def typed(*words: str) -> int:
    """Run a command line; return its status, of which it says one line."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        status = main([*words])
    said = [
        line
        for line in err.getvalue().splitlines()
        if re.match("rehead: (?!warning: |no calibration text: )", line)
    ]
    assert (len(said) == 1) == bool(status), said
    return status


def certificate(folder: Path) -> None:
    """Read a certificate as healing does, and write it as its last save does."""
    read = Certificate.read(folder)
    read.to_json(), page(read)


def run_folder(folder: Path) -> None:
    """A run that has trained two steps."""
    small = [
        "model.n_layer=1",
        "model.n_embd=8",
        "model.n_query_head=2",
        "data.block_size=8",
        "trainer.batch_size=2",
    ]
    text = folder.parent / "text.txt"
    text.write_text(TEXT * 40)
    run = [f"data.path={text}", "trainer.max_iters=2", "trainer.eval_batches=1", "trainer.device=cpu"]
    assert typed("train", *small, *run, f"system.work_dir={folder}") == 0


def converted_folder(folder: Path) -> None:
    """A converted model, with its certificate."""
    native_folder(folder.parent / "source")
    to = ["--to", "mqa", "--method", "mean", "--length", "8", "--allow-loss"]
    assert typed("convert", str(folder.parent / "source"), str(folder), *to) == 0


def load(folder: Path) -> None:
    rehead.load(folder)


def load_as_written(folder: Path) -> None:
    """Load a model whose damage the manifest does not tell."""
    rewrite_manifest(folder)
    rehead.load(folder)


def plan(folder: Path) -> int:
    return typed("plan", str(folder), "--json")


def plan_as_written(folder: Path) -> int:
    rewrite_manifest(folder)
    return plan(folder)


def planned(folder: Path) -> int:
    return typed("plan", str(folder / "config.yaml"), "--json")


def tokenizer(folder: Path) -> None:
    read = rehead.load_tokenizer(folder)
    assert isinstance(read.decode(read.encode(TEXT)), str)


def metrics(folder: Path) -> None:
    for _ in records(folder / "metrics.jsonl"):
        pass


def resumed(folder: Path) -> int:
    return typed("train", f"system.work_dir={folder}", "trainer.resume=True", "trainer.max_iters=3")


def read_command_line(folder: Path) -> int:
    """Run the command line in the file `words`, where a model and a text are."""
    with contextlib.chdir(folder):
        return typed(*json.loads(Path("words").read_text()))


def typing_folder(folder: Path) -> None:
    """A model, a text, and a command line."""
    stock_folder(folder / "model")
    (folder / "text.txt").write_text(TEXT * 40)
    (folder / "words").write_text('["plan", "model"]')


def rewrite_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").unlink()
    _write_manifest(folder, 0o644)


def resumed_as_written(folder: Path) -> int:
    """Resume a state whose damage the manifest does not tell."""
    rewrite_manifest(folder / "checkpoints" / "step-000002")
    return resumed(folder)


Fuzzed = tuple[Callable[[Path], None], str, Damage, Read]
LAST = Path("input").resolve()
FUZZED: dict[str, Fuzzed] = {
    "argv": (
        typing_folder,
        "words",
        lambda _, rng: json.dumps(command_line(rng)).encode(),
        read_command_line,
    ),
    "header": (stock_folder, "model.safetensors", damaged_weights, load),
    "index": (sharded_folder, "model.safetensors.index.json", damaged_json, load),
    "config": (stock_folder, "config.json", damaged_json, plan),
    **{f"config-{kind}": (folder_of(kind), "config.json", damaged_json, plan) for kind in KINDS},
    "config-loaded": (stock_folder, "config.json", damaged_json, load),
    "native-loaded": (native_folder, "config.json", damaged_json, load_as_written),
    "native": (native_folder, "config.json", damaged_json, plan_as_written),
    "manifest": (native_folder, "MANIFEST.json", damaged_json, load),
    "tokenizer": (stock_folder, "tokenizer.json", damaged_json, tokenizer),
    "certificate": (converted_folder, "conversion.json", damaged_json, certificate),
    "metrics": (run_folder, "metrics.jsonl", damaged_lines, metrics),
    "yaml": (run_folder, "config.yaml", damaged_yaml, planned),
    "metrics-resumed": (run_folder, "metrics.jsonl", damaged_lines, resumed),
    "state": (run_folder, "checkpoints/step-000002/state.json", damaged_json, resumed_as_written),
    "moments": (run_folder, "checkpoints/step-000002/state.safetensors", damaged_weights, resumed_as_written),
}


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, in KiB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def wrong(read: Read, folder: Path, clean: tuple[int, ...] = CLEAN) -> str:
    """Read; return what was wrong with that, or nothing."""
    before, begun = memory("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")
    signal.setitimer(signal.ITIMER_PROF, 10 * SECONDS)  # rather an end than a reader that computes for ever
    fault = ""
    try:
        status = read(folder) or 0
        fault = "" if status in clean else f"status {status}"
    except ReheadError as error:
        text = str(error)
        if error.exit_code not in clean or "\n" in text:
            fault = f"{type(error).__name__}: {text!r:.200}"
    except BaseException as error:
        fault = f"{type(error).__name__}: {error!s:.200}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    if (seconds := time.process_time() - begun) > SECONDS:
        fault += f" {seconds:.1f} s"
    if (more := memory("VmHWM") - before) > KIB:
        fault += f" {more // 1024} MiB"
    return fault


def fuzz(name: str, count: int, seed: int) -> dict[str, str]:
    """Read `count` damaged files; return the faults, each with the beginning of the file's text."""
    make, file, damage, read = FUZZED[name]
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, folder = Path(place, "good"), Path(place, "model")
        make(whole)
        good = (whole / file).read_bytes()
        for number in range(-1, count):
            bad = damage(good, random.Random(f"{name} {seed} {number}")) if number >= 0 else good
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            (folder / file).write_bytes(bad)
            LAST.write_bytes(bad)
            if number < 0:
                assert not read(folder), f"the good {file} is refused"
            elif fault := wrong(read, folder, CLEAN_OF.get(name, CLEAN)):
                faults[f"{name} {seed} {number}: {fault}"] = repr(bad)[:400]
    return faults


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    counts = {name: int(count) for name, _, count in (word.partition("=") for word in sys.argv[2:])}
    found = [fuzz(name, count, int(sys.argv[1])) for name, count in counts.items()]
    print(
        json.dumps(
            {"inputs": counts, "wrong": {k: v for faults in found for k, v in faults.items()}}, indent=1
        )
    )
